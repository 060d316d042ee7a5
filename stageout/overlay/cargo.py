"""The data to send over routes, and the work of each route."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from stageout.core.units import size
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.links import Claim
from stageout.overlay.wire.messages import Open, Operation
from stageout.overlay.wire.route import Route, shown


class Loan(Protocol):
    """A connection that somebody else sends blocks by. A context manager: at its end it is recalled."""

    def __enter__(self) -> Loan: ...

    def __exit__(self, *exception: object) -> None: ...

    @property
    def is_back(self) -> bool:
        """Tell whether it may be used again."""

    def recall(self) -> None:
        """It is wanted back after the block that leaves now."""

    def wait(self, within_s: float) -> Collection[int]:
        """Blocks that have left since the last call, once there are some, or that time is over.

        :raises TransferFailure: the connection is lost with who had it.
        """

    def rest(self) -> Collection[int]:
        """Blocks that have left and that no call has returned: at the end, those that were told on the way to it."""


class Cargo(Protocol):
    """The data to send."""

    gateway: Gateway
    blocks: int
    connections: int
    most_connections: int

    @property
    def claim(self) -> Claim:
        """The demand on the links."""

    def ask(self) -> Open:
        """The OPEN of this file, the same on every connection."""

    def take(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview | None:
        """Read a block and keep its digest; None where it is not here any more, and comes again.

        :raises TransferFailure: the file is not what it was.
        """

    def lend(self, channel: Channel, tid: int) -> Loan | None:
        """Have somebody else send blocks by a connection that is attached for ``tid``; None: nobody would."""

    def publish(self, tid: int, channel: Channel) -> Operation:
        """The PUBLISH, once every block was read or is STAGED."""

    def count(self, size_bytes: int) -> None:
        """So many more bytes left. :raises TransferFailure: whoever asked for it wants no more."""


@dataclass(frozen=True)
class Share:
    """The work of one route.

    :param problem: why it was lost at last, "" when it was not. :param connections: at the end. :param reason: why so
        many, where a controller has chosen.
    """

    route: Route
    sent_bytes: int
    problem: str = ""
    connections: int = 0
    reason: str = ""


def report(shares: Sequence[Share]) -> str:
    """The work of all routes, in a line."""
    return "; ".join(_did(share) for share in shares)


def _did(share: Share) -> str:
    tuned = f"{share.connections} connections ({share.reason})" if share.reason else ""
    did = (f"{shown(share.route)}: {size(share.sent_bytes)}", tuned, share.problem)
    return ", ".join(part for part in did if part)
