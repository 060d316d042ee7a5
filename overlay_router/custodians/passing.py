"""The data that a custodian sends on while they come in.

Blocks that the next hop has on its disk, and this custodian has not, were *passed*: sent from memory and never written.
Their sender keeps its bytes until the result (``release = delivered``), so they are nobody's only copy. Four rules:

1. STAGED is said of such a block only behind the STAGED of the next hop.
2. The knowledge of them is lost with this process. So is the epoch that OPENED and these STAGED carry: whoever comes
   again hears another one, and what is on the disk here.
3. A block that must be sent again and is not on the disk is *gone*: another epoch begins, and OPENED lists what is not.
4. A sender takes a STAGED of an earlier epoch for nothing, so none that is late can hide a block that is gone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from overlay_router.custodians.spool import Begun, CustodyStore, Key
from stageout.overlay.wire.messages import Open, Operation

_NOTHING: Mapping[int, bytes] = {}


@dataclass(frozen=True)
class Coming:
    """Data that still come in, and may be sent on already.

    :param asked: the OPEN of its sender. :param sender: ``KEY/ORIGIN``, as that says it. :param digest: the kind of
        digests. :param blocks: on the disk here. :param passed: at the next hop only.
    """

    tid: int
    asked: Open
    sender: str
    digest: str
    blocks: list[tuple[int, bytes]]
    file: str
    passed: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """Origin and number of the operation that they are for."""
        return self.asked.origin, self.asked.seq

    @property
    def passes(self) -> bool:
        """Tell whether its sender keeps the bytes, so that they need not be here."""
        return self.asked.release == "delivered"


class Passed:
    """Such blocks of all transfers, by transfer number."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, bytes]] = {}
        self._turns: Counter[int] = Counter()
        self._process = os.urandom(4).hex()

    def of(self, tid: int) -> Mapping[int, bytes]:
        """Positions and digests."""
        return self._blocks.get(tid, _NOTHING)

    def add(self, tid: int, blocks: Mapping[int, bytes]) -> None:
        """The next hop has said STAGED of them."""
        self._blocks.setdefault(tid, {}).update(blocks)

    def drop(self, tid: int, blocks: Iterable[int]) -> None:
        """They are on the disk here, or gone."""
        mine = self._blocks.get(tid, {})
        for block in blocks:
            mine.pop(block, None)

    def epoch(self, store: str, tid: int) -> str:
        """Of the next OPENED. :param store: epoch of the store."""
        return f"{store}.{self._process}.{self._turns[tid]}"

    def begin_anew(self, tid: int, gone: Iterable[int]) -> None:
        """Another epoch: what its next OPENED does not list is not here, nor is what is gone."""
        self.drop(tid, gone)
        self._turns[tid] += 1

    def forget(self, tid: int) -> None:
        """The transfer is closed."""
        self._blocks.pop(tid, None)
        self._turns.pop(tid, None)


class NonePassed(Passed):
    """Where all is on the disk: nothing is lost with the process, so the epoch is that of the store."""

    def epoch(self, store: str, tid: int) -> str:
        """As of :class:`Passed`."""
        return store


class SentOn:
    """The operations that went on to terminals: data of them may lie there although nobody goes on with them."""

    def __init__(self, store: CustodyStore) -> None:
        self._store = store
        self._begun = {begun.key: begun for begun in store.begun()}

    def find(self, key: Key) -> Begun | None:
        """The data of an operation that may lie at a terminal."""
        return self._begun.get(key)

    def begin(self, one: Begun) -> None:
        """Before the first OPEN there: durable on return."""
        if self._begun.get(one.key) != one:
            self._store.begin(one)
            self.keep(one)

    def keep(self, one: Begun) -> None:
        """It is recorded with the end of its operation (:meth:`CustodyStore.conclude`)."""
        self._begun[one.key] = one

    def answered(self, key: Key) -> None:
        """The terminal has the end of that operation, and no data of it."""
        self._begun.pop(key, None)

    def dropped(self, key: Key) -> None:
        """The terminal has dropped them: durable on return."""
        self._store.dropped(key)
        self.answered(key)

    def strays(self, is_live: Callable[[Key], bool], now: float) -> list[Begun]:
        """The operations that nobody goes on with. An operation that has expired is forgotten: the terminal does so by
        itself."""
        found = [one for one in self._begun.values() if not is_live(one.key)]
        for one in [one for one in found if one.expires < now]:
            self.dropped(one.key)
        return [one for one in found if one.expires >= now]


def may_be_passed(operation: Operation) -> bool:
    """Tell whether the sender of an operation keeps its bytes until the result."""
    return operation.release == "delivered" and operation.copies < 2 and not operation.standby_s
