"""A sandbox manager as a daemon in this process, with a collector in memory: what its tests share."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from manager_site import SCHEDD, UID, Site

from sandbox_manager.daemon import Daemon, Dependencies
from sandbox_manager.intake.peers import Peer
from sandbox_manager.report import reporter
from stageout.condor.bindings import CondorError
from stageout.core.clock import SystemClock
from stageout.core.config import Settings
from stageout.core.signing import SigningKey
from stageout.core.sockets import connect_to
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import (
    MANAGER_AD,
    Action,
    AgentNotice,
    Order,
    OrderSheet,
    Report,
    Run,
    check_signature,
    notice_ad,
    orders_ad,
    payload_of,
    read_report,
)
from stageout.wire.handoff import OfferedFile, offer_frames, receive_frame, send_frame, socket_name
from tests.polling import until

AGENT_KEY = SigningKey(b"a" * 32)


class FakeCollector:
    """A collector in memory, with an agent in it that confirms whatever is reported as accepted."""

    def __init__(self) -> None:
        self.refuses = self.silent = False
        self.confirms = True
        self.key = AGENT_KEY
        self.manager_key = ""
        self.reports: list[Report] = []
        self.extra: list[dict[str, Any]] = []
        self._orders: dict[tuple[Run, tuple[str, ...]], Order] = {}
        self.looks = self._notices = 0
        self.patience_s = 0.0
        self.empty = False

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        self.looks += 1
        if self.silent:
            raise CondorError("no answer")
        if self.empty:
            return []
        self._notices += 1
        orders = tuple(self._orders.values())
        return [
            notice_ad(AgentNotice(SCHEDD, SCHEDD, self.key.public, self._notices, int(time.time())), self.key),
            *([orders_ad(OrderSheet(SCHEDD, manager, 1, orders, self.manager_key), self.key)] if orders else []),
            *self.extra,
        ]

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        if self.refuses:
            await asyncio.sleep(self.patience_s)
            raise CondorError("access level DAEMON")
        report = read_report(payload_of(ad))
        check_signature(MANAGER_AD, ad, report.key)
        self.manager_key = report.key
        self.reports.append(report)
        for box in report.sandboxes:
            key = (box.run, box.tickets)
            if self.confirms and box.state == "Accepted" and key not in self._orders:
                number = len(self._orders) + 1
                self._orders[key] = Order(
                    number, Action.CONFIRM, box.job, box.number, box.tickets, box.files_total, owner=box.owner
                )

    async def close(self) -> None:
        pass

    def last(self) -> dict[str, str]:
        """State of each run in the newest report."""
        return {box.run.job_id: box.state for box in self.reports[-1].sandboxes} if self.reports else {}


class FakeIdentity:
    """Everybody who connects is run 1 of job 1.0."""

    async def identify(self, peer: Peer) -> RunFacts:
        return RunFacts(
            run=Run(f"{SCHEDD}#1.0#1700000000", 1, "alice@test"), user="alice", uid=UID, gid=UID,
            slot=SlotKey("ep", 1, 1), slot_name="slot1_1@ep", guard=True,
        )  # fmt: skip


class QuickSettings(Settings):
    """The manager looks at its orders more often than a setting allows: each look is a wait of most tests."""

    def number(self, name: str) -> float:
        """0.1 s between two looks."""
        return 0.1 if name == "STAGEOUT_ORDER_INTERVAL" else super().number(name)


class Served:
    """A daemon in this process."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.collector = FakeCollector()
        self.settings = {
            **site.knobs,
            "EXECUTE": str(site.base / "execute"),
            "STAGEOUT_SPOOL": str(site.base / "spool"),
            "FILETRANSFER_PLUGINS": f"/nothing/here, {site.plugin}",
            "FULL_HOSTNAME": "ep.test",
        }
        around = Dependencies(self._read, self.collector, SystemClock(), lambda settings: FakeIdentity())
        self.daemon = Daemon(around)

    def _read(self) -> Settings:
        return QuickSettings(self.settings.get)

    @property
    def run_dir(self) -> Path:
        return self.site.base / "spool" / "run"

    @property
    def socket(self) -> Path:
        return self.run_dir / socket_name(str(self.site.base / "execute"))

    def hand_off(self, *urls: str) -> dict[str, Any]:
        """The steps of a plugin; returns the manager's last word."""
        files = [OfferedFile(url, f"{self.site.base}/execute/dir_1/scratch/{url[-1]}", 3) for url in urls]
        with socket.socket(socket.AF_UNIX) as talk:
            talk.settimeout(10)
            talk.connect(str(self.socket))
            for frame in offer_frames(files, str(self.site.plugin)):
                send_frame(talk, frame)
            go = receive_frame(talk)
            if go["op"] != "go":
                return go
            for position in range(len(urls)):
                path = Path(go["directory"]) / str(position)
                path.write_bytes(b"abc")
                os.chown(path, UID, -1)
            send_frame(talk, {"op": "linked", "files": len(urls)})
            return receive_frame(talk)

    def ask(self, **question: Any) -> list[dict[str, Any]]:
        """Ask on the control socket."""
        answers = []
        with socket.socket(socket.AF_UNIX) as talk:
            talk.settimeout(10)
            connect_to(talk, self.run_dir / "control")
            send_frame(talk, question)
            while True:
                answers.append(receive_frame(talk))
                if answers[-1]["op"] in ("end", "metrics", "refuse"):
                    return answers


@asynccontextmanager
async def served(site: Site) -> AsyncIterator[Served]:
    """A daemon that accepts, reports at once, and is stopped at the end."""
    found = Served(site)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reporter, "_LEAST_INTERVAL_S", 0.05)
        task = asyncio.ensure_future(found.daemon.serve())
        try:
            await until(lambda: task.done() or (found.socket.exists() and found.collector.reports), "the daemon")
            yield found
        finally:
            found.daemon.stop(fast=True)
            await task


async def in_thread(work: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


async def accepted(node: Served, *urls: str) -> dict[str, Any]:
    """Hand off as soon as the daemon has heard of the agent."""
    answer: dict[str, Any] = {}

    async def is_accepted() -> bool:
        answer.update(await in_thread(node.hand_off, *urls))
        return bool(answer["op"] == "accepted")

    await until(is_accepted, lambda: f"a hand-off: {answer}")
    return answer["receipt"]
