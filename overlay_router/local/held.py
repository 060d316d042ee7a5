"""Operations that wait for their data, or for others, in memory: each key may have so many, and so many bytes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, TypeVar

from stageout.core import log
from stageout.overlay.wire.messages import Operation

#: Of one key.
MOST, MOST_BYTES = 8192, 16 * 1024 * 1024
#: A PUBLISH that nobody has asked to send data for waits so long; then its sender is told that it is unknown here.
DATALESS_S = 600
T = TypeVar("T")
Key = tuple[str, int]


class _Share(NamedTuple):
    """Room that one operation takes up. :param since: Unix time in seconds."""

    owner: str
    size_bytes: int
    since: float
    is_publish: bool


class HeldOperations(dict[Key, T]):
    """By origin and number. Add by :meth:`put` only."""

    def __init__(self) -> None:
        super().__init__()
        self._shares: dict[Key, _Share] = {}
        self._counts, self._bytes = Counter[str](), Counter[str]()
        self._full: set[str] = set()

    def put(self, operation: Operation, peer: str, one: T, now: float) -> bool:
        """Hold an operation; False when the key of the peer has too many already: it asks again.

        :param peer: ``KEY/ORIGIN``. :param now: Unix time in seconds.
        """
        key, owner = (operation.origin, operation.seq), peer.partition("/")[0]
        if key not in self:
            size_bytes = _size_bytes(operation)
            if self._counts[owner] >= MOST or self._bytes[owner] + size_bytes > MOST_BYTES:
                self._complain(owner)
                return False
            self._shares[key] = _Share(owner, size_bytes, now, operation.kind == "publish")
            self._counts[owner] += 1
            self._bytes[owner] += size_bytes
        self[key] = one
        return True

    def release(self, key: Key) -> None:
        """Hold it no more; twice is harmless."""
        share = self._shares.pop(key, None)
        if share is None:
            return
        del self[key]
        self._counts[share.owner] -= 1
        self._bytes[share.owner] -= share.size_bytes
        self._full.discard(share.owner)

    def drop_dataless(self, now: float, live: Collection[Key]) -> None:
        """Release what waits for data that nobody sends. :param live: operations whose data come."""
        late = (key for key, one in self._shares.items() if one.is_publish and one.since + DATALESS_S < now)
        for key in [key for key in late if key not in live]:
            log.warn("operation-dropped", origin=key[0], seq=key[1], reason="its sender has sent no data for it")
            self.release(key)

    def _complain(self, owner: str) -> None:
        if owner not in self._full:
            self._full.add(owner)
            log.warn("limit-reached", key=owner, operations=self._counts[owner], bytes=self._bytes[owner],
                     reason="so many of its operations wait for data or for others")  # fmt: skip


def _size_bytes(operation: Operation) -> int:
    """In memory."""
    values = list(vars(operation).values())
    lists = [item for value in values if isinstance(value, tuple) for item in value]
    return sum(map(sys.getsizeof, values + lists))
