"""Routes: widest first, disjoint, steady."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay_router.routing.routes import (
    BETTER_FOR_S,
    MAX_AGE_S,
    MAX_HOPS,
    Advert,
    Choice,
    Graph,
    Link,
    LinkState,
    Route,
    disjoint,
    latency_s,
    rate_bps,
    widest,
)

NAMES = ("s", "a", "b", "c", "t")


def _graph(text: str) -> Graph:
    """Graph from "s-a:10 a-t:10"."""
    graph: Graph = {}
    for item in text.split():
        ends, rate = item.split(":")
        a, b = ends.split("-")
        graph.setdefault(a, {})[b] = Link(float(rate), 1.0)
    return graph


graphs = st.dictionaries(
    st.sampled_from(list(permutations(NAMES, 2))),
    st.builds(Link, st.sampled_from((1.0, 2.0, 5.0)), st.sampled_from((0.01, 0.2))),
    max_size=14,
).map(lambda links: {a: {b: link for (x, b), link in links.items() if x == a} for a in NAMES})


def _all_routes(graph: Graph) -> list[Route]:
    ways = (("s", *middle, "t") for n in range(4) for middle in permutations("abc", n))
    return [way for way in ways if rate_bps(graph, way) > 0]


def _are_disjoint(routes: list[Route]) -> bool:
    between = [name for route in routes for name in route[1:-1]]
    links = [hop for route in routes for hop in zip(route, route[1:])]
    return len(between) == len(set(between)) and len(links) == len(set(links))


@settings(max_examples=300)
@given(graphs)
def test_widest_is_what_trying_everything_finds(graph: Graph) -> None:
    routes = _all_routes(graph)
    found = widest(graph, "s", "t")
    if not routes:
        assert found is None
        return
    assert found is not None
    best = max(rate_bps(graph, route) for route in routes)
    assert rate_bps(graph, found) == best
    quickest = min(latency_s(graph, route) for route in routes if rate_bps(graph, route) == best)
    assert latency_s(graph, found) == pytest.approx(quickest)


@settings(max_examples=300)
@given(graphs, st.integers(1, 3))
def test_sets_are_disjoint_and_never_worse_than_the_widest_again_and_again(graph: Graph, most: int) -> None:
    found = disjoint(graph, "s", "t", most)
    assert len(found) <= most
    assert _are_disjoint(found)
    assert all(rate_bps(graph, route) > 0 for route in found)
    assert bool(found) == bool(_all_routes(graph))
    total = sum(rate_bps(graph, route) for route in found)
    single = widest(graph, "s", "t")
    assert total >= (rate_bps(graph, single) if single else 0)
    assert found == sorted(found, key=lambda route: -rate_bps(graph, route))


@settings(max_examples=200)
@given(graphs)
def test_as_many_routes_as_there_can_be_are_found_when_all_links_are_alike(graph: Graph) -> None:
    alike: Graph = {a: {b: Link(1.0, 1.0) for b in links} for a, links in graph.items()}
    routes = _all_routes(alike)
    most = max((n for n in range(1, 5) for some in combinations(routes, n) if _are_disjoint(list(some))), default=0)
    assert len(disjoint(alike, "s", "t", 4)) == most


def test_the_widest_route_may_not_block_two_others() -> None:
    trap = _graph("s-a:10 a-b:10 b-t:10 s-b:9 a-t:9")
    assert disjoint(trap, "s", "t") == [("s", "a", "t"), ("s", "b", "t")]


def test_one_wide_route_beats_two_narrow_ones() -> None:
    assert disjoint(_graph("s-a:10 a-b:10 b-t:10 s-b:1 a-t:1"), "s", "t") == [("s", "a", "b", "t")]


def test_no_route_is_longer_than_the_frame_can_hold() -> None:
    line = " ".join(f"{a}-{b}:1" for a, b in zip("sabcdefght"[:], "sabcdefght"[1:]))
    assert len("sabcdefght") - 1 > MAX_HOPS
    assert widest(_graph(line), "s", "t") is None
    assert disjoint(_graph(line), "s", "t") == []


def test_old_adverts_are_refused_and_silent_routers_age_out() -> None:
    state = LinkState()
    link = Link(1.0, 1.0)
    assert state.accept(Advert("s", 1, 5, {"t": link}), 0)
    assert not state.accept(Advert("s", 1, 5, {}), 1)
    assert not state.accept(Advert("s", 0, 9, {}), 1)
    assert state.accept(Advert("s", 2, 0, {"t": link, "a": link}), 10), "a new incarnation begins at 0"
    assert set(state.graph(10 + MAX_AGE_S - 1)["s"]) == {"t", "a"}
    assert set(state.graph(11, down=[("s", "a")])["s"]) == {"t"}
    assert state.graph(10 + MAX_AGE_S) == {}


def _update(choice: Choice, graph: Graph, now_s: float) -> bool:
    return choice.update(graph, disjoint(graph, "s", "t"), now_s)


def test_a_choice_changes_only_for_much_better_for_long() -> None:
    choice = Choice()
    slow, bit, fast = (_graph(f"s-a:10 a-t:10 s-b:{rate} b-c:{rate} c-a:1 c-t:{rate}") for rate in (0.1, 1, 9))
    assert _update(choice, slow, 0)
    before = list(choice.routes)
    assert not _update(choice, bit, 1)
    assert not _update(choice, fast, 100)
    assert not _update(choice, fast, 100 + BETTER_FOR_S)
    assert choice.routes == before
    assert not _update(choice, bit, 120), "a lull starts the time again"
    assert not _update(choice, fast, 131)
    assert not _update(choice, fast, 132 + BETTER_FOR_S - 2)


def test_a_much_better_set_is_taken_in_the_end_and_says_why() -> None:
    choice = Choice()
    _update(choice, _graph("s-a:10 a-t:10"), 0)
    better = _graph("s-a:10 a-t:10 s-b:9 b-t:9")
    assert not _update(choice, better, 5)
    assert _update(choice, better, 6 + BETTER_FOR_S)
    assert choice.routes == [("s", "a", "t"), ("s", "b", "t")]
    assert choice.reason == "90% more than before for 30 s"


def test_a_broken_route_is_left_at_once() -> None:
    choice = Choice()
    _update(choice, _graph("s-a:10 a-t:10 s-b:9 b-t:9"), 0)
    assert _update(choice, _graph("s-b:9 b-t:9"), 1)
    assert choice.routes == [("s", "b", "t")]
    assert choice.reason == "s > a > t is down"
    assert _update(choice, {}, 2)
    assert (choice.routes, choice.reason) == ([], "none known")
