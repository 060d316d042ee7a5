"""The seam between the manager and what grants it streams: its contract, and the one place that loads it.

Without ``STAGEOUT_POLICY_URL`` nothing of the policy service's client is loaded, and an installation can leave it out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

from stageout.core.clock import Clock
from stageout.core.config import ConfigError, Settings

#: The client of the policy service.
_CLIENT = "sandbox_manager.scheduling.policy_grants"


class Grants(Protocol):
    """Streams that are granted to this node, for each server that output waits for."""

    def streams(self, server: str) -> int | None:
        """Return the streams that may be used to a server now; None: the node's own limits count."""

    def reason(self, server: str) -> str:
        """Return one sentence about the grant, for people."""

    def note(self, server: str, wanted: int, in_use: int, rate_mb_s: float | None = None) -> None:
        """Note the streams that could be used and those used now. :param rate_mb_s: after a step."""

    async def run(self) -> None:
        """Keep the grants until cancelled."""

    async def close(self) -> None:
        """Give all streams back."""


#: From the name of this node, its clock, and what is called when something else may be used than before.
MakeGrants = Callable[[str, Clock, Callable[[], None]], Grants]


def grants_of(settings: Settings) -> MakeGrants | None:
    """Return what asks the policy service of the configuration for streams; None when there is none.

    :raises ConfigError: it cannot be used.
    """
    if not settings.text("STAGEOUT_POLICY_URL").rstrip("/"):
        return None
    try:
        client = importlib.import_module(_CLIENT)
    except ModuleNotFoundError as problem:
        if problem.name != _CLIENT:
            raise
        raise ConfigError(
            f"STAGEOUT_POLICY_URL: the Python module {_CLIENT} is not installed; remove STAGEOUT_POLICY_URL, "
            "or install all of stageout"
        ) from None
    make: MakeGrants = client.maker(settings)
    return make
