"""The right to deliver to a place alone, among gateways that share a destination (rule 10).

A holder kills its plugin a quarter of the lease before it runs out, and nobody else has the place for another quarter
after that. Times are seconds of the boot clock (:func:`stageout.core.clock.boot_clock_s`): neither side's
wall clock counts, and a suspended machine does not take its lease for a younger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stageout.core import durable
from stageout.overlay.wire.messages import Lease, Leased

LEASE_S = 120
KEPT_S = LEASE_S // 4
"""What a holder leaves unused, and what everybody else waits longer."""
#: In memory; each takes some hundred bytes.
_MOST = 200_000


class _Lease(NamedTuple):
    holder: str
    until_s: float


class Leases:
    """The leases that a router gives. They are in memory only.

    :param mark: file that says that leases were ever given here: those of before a start are not known, so nothing new
        is given for as long as they could run. :param now_s: of the start.
    """

    def __init__(self, mark: Path, now_s: float) -> None:
        self._mark, self._marked = mark, mark.exists()
        self._quiet_until_s = now_s + (LEASE_S + KEPT_S if self._marked else 0)
        self._leases: dict[str, _Lease] = {}

    def answer(self, key: str, ask: Lease, now_s: float) -> Leased:
        """The answer to a gateway. :param key: that it has proved: what one has, no other can give back."""
        holder = f"{key}/{ask.holder}"
        if ask.lifetime_s:
            return Leased(self.take(holder, ask.places, now_s, ask.held))
        self.give_back(holder, ask.places)
        return Leased(())

    def take(self, holder: str, places: Sequence[str], now_s: float, held: bool) -> tuple[int, ...]:
        """Give or renew leases of some places.

        :param held: the holder says that it has them, and that they have not run out.
        :returns: positions of those that are the holder's now.
        """
        if not self._marked:
            durable.write_file("overlay-lessor", self._mark, b"")
            self._marked = True
        if len(self._leases) + len(places) > _MOST:
            self._leases = {place: lease for place, lease in self._leases.items() if lease.until_s >= now_s}
        granted = tuple(number for number, place in enumerate(places) if self._may(holder, place, now_s, held))
        for number in granted:
            self._leases[places[number]] = _Lease(holder, now_s + LEASE_S + KEPT_S)
        return granted

    def give_back(self, holder: str, places: Sequence[str]) -> None:
        """The holder has ended its plugin."""
        for place in places:
            if place in self._leases and self._leases[place].holder == holder:
                del self._leases[place]

    def _may(self, holder: str, place: str, now_s: float, held: bool) -> bool:
        lease = self._leases.get(place)
        if lease is not None and lease.until_s >= now_s:
            return lease.holder == holder
        return len(self._leases) < _MOST and (held or now_s >= self._quiet_until_s)
