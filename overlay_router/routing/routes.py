"""Routes from measured links (rule 13): link state, widest node-disjoint paths, hysteresis. Pure; times are seconds.

A **route** is the list of routers from a sender to a terminal, both included. Routes of one set share nothing but
their ends, so that one dead router takes one route at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_HOPS = 8
MAX_AGE_S = 90.0
BETTER_SHARE = 0.20
BETTER_FOR_S = 30.0

Route = tuple[str, ...]


class Link(NamedTuple):
    """One direction between two routers, as the sending one measured it. :param rate_bps: bytes a second."""

    rate_bps: float
    latency_s: float


class Advert(NamedTuple):
    """All outgoing links of one router. A later incarnation, or number in the same one, replaces an earlier."""

    router: str
    incarnation: int
    number: int
    links: Mapping[str, Link]


@dataclass
class LinkState:
    """The state of the network: the last advert of each router and when it came."""

    adverts: dict[str, tuple[Advert, float]] = field(default_factory=dict)

    def accept(self, advert: Advert, now_s: float) -> bool:
        """Take a newer advert; False for one that is known or older, which is not passed on."""
        known = self.adverts.get(advert.router)
        if known and (known[0].incarnation, known[0].number) >= (advert.incarnation, advert.number):
            return False
        self.adverts[advert.router] = (advert, now_s)
        return True

    def graph(self, now_s: float, down: Iterable[tuple[str, str]] = (), max_age_s: float = MAX_AGE_S) -> Graph:
        """Links of all adverts younger than 90 s, without those known to be down."""
        broken = set(down)
        return {
            router: {to: link for to, link in advert.links.items() if (router, to) not in broken and link.rate_bps > 0}
            for router, (advert, since_s) in self.adverts.items()
            if now_s - since_s < max_age_s
        }


Graph = dict[str, dict[str, Link]]


def rate_bps(graph: Graph, route: Route) -> float:
    """Rate of the narrowest link; 0 when a link is not there (any more)."""
    hops = zip(route, route[1:])
    return min((graph.get(a, {}).get(b, Link(0, 0)).rate_bps for a, b in hops), default=0.0)


def latency_s(graph: Graph, route: Route) -> float:
    """Sum of the links' latencies."""
    return sum(graph[a][b].latency_s for a, b in zip(route, route[1:]))


def widest(graph: Graph, source: str, target: str, without: Iterable[str] = ()) -> Route | None:
    """Route with the greatest rate; among equals the least latency. ``without`` are routers to go round."""
    avoided = set(without)
    left = {a: {b: link for b, link in links.items() if b not in avoided} for a, links in graph.items()}
    for rate in sorted(_rates(left), reverse=True):
        route = _quickest(_at_least(left, rate), source, target)
        if route:
            return route
    return None


def disjoint(graph: Graph, source: str, target: str, most: int = 4) -> list[Route]:
    """Up to ``most`` routes that share only their ends, of the greatest sum of rates found, widest first.

    Taking the widest again and again can block a second route ("trap"); so for each rate that a link has, as many
    routes as possible are also looked for by augmenting paths, and the best set is kept.
    """
    sets = [_greedy(graph, source, target, most)]
    sets += [_augmented(_at_least(graph, rate), source, target, most) for rate in _rates(graph)]
    best = max(sets, key=lambda routes: (sum(rate_bps(graph, route) for route in routes), -len(routes)))
    return sorted(best, key=lambda route: (-rate_bps(graph, route), latency_s(graph, route)))


@dataclass
class Choice:
    """The routes in use for one pair, changed only for a better set that stays better, or when one breaks."""

    routes: list[Route] = field(default_factory=list)
    reason: str = "none known"
    _better_since_s: float | None = None

    def update(self, graph: Graph, found: list[Route], now_s: float) -> bool:
        """Look at a newly computed set; True when the choice changed. ``reason`` says why it is what it is."""
        broken = [route for route in self.routes if rate_bps(graph, route) == 0]
        gain = _sum_bps(graph, found) / (_sum_bps(graph, self.routes) or 1)
        if broken or not self.routes:
            return self._take(found, "first found" if not self.routes else f"{' > '.join(broken[0])} is down")
        if found == self.routes or gain <= 1 + BETTER_SHARE:
            self._better_since_s = None
            return False
        if self._better_since_s is None:
            self._better_since_s = now_s
        if now_s - self._better_since_s <= BETTER_FOR_S:
            return False
        return self._take(found, f"{gain - 1:.0%} more than before for {BETTER_FOR_S:.0f} s")

    def _take(self, routes: list[Route], reason: str) -> bool:
        changed = routes != self.routes
        self.routes, self._better_since_s = list(routes), None
        self.reason = reason if routes else "none known"
        return changed


def _sum_bps(graph: Graph, routes: Iterable[Route]) -> float:
    return sum(rate_bps(graph, route) for route in routes)


def _rates(graph: Graph) -> set[float]:
    return {link.rate_bps for links in graph.values() for link in links.values()}


def _at_least(graph: Graph, least_bps: float) -> Graph:
    return {a: {b: link for b, link in links.items() if link.rate_bps >= least_bps} for a, links in graph.items()}


def _quickest(graph: Graph, source: str, target: str) -> Route | None:
    """Least latency within the hop limit; fewer hops among equals."""
    reached: dict[str, tuple[float, Route]] = {source: (0.0, (source,))}
    frontier = dict(reached)
    for _ in range(MAX_HOPS):
        better: dict[str, tuple[float, Route]] = {}
        for here, (late, route) in sorted(frontier.items()):
            for to, link in sorted(graph.get(here, {}).items()):
                total = late + link.latency_s
                known = better.get(to) or reached.get(to)
                if to not in route and (known is None or total < known[0]):
                    better[to] = (total, (*route, to))
        reached.update(better)
        frontier = better
    return reached[target][1] if target in reached and target != source else None


def _greedy(graph: Graph, source: str, target: str, most: int) -> list[Route]:
    found: list[Route] = []
    left = graph
    while len(found) < most and (route := widest(left, source, target)):
        found.append(route)
        left = _without(left, route)
    return found


def _without(graph: Graph, route: Route) -> Graph:
    """The graph without the routers between a route's ends, and without its link when there are none."""
    between, (first, second) = set(route[1:-1]), route[:2]
    return {
        a: {b: link for b, link in links.items() if b not in between and (a, b) != (first, second)}
        for a, links in graph.items()
        if a not in between
    }


def _augmented(graph: Graph, source: str, target: str, most: int) -> list[Route]:
    """Node-disjoint routes by augmenting paths (Menger); those beyond the hop limit are left out."""
    residual = _split(graph)
    flow: set[tuple[_Half, _Half]] = set()
    for _ in range(most):
        path = _search(residual, (source, True), (target, False))
        for a, b in zip(path, path[1:]):
            residual[a].discard(b)
            residual.setdefault(b, set()).add(a)
            flow ^= {(b, a)} if (b, a) in flow else {(a, b)}
    after = {a[0]: b[0] for a, b in flow if a[1] and not b[1] and a[0] != source}
    firsts = sorted(b[0] for a, b in flow if a == (source, True))
    routes = [_followed(source, first, target, after) for first in firsts]
    return [route for route in routes if len(route) - 1 <= MAX_HOPS]


#: A router cut in two, its way in (False) and its way out (True), so that each lies on one route at most.
_Half = tuple[str, bool]


def _split(graph: Graph) -> dict[_Half, set[_Half]]:
    halves: dict[_Half, set[_Half]] = {}
    for router, links in graph.items():
        halves.setdefault((router, False), set()).add((router, True))
        halves[router, True] = {(to, False) for to in links}
    return halves


def _search(residual: Mapping[_Half, set[_Half]], start: _Half, end: _Half) -> list[_Half]:
    """Fewest steps from start to end; empty when there is no way."""
    came: dict[_Half, _Half] = {start: start}
    queue = deque([start])
    while queue and end not in came:
        here = queue.popleft()
        for to in sorted(residual.get(here, ())):
            if to not in came:
                came[to] = here
                queue.append(to)
    if end not in came:
        return []
    path = [end]
    while path[-1] != start:
        path.append(came[path[-1]])
    return path[::-1]


def _followed(source: str, first: str, target: str, after: Mapping[str, str]) -> Route:
    route = [source, first]
    while route[-1] != target:
        route.append(after[route[-1]])
    return tuple(route)
