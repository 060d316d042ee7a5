"""The types that the parts of the service share: leases and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from stageout.core.errors import StageoutError
from stageout.tuning.policies import Grant


class RequestRefused(StageoutError):
    """A request that cannot be served. Its text says what to do. :param status: HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Lease:
    """Streams of one client between two sites, for a limited time.

    :param owner: owner of the client's token. :param streams: streams that the client may use.
    :param in_use: streams in the client's last report; more than ``streams`` after a smaller grant.
    :param wanted: most streams that the client can use. :param turn: see :class:`stageout.tuning.policies.Grant`.
    :param deadline_s: end by the monotonic clock; then the streams are free. :param rate_mb_s: last reported rate.
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
        """Streams that count as taken."""
        return max(self.streams, self.in_use)

    def grant(self, priority: int) -> Grant:
        """Return the lease as policies see it. Clients of different owners may have the same name."""
        return Grant(f"{self.owner}/{self.client}", self.counted, self.wanted, self.owner, priority, self.turn)
