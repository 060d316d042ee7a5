"""The gateway's side of leases: asked for, renewed while a plugin runs, and the plugin killed before they run out."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence

from overlay_router.delivery.leases import KEPT_S, LEASE_S
from stageout.core import log
from stageout.core.clock import boot_clock_s
from stageout.core.errors import TransferFailure
from stageout.core.threads import started
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.wire.messages import Lease, Leased

_RENEWALS = 6
#: Threads wait by a clock that stands still while the machine is suspended: so they look at the other one this often.
_LOOK_S = 1.0


class NotLeased(Exception):
    """Somebody else delivers there, or nobody can say who does."""


class Lessee:
    """Asks one router for leases. Its calls block; use from any thread.

    :param lessor: gives who gives them, as it is reached now. :param holder: this gateway, the same after its restarts:
        its plugins of before do not run any more. :param lease_s: their time, as the lessor has it.
    """

    def __init__(
        self, lessor: Callable[[], Gateway], holder: str, lease_s: float = LEASE_S, kept_s: float = KEPT_S
    ) -> None:
        self._lessor, self._holder, self._lease_s, self._kept_s = lessor, holder, lease_s, kept_s

    @contextlib.contextmanager
    def alone(
        self, urls: Sequence[str], stop: Callable[[], None], tell: Callable[[float], None]
    ) -> Iterator[Callable[[], bool]]:
        """While it lasts nobody else delivers to these URLs. Gives what says whether that still holds.

        :param stop: called when that cannot be had any longer; what delivers must have ended within a quarter of the
            lease. :param tell: told, now and whenever it is renewed, when what delivers must have ended whoever
            watches. :raises NotLeased: another has one of them, or the lessor is not reached.
        :raises NoThread: there is none to renew it in.
        """
        places = tuple(hashlib.sha256(url.encode()).hexdigest() for url in urls)
        keeper = _Keeper(self, places, boot_clock_s(), tell)
        answer = self.ask(places, held=False)
        if len(answer.granted) < len(places):
            self._give_back(places)
            raise NotLeased("another gateway delivers there")
        keeper.tell()
        threads = list[threading.Thread]()
        try:
            for work in (keeper.renew, lambda: keeper.watch(stop)):
                threads.append(started(work))
            yield keeper.holds
        finally:
            keeper.over.set()
            for thread in threads:
                thread.join()
            self._give_back(places)

    def ask(self, places: tuple[str, ...], held: bool) -> Leased:
        """One question to the lessor. :raises NotLeased: it does not answer, or refuses."""
        try:
            with Channel(self._lessor()) as channel:
                channel.send(Lease(self._holder, places, int(self._lease_s), held))
                answer = channel.receive()
        except TransferFailure as failure:
            raise NotLeased(f"no lease: {failure}") from None
        if not isinstance(answer, Leased):
            raise NotLeased(f"no lease: {type(answer).__name__} where LEASED was due")
        return answer

    def _give_back(self, places: tuple[str, ...]) -> None:
        with contextlib.suppress(TransferFailure), Channel(self._lessor()) as channel:
            channel.send(Lease(self._holder, places, 0))
            channel.receive()

    @property
    def renew_s(self) -> float:
        """Between renewals."""
        return self._lease_s / _RENEWALS

    def good_until_s(self, asked_s: float) -> float:
        """On the boot clock: how long a lease may be used that was asked for then."""
        return asked_s + self._lease_s - self._kept_s

    @property
    def late_s(self) -> float:
        """After that time and before anybody else may have the lease: so long this gateway has to stop by itself."""
        return self._kept_s / 3


class _Keeper:
    """Renews, and watches that nothing goes on without.

    :param asked_s: when the lease was first asked for. :param tell: as of :meth:`Lessee.alone`.
    """

    def __init__(self, lessee: Lessee, places: tuple[str, ...], asked_s: float, tell: Callable[[float], None]) -> None:
        self._lessee, self._places, self._tell = lessee, places, tell
        self._until_s = lessee.good_until_s(asked_s)
        self.over = threading.Event()

    def holds(self) -> bool:
        """Tell whether the lease may still be used."""
        return boot_clock_s() < self._until_s

    def tell(self) -> None:
        """Say when whatever delivers must have ended."""
        self._tell(self._until_s + self._lessee.late_s)

    def renew(self) -> None:
        """Again and again; a lessor that does not answer is asked again."""
        while not self.over.wait(self._lessee.renew_s):
            asked_s = boot_clock_s()
            if asked_s >= self._until_s:
                return  # it is not held any more: what delivers is being stopped
            try:
                granted = self._lessee.ask(self._places, held=True).granted
            except NotLeased as problem:
                log.warn("egress-lease-renewal-failed", problem=problem)
                continue
            if len(granted) == len(self._places):
                self._until_s = self._lessee.good_until_s(asked_s)
                self.tell()

    def watch(self, stop: Callable[[], None]) -> None:
        """Stop what delivers when the lease is nearly over."""
        while not self.over.wait(min(_LOOK_S, max(0.0, self._until_s - boot_clock_s()))):
            if not self.holds():
                log.error("egress-lease-lost", advice="is the router of STAGEOUT_ROUTER_EGRESS_LEASES up and reached?")
                stop()
                return
