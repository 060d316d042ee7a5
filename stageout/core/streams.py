"""The seam between the manager and what chooses numbers of files and streams for each server.

The manager asks one object with four methods (:class:`Streams`). The core has one of its own, :class:`FixedStreams`: it
always uses as much as it may. ``stageout/tuning`` has the other, which adapts and keeps to grants of the policy
service. An installation can leave that part out: the manager loads it by name when the configuration needs it. Pure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

FIXED = "fixed"
#: Reason of the fixed choice.
ALL_AT_ONCE = "All that may run at once (STAGEOUT_TUNING = fixed)."

#: Keeps work going until it is cancelled, again after a fault. Takes a name for the log, and the work.
Supervise = Callable[[str, Callable[[], Awaitable[None]]], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Knobs:
    """Parameters of an adaptive client.

    :param initial: C_i, transfers at the start. :param maximum: C_max, most transfers at once.
    :param parallelism: p, streams per transfer. :param delay: d, finished transfers between two steps.
    :param increment: Delta, transfers per step.
    :param threshold: T, change of the rate that counts, in the unit of the rates.
    """

    initial: int
    maximum: int
    parallelism: int
    delay: int
    increment: int
    threshold: float


@dataclass(frozen=True, eq=False)
class ActiveTransfer:
    """One call of a plugin. :param concurrency: files at once. :param parallelism: streams of each."""

    server: str
    owner: str
    concurrency: int
    parallelism: int
    begun_s: float

    @property
    def streams(self) -> int:
        """Return the most streams that it may open."""
        return self.concurrency * self.parallelism


@dataclass(frozen=True)
class Choice:
    """The transfers to one server at once, all calls of plugins together.

    :param tuning: name of the controller. :param files_at_once: 0: nothing may start. :param streams_each: of a file.
    :param streams: that may be used. :param reason: of ``files_at_once``. :param grant: where ``streams`` comes from.
    """

    tuning: str
    files_at_once: int
    streams_each: int
    streams: int
    reason: str
    grant: str = "No policy service: the limits of this node."


class Streams(Protocol):
    """The chooser for all servers of a node. All methods are called from the manager's event loop.

    :cvar counts_waiting: it needs the number of files that wait.
    """

    counts_waiting: bool

    def choose(self, server: str, parallelism: int, waiting: int | None = None) -> Choice:
        """Return how much may go to a server now.

        :param parallelism: most streams of a file there. :param waiting: files for it that are due, if counted.
        """

    def started(self, transfer: ActiveTransfer) -> None:
        """Count a call of a plugin that begins."""

    def finished(self, transfer: ActiveTransfer, rate_mb_s: float | None) -> None:
        """Count a call that has ended.

        :param rate_mb_s: of all transfers to this server together, when this call completes a measurement.
        """

    async def close(self) -> None:
        """Give back what was granted."""


class FixedStreams:
    """Use all that the limits of the node allow, at once."""

    counts_waiting = False

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs

    def choose(self, server: str, parallelism: int, waiting: int | None = None) -> Choice:
        """Return the most that the limits allow."""
        most = self._knobs.maximum
        return Choice(
            tuning=FIXED, files_at_once=most, streams_each=parallelism, streams=most * parallelism, reason=ALL_AT_ONCE
        )

    def started(self, transfer: ActiveTransfer) -> None:
        """Do nothing."""

    def finished(self, transfer: ActiveTransfer, rate_mb_s: float | None) -> None:
        """Do nothing: no rate changes the choice."""

    async def close(self) -> None:
        """Do nothing: nothing was granted."""
