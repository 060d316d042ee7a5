"""To which records of its terminal a pack may have been said: what such a terminal has lost is looked for.

1. A pack is said to a terminal only when the records that this one has (their epoch) are recorded here as its own.
2. So after a restart each pack may have been said to these; no record is made for each.
3. When a terminal has other records, those packs are recorded with them that may have been said to the earlier ones.
4. Such a pack goes there only after its files were looked for.

Custodians on the way know by their own records what they have in custody: such a custodian answers that it does not
have a pack.
"""

from __future__ import annotations

from collections.abc import Iterable

from overlay_router.custodians.pack_records import HeldPack, PackRecords, SaidPack
from stageout.overlay.wire.route import next_hop

Key = tuple[str, int]


class PackSaid:
    """By pack. :param held: those in custody at the start."""

    def __init__(self, store: PackRecords, held: Iterable[HeldPack]) -> None:
        self._store, self._hops = store, store.hops()
        known = {one.key: one for one in store.said_packs()}
        #: Packs that were to come again, with their expiry.
        self._withdrawn = {key: one.expires for key, one in known.items()}
        self._stores = {key: one.store for key, one in known.items()}
        #: The records of single packs.
        self._recorded = dict(self._stores)
        #: The packs that the last order may have said, and none before.
        self._first: set[Key] = set()
        for one in held:
            self._withdrawn.pop(one.key, None)
            if not self._stores.get(one.key) and self._store_of(one):
                self._stores[one.key] = self._store_of(one)

    def may_come_again(self, key: Key) -> bool:
        """Tell whether a pack was in custody before, and may have been said."""
        return key in self._withdrawn

    def add(self, held: HeldPack) -> None:
        """It is in custody."""
        self._withdrawn.pop(held.key, None)

    def order(self, held: HeldPack) -> tuple[str, str]:
        """It is about to be said. :return: the records that it may have been said to before, and those that it may be.

        Of the first "": to none that are known; of the second: they are to be told first (:meth:`meet`).
        """
        before, now = self._stores.get(held.key, ""), self._store_of(held)
        if before or not now:
            self._first.discard(held.key)
        else:
            self._first.add(held.key)
            self._stores[held.key] = now
        return before, now

    def unsay(self, key: Key) -> None:
        """By the last order it was not."""
        if key in self._first:
            self._first.discard(key)
            self._stores.pop(key, None)

    def meet(self, hop: str, store: str, held: Iterable[HeldPack]) -> None:
        """A terminal has these records: durable on return. :param held: all packs in custody."""
        if self._hops.get(hop) == store:
            return
        found = [self._said(one) for one in held if self._store_of(one) and next_hop(one.terminal)[0] == hop]
        new = [one for one in found if one.store and self._recorded.get(one.key) != one.store]
        self._store.meet(hop, store, new)
        self._hops[hop] = store
        self._recorded.update((one.key, one.store) for one in new)

    def withdraw(self, held: HeldPack, may_be_done: bool) -> None:
        """A damaged pack is not in custody any more, and may come again: durable on return."""
        said = self._said(held) if may_be_done else None
        self._store.withdraw_pack(held.key, said)
        if said:
            self._recorded[held.key] = said.store
            self._withdrawn[held.key] = held.expires
        else:
            self.forget(held.key)

    def forget(self, key: Key) -> None:
        """It has its end, with which that is recorded."""
        self._first.discard(key)
        for known in (self._stores, self._recorded, self._withdrawn):
            known.pop(key, None)

    def expire(self, now: float) -> list[Key]:
        """Forget packs that were to come again, and did not. :param now: Unix time in seconds."""
        over = [key for key, expires in self._withdrawn.items() if expires < now]
        for key in over:
            self.forget(key)
        return over

    def _said(self, held: HeldPack) -> SaidPack:
        return SaidPack(*held.key, self._stores.get(held.key, ""), held.expires)

    def _store_of(self, held: HeldPack) -> str:
        """The records that its terminal has, as far as is known; "" also where another custodian is next."""
        hop, onward = next_hop(held.terminal)
        return "" if onward else self._hops.get(hop, "")
