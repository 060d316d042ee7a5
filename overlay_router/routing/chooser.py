"""Which routes this router would take to a terminal, and why: the rules of ``routes`` over what is known of links.

Choosing can take a second where there are hundreds of routers, so it is done on a copy of the graph, beside the loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from overlay_router.routing.routes import Choice, Graph, Route, disjoint, latency_s, rate_bps, widest
from stageout.core.units import rate
from stageout.overlay.wire.fields import MAX_ROUTES
from stageout.overlay.wire.messages import Routed
from stageout.wire.services import RouteReport

_TERMINALS_KEPT = 64
_MOST_ROUTES = 4
_UPDATE_S = 1.0


class Chooser:
    """Choices for the terminals that were last asked for; each is steady while it is kept. Use from one thread.

    :param here: address of this router.
    """

    def __init__(self, here: str) -> None:
        self._here = here
        self._choices: OrderedDict[str, Choice] = OrderedDict()

    def update(self, graph: Graph, now_s: float) -> list[tuple[str, Choice]]:
        """Look at the choices again, so that a better set is seen to stay better. Returns those that changed.

        No more than fit into a second; those that were last asked for first.
        """
        end_s = time.monotonic() + _UPDATE_S
        changed = []
        for terminal, choice in reversed(self._choices.items()):
            if time.monotonic() > end_s:
                break
            if self._look(graph, terminal, choice, now_s):
                changed.append((terminal, choice))
        return changed

    def reports(self, graph: Graph) -> tuple[RouteReport, ...]:
        """Return the routes in use, those to the terminals that were last asked for first."""
        return tuple(
            RouteReport(terminal, route[1:], int(rate_bps(graph, route)), choice.reason)
            for terminal, choice in reversed(self._choices.items())
            for route in choice.routes or [()]
        )

    def routed(self, graph: Graph, terminal: str, now_s: float) -> Routed:
        """Routes in use, others, and a reason for each; the terminal last, this router left out."""
        here = self._here
        if terminal == here:
            return Routed(terminal, ((),), reasons=("this router is the terminal",))
        if not any(terminal in links for links in graph.values()):
            return Routed(terminal, (), reason=f"no router that {here} has heard of has a measured link to {terminal}")
        choice = self._kept(terminal)
        self._look(graph, terminal, choice, now_s)
        others = [route for route in self._candidates(graph, terminal, choice) if route not in choice.routes]
        others = others[: MAX_ROUTES - len(choice.routes)]
        reasons = [_speed(graph, route) for route in choice.routes]
        reasons += [f"{_speed(graph, route)}; {self._why_not(graph, route, choice)}" for route in others]
        return Routed(terminal, _without_first(choice.routes), _without_first(others), tuple(reasons), choice.reason)

    def _kept(self, terminal: str) -> Choice:
        choice = self._choices.setdefault(terminal, Choice())
        self._choices.move_to_end(terminal)
        if len(self._choices) > _TERMINALS_KEPT:
            self._choices.popitem(last=False)
        return choice

    def _look(self, graph: Graph, terminal: str, choice: Choice, now_s: float) -> bool:
        return choice.update(graph, disjoint(graph, self._here, terminal, _MOST_ROUTES), now_s)

    def _candidates(self, graph: Graph, terminal: str, choice: Choice) -> list[Route]:
        """The alternatives: the best set now, and the best route by each neighbour."""
        here = self._here
        found = list(disjoint(graph, here, terminal, _MOST_ROUTES))
        for first in sorted(graph.get(here, {})):
            route = (first,) if first == terminal else widest(graph, first, terminal, without=(here,))
            if route:
                found.append((here, *route))
        return list(dict.fromkeys(found))

    def _why_not(self, graph: Graph, route: Route, choice: Choice) -> str:
        """Return why a route is not in use."""
        shared = {name for used in choice.routes for name in used[1:-1]} & set(route)
        if shared:
            return f"shares {', '.join(sorted(shared))} with a route in use"
        if len(choice.routes) >= _MOST_ROUTES:
            return f"{_MOST_ROUTES} routes are in use"
        return "a set with it is not 20 % better, or not yet for 30 s"


def _speed(graph: Graph, route: Route) -> str:
    return f"{rate(rate_bps(graph, route))}, {latency_s(graph, route) * 2e3:.3g} ms"


def _without_first(routes: list[Route]) -> tuple[Route, ...]:
    return tuple(route[1:] for route in routes)
