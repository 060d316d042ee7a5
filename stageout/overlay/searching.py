"""Routers that are asked for a file on its way: those that somebody names, and others that these know of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from stageout.core.errors import TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.routes import Network, ask_links
from stageout.overlay.wire.fields import KnownRow
from stageout.overlay.wire.route import MAX_HOPS, Route, address, written

#: All of them together have so long.
WITHIN_S = 10.0
#: Routers that nobody has named: the nearest ones.
MOST_FURTHER = 16
Found = TypeVar("Found")
_NOTHING = Network("", [])


class Place(NamedTuple):
    """A router that can be asked. :param routes: ways to it, the first that works."""

    gateway: Gateway
    routes: tuple[Route, ...] = ((),)


def named(end: Gateway, ways: Iterable[Sequence[str]]) -> tuple[Place, ...]:
    """The routers on ways that somebody has named, each once: by itself, or by those before it on its way.

    :param end: whose key they are shown. :param ways: addresses in their order.
    """
    found: dict[str, Place] = {}
    for way in ways:
        for hops, place in enumerate(way):
            before: tuple[Route, ...] = (tuple(way[:hops]),) if hops else ()
            found.setdefault(place, Place(_at(end, place), ((), *before)))
    return tuple(found.values())


@dataclass
class Said(Generic[Found]):
    """The answers of the routers. :param nothing: who has none of it. :param problems: of the others, in words."""

    found: list[Found] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The routers that were asked, and the answers of those that have none of it; "" when nobody was asked."""
        nothing = [f"nothing of it at {', '.join(self.nothing)}"] if self.nothing else []
        said = "; ".join([*nothing, *self.problems])
        return f"custodians were asked: {said}" if said else ""


def search(
    end: Gateway,
    places: Sequence[Place],
    ask: Callable[[Gateway, Route], Found | None],
    *,
    guide: Place | None = None,
    within_s: float = WITHIN_S,
) -> Said[Found]:
    """Ask routers what they have, all at once; then the nearest ones that these know of, by them. Bounded in time.

    :param end: router that is not asked. :param places: that are. :param ask: one of them, by a route.
    :param guide: is only asked for the routers that it knows; ``end`` itself, say.
    """
    return _Search(end, ask, time.monotonic() + within_s).run(places, guide)


@dataclass(frozen=True)
class _Heard(Generic[Found]):
    """The answer of one router."""

    place: Place
    found: Found | None
    problem: str
    network: Network


class _Search(Generic[Found]):
    """One search. Each router is asked in a thread of its own, which nobody waits for longer than for the search."""

    def __init__(self, end: Gateway, ask: Callable[[Gateway, Route], Found | None], until_s: float) -> None:
        self._end, self._ask, self._until_s = end, ask, until_s
        self._heard: SimpleQueue[_Heard[Found]] = SimpleQueue()
        self._asked: set[str] = set()
        self._further = 0
        self._said: Said[Found] = Said()

    def run(self, places: Sequence[Place], guide: Place | None) -> Said[Found]:
        """Ask all of them, and hear what comes in time."""
        for place in places:
            if place.gateway.server != self._end.server:
                self._begin(place, is_named=True)
        silent = set(self._asked)
        if guide is not None:
            self._start(lambda: self._heard.put(_Heard(guide, None, "", _links(guide.gateway, guide.routes[0]))))
            silent.add(guide.gateway.server)
        while silent and (left_s := self._until_s - time.monotonic()) > 0:
            try:
                heard = self._heard.get(timeout=left_s)
            except Empty:
                break
            silent.discard(heard.place.gateway.server)
            if heard.place.gateway.server in self._asked:
                self._note(heard)
            for place in self._others(heard):
                self._begin(place, is_named=False)
                silent.add(place.gateway.server)
        self._said.problems += [f"{server} has not answered in time" for server in sorted(silent & self._asked)]
        return self._said

    def _note(self, heard: _Heard[Found]) -> None:
        if heard.found is not None:
            self._said.found.append(heard.found)
        elif heard.problem:
            self._said.problems.append(heard.problem)
        else:
            self._said.nothing.append(heard.place.gateway.server)

    def _begin(self, place: Place, is_named: bool) -> None:
        if place.gateway.server not in self._asked:
            self._asked.add(place.gateway.server)
            self._start(lambda: self._heard.put(self._hear(place, is_named)))

    @staticmethod
    def _start(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="search", daemon=True).start()

    def _hear(self, place: Place, is_named: bool) -> _Heard[Found]:
        """Ask a router, and one that is named also for the others that it knows."""
        found, problem = None, ""
        for route in place.routes:
            left_s = max(1.0, self._until_s - time.monotonic())
            gateway = replace(place.gateway, timeout_s=min(place.gateway.timeout_s, left_s / len(place.routes)))
            try:
                found, problem = self._ask(gateway, route), ""
            except TransferFailure as failure:
                problem = str(failure)
                continue
            network = _links(gateway, route) if is_named and found is None else _NOTHING
            return _Heard(Place(place.gateway, (route,)), found, "", network)
        return _Heard(place, found, problem, _NOTHING)

    def _others(self, heard: _Heard[Found]) -> Iterator[Place]:
        """Routers that one knows, nearest first: by the links that it knows, or directly."""
        asked, (before, *_) = heard.place.gateway.server, heard.place.routes
        for _, *between, known in paths(*heard.network):
            relays = (*before, asked, *between)  # by the address at which it was reached
            last = written(*address(known))  # in whatever letters that router writes its name
            if last in self._asked or last == self._end.server:
                continue
            if self._further >= MOST_FURTHER:
                return
            if len(relays) >= MAX_HOPS:
                far = f"{asked} knows routers behind more than {MAX_HOPS - 1} relays, which were not asked: name them"
                self._said.problems.append(far)
                return
            self._further += 1
            yield Place(_at(self._end, last), (relays, ()))


def paths(source: str, links: Iterable[KnownRow]) -> Iterator[Route]:
    """Shortest ways from a router to each other one, both ends included, nearest first; of those that are longer than
    any route, at most the first: whoever says what links there are may name a chain without an end.
    """
    onward: dict[str, list[str]] = {}
    for router, to, *_ in links:
        onward.setdefault(router, []).append(to)
    seen, waiting = {source}, list[Route]([(source,)])
    for path in waiting:  # grows while it is walked
        if len(path) > 1:
            yield path
        if len(path) > MAX_HOPS:
            return
        for to in onward.get(path[-1], ()):
            if to not in seen:
                seen.add(to)
                waiting.append((*path, to))


def _links(gateway: Gateway, route: Route) -> Network:
    """Links that a router knows; none where it does not say."""
    try:
        return ask_links(gateway, route)
    except TransferFailure:
        return _NOTHING


def _at(end: Gateway, place: str) -> Gateway:
    host, port = address(place)
    return replace(end, host=host, port=port)
