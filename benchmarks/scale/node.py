"""One sandbox manager for measurements: the daemon itself, with settings from the command line and no collector.

Run as ``python -m scale.node DIRECTORY OWNER PLUGIN``. Its parent plays condor_master. The startd is a list of slots
that costs what the real one costs, and says a new job at each hand-off.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_manager.daemon import Daemon, Dependencies
from sandbox_manager.intake.identity import Identity
from sandbox_manager.intake.peers import Peer
from sandbox_manager.intake.startd import SlotTable, startd_timeout_s
from stageout.core import log
from stageout.core.clock import SystemClock
from stageout.core.config import Settings, mapping_settings
from stageout.core.signing import SigningKey, load_or_make_key
from stageout.model.run import RunFacts
from stageout.wire.custody import AgentNotice, Run, notice_ad

SCHEDD = "schedd.example.org"
SLOTS = 64
#: The time of a busy node's startd for its answer, measured on a pool: 3 to 8 ms.
_STARTD_S = 0.005


class QuietCollector:
    """A collector that knows one agent and takes every ad. :param key: the agent's."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        """The agent's notice."""
        now = int(time.time())
        notice = AgentNotice(SCHEDD, SCHEDD, self._key.public, now, now)
        return [{**notice_ad(notice, self._key), "LastHeardFrom": now}]

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        """Taken."""

    async def close(self) -> None:
        """Nothing to end."""


class NewJobEachTime:
    """The real identification of a peer; only the job is another one each time, as if slots were that fast."""

    def __init__(self, slots: SlotTable) -> None:
        self._identity = Identity(slots)
        self._numbers = itertools.count(1)

    async def identify(self, peer: Peer) -> RunFacts:
        """Facts about the peer's run."""
        facts = await self._identity.identify(peer)
        number = next(self._numbers)
        return replace(
            facts,
            run=Run(f"{SCHEDD}#{number}.0#1700000000", 1, facts.owner),
            slot=facts.slot._replace(dslot_id=number % SLOTS + 1),
        )


def slots(owner: str) -> Sequence[Mapping[str, Any]]:
    """The answer of a startd."""
    time.sleep(_STARTD_S)
    return [
        {
            "Name": f"slot1_{number}@ep.example.org", "SlotID": 1, "DSlotId": number,
            "RemoteUser": f"{owner}@example.org", "RemoteScheddName": SCHEDD, "JobId": f"{number}.0",
            "GlobalJobId": f"{SCHEDD}#{number}.0#1700000000", "NumShadowStarts": 1, "StageOutGuard": True,
        }
        for number in range(1, SLOTS + 1)
    ]  # fmt: skip


def settings_of(home: Path, plugin: str, key: SigningKey) -> Settings:
    """Configuration of the node: nothing is refused for want of room."""
    values = {
        "EXECUTE": str(home / "execute"), "SPOOL": str(home / "lib"), "LOG": str(home / "log"),
        "STAGEOUT_SPOOL": str(home / "spool"), "FULL_HOSTNAME": "ep.example.org", "NUM_CPUS": str(SLOTS),
        "FILETRANSFER_PLUGINS": plugin, "STAGEOUT_DATA_SLOT_DEPTH": "1000000",
        "STAGEOUT_DELIVERY_TIMEOUT": "1000000000",
        "STAGEOUT_HANDOFF_TIMEOUT": "30", "STAGEOUT_AGENT_KEYS": f"{SCHEDD}={key.public}",
        "STAGEOUT_SPOOL_QUOTA_MB": "100000000", "STAGEOUT_RETENTION": "1000000000",
    }  # fmt: skip
    return mapping_settings(values)


async def serve(home: Path, owner: str, plugin: str) -> None:
    """Run until SIGTERM."""
    key = load_or_make_key("agent-key", home / "agent_key")
    settings = settings_of(home, plugin, key)
    around = Dependencies(
        lambda: settings, QuietCollector(key), SystemClock(),
        lambda settings: NewJobEachTime(SlotTable(lambda: slots(owner), startd_timeout_s(settings))),
    )  # fmt: skip
    daemon = Daemon(around)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stop, True)
    await daemon.serve()


def main() -> None:
    """The process."""
    home, owner, plugin = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    log.open_log(logging.FileHandler(home / "log" / "SandboxManagerLog"))
    asyncio.run(serve(home, owner, plugin))


if __name__ == "__main__":
    main()
    os._exit(0)
