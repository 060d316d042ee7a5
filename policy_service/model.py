"""The types that the parts of the service share: leases and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from stageout.core.errors import StageoutError
from stageout.tuning.policies import Grant


class Refused(StageoutError):
    """A request that cannot be served. :param status: of HTTP; the text says what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Lease:
    """Streams of one client between two sites, for a limited time.

    :param owner: whose token the client came with. :param streams: that it may use.
    :param in_use: that it still used when it last spoke: more than ``streams`` while it shrinks.
    :param wanted: more it could not use. :param turn: see :class:`stageout.tuning.policies.Grant`.
    :param deadline_s: monotonic; the streams are free again after it. :param rate_mb_s: as last reported.
    """

    id: str
    owner: str
    client: str
    source: str
    destination: str
    streams: int
    in_use: int
    wanted: int
    turn: int
    deadline_s: float
    rate_mb_s: float | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Source and destination."""
        return self.source, self.destination

    @property
    def counted(self) -> int:
        """Streams that nobody else can have."""
        return max(self.streams, self.in_use)

    def grant(self, priority: int) -> Grant:
        """As the policies see it. Clients of different owners may have the same name."""
        return Grant(f"{self.owner}/{self.client}", self.counted, self.wanted, self.owner, priority, self.turn)
