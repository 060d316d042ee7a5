"""Lots that somebody reserved: space on the destination's disk, held by a file until puts use it or the time is over.

The disk really allocates a reservation, so nobody else can have it meanwhile. A put that names a lot takes its bytes
out of it. Use from the thread of the destination.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from overlay_router.local.store import Store, StoredLot
from overlay_router.local.trash import left_for_later
from overlay_router.local.tree import NO_ROOM, OWN, Tree
from overlay_router.rules import lots
from overlay_router.rules.lots import Spool
from stageout.core import durable, log
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Open, Reserved

MAX_LIFETIME_S = 7 * 24 * 3600
MAX_OF_A_KEY = 64


class Reservations:
    """The lots of one destination."""

    def __init__(self, store: Store, tree: Tree, now: Callable[[], int]) -> None:
        self._store, self._now = store, now
        self._place = tree.root / OWN / "lots"
        self._place.mkdir(mode=0o700, exist_ok=True)

    def decide(self, ask: messages.Lot, key: str) -> Reserved:
        """Reserve, renew or release; durable on return.

        :param key: name of the asker's: what one key has reserved, no other can touch.
        """
        held = self._store.lot(ask.lot)
        if held is not None and held.key != key:
            return _refused(ask, ErrorClass.PERMISSION_DENIED, "this lot is not yours")
        if ask.action == "reserve":
            return self._reserve(ask, key, held)
        if held is None:
            return _refused(ask, ErrorClass.NOT_FOUND, "there is no such lot (any more): reserve one")
        if ask.action == "release":
            self._drop([held])
            return Reserved(ask.lot, 0, 0)
        renewed = held._replace(until=self._until(ask))
        self._store.keep_lot(renewed)
        return Reserved(ask.lot, held.left_bytes, renewed.until)

    def of(self, key: str) -> list[StoredLot]:
        """Return what a key has reserved, and has time left."""
        return [held for held in self._store.lots() if held.key == key and held.until >= self._now()]

    def take(self, ask: Open, tid: int, key: str) -> bool:
        """Make room for a transfer out of the lot that it names; once for each. False when that cannot be."""
        if self._store.has_taken(tid):
            return True
        held = self._store.lot(ask.lot)
        if held is None or held.key != key or held.until < self._now():
            return False
        inside = not held.path or ask.path == held.path or ask.path.startswith(held.path + "/")
        if not inside or ask.size_bytes > held.left_bytes:
            return False
        left = held._replace(left_bytes=held.left_bytes - ask.size_bytes)
        self._store.take_from_lot(left, tid, ask.size_bytes)
        with durable.step("overlay-lot-trim"):
            os.truncate(self._place / ask.lot, left.left_bytes)
        return True

    def give_back(self, tid: int) -> None:
        """A transfer found no room in spite of its lot, or has lost its data: its part belongs to the lot again."""
        if self._store.has_taken(tid):
            self._store.give_back(tid)
            self.refill()

    def keep_taken(self, tids: Callable[[int], bool | None]) -> None:
        """Settle the parts of operations, which are below 0.

        :param tids: tells whether one was used, None while it is under way.
        """
        for tid in self._store.taken_below_zero():
            was_used = tids(tid)
            if was_used is not None:
                self.settle(tid, was_used)

    def settle(self, tid: int, was_used: bool) -> None:
        """An operation that took from a lot has ended; its data are removed."""
        if was_used:
            self._store.drop_taken(tid)
        else:
            self.give_back(tid)

    def refill(self) -> None:
        """Hold the space again that ended transfers have given back, after their data were removed."""
        for held in self._store.lots():
            if (self._place / held.lot).stat().st_size < held.left_bytes:
                self._hold(held)

    def expire(self) -> None:
        """Give back what nobody has renewed in time."""
        self._drop([held for held in self._store.lots() if held.until < self._now()])

    def _reserve(self, ask: messages.Lot, key: str, held: StoredLot | None) -> Reserved:
        if held is not None:  # asked again
            return Reserved(ask.lot, held.left_bytes, held.until)
        known = self._store.lots()
        if sum(one.key == key for one in known) >= MAX_OF_A_KEY:
            return _refused(ask, ErrorClass.QUOTA_EXCEEDED, f"{MAX_OF_A_KEY} lots are reserved already: release one")
        room = os.statvfs(self._place)
        spool = Spool(room.f_bavail * room.f_frsize, {})
        again_s = lots.reserve(spool, ask.lot, ask.size_bytes, self._now())
        if again_s is not None:
            return _refused(ask, ErrorClass.NO_SPACE_REMOTE, f"no room for {ask.size_bytes} bytes", int(again_s))
        made = StoredLot(ask.lot, key, ask.path, ask.size_bytes, self._until(ask))
        try:
            with durable.step("overlay-lot-allocate"):
                self._allocate(made)
        except OSError as problem:
            (self._place / ask.lot).unlink(missing_ok=True)
            if problem.errno not in NO_ROOM:
                raise
            return _refused(ask, ErrorClass.NO_SPACE_REMOTE, f"no room for {ask.size_bytes} bytes", 5)
        self._store.keep_lot(made)
        return Reserved(ask.lot, made.left_bytes, made.until)

    def _allocate(self, held: StoredLot) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._place / held.lot, flags, 0o600)
        try:
            if held.left_bytes:
                os.posix_fallocate(descriptor, 0, held.left_bytes)
            os.ftruncate(descriptor, held.left_bytes)
        finally:
            os.close(descriptor)

    def _until(self, ask: messages.Lot) -> int:
        return self._now() + min(ask.lifetime_s, MAX_LIFETIME_S)

    def _drop(self, gone: list[StoredLot]) -> None:
        for held in gone:
            self._store.drop_lot(held.lot)
            durable.unlink("overlay-lot-free", self._place / held.lot)

    def recover(self) -> None:
        """After a start, when what nobody owns was removed: every lot has its file, and every file its lot."""
        known = {held.lot: held for held in self._store.lots()}
        for path in self._place.iterdir():
            if path.name not in known:
                with left_for_later():
                    path.unlink()
        for held in known.values():
            self._hold(held)

    def _hold(self, held: StoredLot) -> None:
        try:
            with durable.step("overlay-lot-refill"):
                self._allocate(held)
        except OSError as problem:  # somebody else has filled the disk: puts will be told
            log.warn("lot-allocation-failed", lot=held.lot, left_bytes=held.left_bytes, problem=problem)


def _refused(ask: messages.Lot, kind: ErrorClass, message: str, retry_after_s: int = -1) -> Reserved:
    return Reserved(ask.lot, 0, 0, kind.code, message, retry_after_s)
