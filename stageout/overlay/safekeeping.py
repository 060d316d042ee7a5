"""A file in the custody of several routers, so that the loss of one router's disk costs nothing.

All get the same operation, so the terminal executes it once, whoever brings it. The first delivers at once; the others
ask the terminal whether that has happened, and deliver when it has not within :data:`STANDBY_S`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import ENDS, GIVE_UP_S, Deposit, allowed, deposit_order, give
from stageout.overlay.wire.messages import Cancel, Operation, Status
from stageout.overlay.wire.route import Route
from stageout.wire.deposits import EXPIRES_AFTER_S

#: A further custodian delivers when the one before it has not for so long: a resend without need doubles the load.
STANDBY_S = 600
_FIRST_PAUSE_S, _PAUSE_MAX_S = 0.5, 15.0
_UNREACHED = frozenset({ErrorClass.CONNECT_FAILED, ErrorClass.NAME_LOOKUP_FAILED, ErrorClass.NAME_NOT_RESOLVED})


@dataclass(frozen=True)
class Custodian:
    """One that may be asked. :param terminal: where it delivers to: the terminal, behind further custodians if any."""

    gateway: Gateway
    terminal: str


@dataclass
class _Candidate:
    custodian: Custodian
    due_s: float = 0.0
    failures: int = 0


@dataclass
class _Search:
    """Custodians that are still to be asked, and those that have the file.

    :ivar asked: those that were asked, by their name. :ivar is_given_up: nobody else is to be asked.
    """

    candidates: list[_Candidate]
    copies: int
    until_s: float
    give: Callable[[Custodian, int], Deposit]
    kept: list[Deposit] = field(default_factory=list)
    problems: dict[str, TransferFailure] = field(default_factory=dict)
    fatal: BaseException | None = None
    asked: dict[str, Gateway] = field(default_factory=dict)
    is_given_up: bool = False

    def __post_init__(self) -> None:
        self._lock, self._threads = threading.Lock(), list[threading.Thread]()

    def run(self) -> None:
        """Ask until enough have it, or none is left. The custodian that is named first delivers first, whichever thread
        runs first."""
        first = [self._next() for _ in range(self.copies)]
        self._threads = [threading.Thread(target=self._fill, args=one, daemon=True) for one in enumerate(first)]
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        if self.fatal is not None:
            raise self.fatal

    def _fill(self, place: int, candidate: _Candidate | None) -> None:
        """Find a custodian for one of the copies."""
        try:
            while candidate is not None:
                try:
                    given = self.give(candidate.custodian, place)
                except TransferFailure as failure:
                    self._failed(candidate, failure)
                else:
                    if self._is_kept(candidate, given):
                        return
                candidate = self._next()
        except BaseException as problem:
            self.fatal = problem

    def _next(self) -> _Candidate | None:
        with self._lock:
            if not self.candidates or self.is_given_up:
                return None
            candidate = min(self.candidates, key=lambda one: one.due_s)
            self.candidates.remove(candidate)
        time.sleep(max(0.0, candidate.due_s - time.monotonic()))
        gateway = candidate.custodian.gateway
        with self._lock:
            self.asked[gateway.server] = gateway
        return candidate

    def wait(self, patience_s: float) -> None:
        """On return nobody is being asked, or the patience is over."""
        until_s = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def holders(self) -> list[Gateway]:
        """The routers that may have some of the file."""
        with self._lock:
            unreached = {server for server, failure in self.problems.items() if failure.kind in _UNREACHED}
            return [gateway for server, gateway in self.asked.items() if server not in unreached]

    def _failed(self, candidate: _Candidate, failure: TransferFailure) -> None:
        now_s = time.monotonic()
        candidate.failures += 1
        candidate.due_s = now_s + growing_s(_FIRST_PAUSE_S, _PAUSE_MAX_S, candidate.failures)
        with self._lock:
            self.problems[candidate.custodian.gateway.server] = failure
            if failure.kind.retryable and candidate.due_s < self.until_s:
                self.candidates.append(candidate)

    def _is_kept(self, candidate: _Candidate, given: Deposit) -> bool:
        with self._lock:
            server = candidate.custodian.gateway.server
            if given.router and given.router in {one.router for one in self.kept}:
                self.problems[server] = the_same(server)
                return False
            self.kept.append(given)
            return True


def deposit_copies(
    custodians: Sequence[Custodian],
    local: Path,
    path: str,
    *,
    copies: int,
    wait_s: float = 0.0,
    mode: int = 0o644,
    connections: int = 2,
    progress: Callable[[int], None] = lambda sent_bytes: None,
    expires_after_s: float = EXPIRES_AFTER_S,
    routes: Sequence[Route] = ((),),
    origin: str = "",
    seq: int = 1,
    priority: int = 0,
    deadline: int = 0,
    most_connections: int = 0,
) -> tuple[Deposit, ...]:
    """Give a file to so many of the custodians, each another router. On return it is durable at all of these.

    The first ones are asked first; where one fails, the next is. Further parameters as of
    :func:`stageout.overlay.client.put`.

    :param origin: and ``seq``, its number there: for this file only. 32 hexadecimal digits; "" for a random one.
    :param wait_s: how long to go on asking when there are not enough. :param progress: called with bytes of one copy.
    :raises TransferFailure: not enough have taken it, and the file must be kept. Routers that have some of it were
        asked to give it up, as they are by an interrupt; with an ``origin``, which can be repeated, they keep it.
    """
    first = custodians[0]
    order = deposit_order(
        path,
        first.terminal,
        mode,
        first.gateway.until(expires_after_s),
        allowed(first.gateway, priority),
        deadline,
        origin,
        seq,
    )
    order = replace(order, copies=copies)
    sent = _Sent(progress, copies)

    def one(custodian: Custodian, place: int) -> Deposit:
        mine = replace(order, terminal=custodian.terminal, standby_s=place * STANDBY_S)
        try:
            return give(
                custodian.gateway, local, mine, connections=connections, most_connections=most_connections,
                progress=sent.by(place), routes=routes,
            )  # fmt: skip
        except TransferFailure:
            if sent.is_given_up and not origin:
                _give_up(custodian.gateway, order, routes)
            raise

    search = _Search([_Candidate(one) for one in custodians], copies, time.monotonic() + wait_s, one)
    try:
        search.run()
        if len(search.kept) < copies:
            raise too_few(path, len(search.kept), copies, search.problems)
    except (TransferFailure, *ENDS):
        search.is_given_up = sent.is_given_up = True
        for gateway in search.holders() if not origin else ():
            _give_up(gateway, order, routes)
        search.wait(GIVE_UP_S)
        raise
    return tuple(search.kept)


def the_same(server: str) -> TransferFailure:
    """The fault of a second copy at one router."""
    text = f"{server} is the same router as one that has it already"
    return TransferFailure(ErrorClass.BAD_REQUEST, text, server)


class _Sent:
    """Bytes of all copies together, as those of one. :ivar is_given_up: nothing more is to leave."""

    def __init__(self, progress: Callable[[int], None], copies: int) -> None:
        self._progress, self._sent_bytes = progress, [0] * copies
        self.is_given_up = False

    def by(self, place: int) -> Callable[[int], None]:
        """For one of them."""

        def count(sent_bytes: int) -> None:
            if self.is_given_up:
                raise TransferFailure(ErrorClass.UNKNOWN, "given up")
            self._sent_bytes[place] = sent_bytes
            self._progress(sum(self._sent_bytes) // len(self._sent_bytes))

        return count


def _give_up(gateway: Gateway, order: Operation, routes: Sequence[Route]) -> None:
    """As far as it can be reached: else the file arrives although nobody was told so.

    A router drops what a peer that has left said last. So it is asked, behind that, for a number that only the answer
    to this question has: what is said of the file to all who ask for it may come before.
    """
    behind = Status(order.origin, order.seq + 1)
    gateway = replace(gateway, timeout_s=min(GIVE_UP_S, gateway.timeout_s))
    with contextlib.suppress(TransferFailure), Channel(gateway, next(iter(routes), ())) as channel:
        channel.send(Cancel(order.origin, order.seq))
        channel.send(behind)
        while getattr(channel.receive(), "seq", None) != behind.seq:
            continue


def too_few(path: str, kept: int, copies: int, problems: Mapping[str, TransferFailure]) -> TransferFailure:
    """Return why a file must be kept.

    :param kept: custodians that have it. :param problems: of the others, by their name.
    """
    failures = list(problems.values())
    worst = next((one for one in failures if not one.kind.retryable), failures[0] if failures else None)
    reasons = "; ".join(str(one) for one in failures) or "no more of them are named"
    text = f"{path}: {kept} of {copies} custodians could be had, so none keeps it: {reasons}"
    if worst is None:
        return TransferFailure(ErrorClass.BAD_REQUEST, text)
    return TransferFailure(worst.kind, text, worst.server, worst.retry_after_s)
