"""Announcements of links: a liar can describe its own links only, and what is kept is bounded; rates; reasons."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from overlay_router.book import MAX_FROM_ONE, MAX_ROUTERS, PIN_S, Book, Taken
from overlay_router.chooser import Chooser
from overlay_router.ending import end
from overlay_router.measure import Meter
from overlay_router.routes import BETTER_FOR_S, MAX_AGE_S
from stageout.core.signing import SigningKey
from stageout.wire.overlay import MAX_PROBE_BYTES, Links, Routed

S, A, B, T = "s:1", "a:1", "b:1", "t:1"
_FAST, _RTT_US = 100_000_000, 2000


def key(number: int) -> SigningKey:
    return SigningKey(number.to_bytes(32, "big"))


def said(router: str, signer: int, *to: str, number: int = 1, incarnation: int = 1, rate: int = _FAST) -> Links:
    """What a router announces, the number-th time."""
    book = Book(router, key(signer), incarnation)
    rows = [(end, rate, _RTT_US) for end in to]
    return [book.announce(rows, 0.0) for _ in range(number)][-1]


@pytest.fixture
def book() -> Book:
    return Book(S, key(1), 1)


def test_what_is_newer_is_taken_and_passed_on_once(book: Book) -> None:
    first, second = said(A, 2, T), said(A, 2, T, B, number=2)
    assert book.accept(second, A, 0) == Taken(True)
    assert book.accept(second, B, 1) == Taken(False)
    assert book.accept(first, A, 2) == Taken(False)
    assert book.accept(said(A, 2, T, incarnation=2), A, 3) == Taken(True)
    assert [row[:2] for row in book.rows(4)] == [(A, T)]
    assert book.aged(A, 4).age_ms == 1000


def test_age_travels_with_an_announcement_and_nothing_dead_comes_back(book: Book) -> None:
    old = replace(said(A, 2, T), age_ms=int(MAX_AGE_S * 1000) - 1000)
    assert book.accept(old, B, 100).newer
    assert [links.router for links in book.forwardable(100.5)] == [A]
    assert book.forwardable(101.5) == []
    assert book.graph(101.5) == {}
    assert not book.accept(replace(old, age_ms=0), B, 102).newer
    assert not book.accept(replace(said(B, 3, T), age_ms=int(MAX_AGE_S * 1000)), A, 102).newer


@pytest.mark.parametrize(
    "changes",
    [{"links": ((T, 1, 1),)}, {"number": 9}, {"incarnation": 9}, {"router": B}, {"signature": ""}, {"key": "x"}],
)
def test_what_its_router_did_not_sign_is_refused(book: Book, changes: dict[str, object]) -> None:
    taken = book.accept(replace(said(A, 2, T), **changes), A, 0)  # type: ignore[arg-type]
    assert not taken.newer
    assert "signature" in taken.refusal or "signed" in taken.refusal
    assert book.rows(0) == []


def test_nobody_speaks_for_an_address_that_has_a_key(book: Book) -> None:
    book.accept(said(A, 2, T), A, 0)
    forged = said(A, 3, T, B, incarnation=9)
    assert "has another key" in book.accept(forged, B, 1).refusal
    assert "has another key" in book.accept(forged, B, MAX_AGE_S + 1).refusal, "also while it is away"
    assert book.accept(said(A, 3, T, B, number=2), A, 2).newer, "the router at that address has lost its key"
    assert book.accept(said(A, 2, T, number=5, incarnation=5), B, 3 + PIN_S).newer


def test_nobody_speaks_for_oneself(book: Book) -> None:
    assert "says that it is s:1" in book.accept(said(S, 2, T, incarnation=7), A, 0).refusal
    assert book.accept(said(S, 1, T, incarnation=7, number=3), A, 0) == Taken(False)
    mine = book.announce([], 1)
    assert (mine.incarnation, mine.number) == (7, 4), "an earlier life of the same key went further"


def test_made_up_routers_fill_no_more_than_their_share(book: Book) -> None:
    for number in range(MAX_FROM_ONE):
        assert book.accept(said(f"x{number}:1", 5, T), A, 0).newer
    assert "are known from a:1 already" in book.accept(said("more:1", 5, T), A, 0).refusal
    assert book.accept(said(B, 3, T), B, 0).newer
    for number in range(MAX_ROUTERS):
        book.accept(said(f"y{number}:1", 5, T), f"from{number}:1", 0)
    assert len(book.rows(0)) == MAX_ROUTERS
    assert "routers are known already" in book.accept(said("more:1", 5, T), T, 0).refusal
    assert book.accept(said("more:1", 5, T), T, MAX_AGE_S + 1).newer, "who has gone makes room"


def test_probes_set_the_rate_and_transfers_only_raise_it() -> None:
    meter = Meter(60)
    size_bytes = meter.probe_bytes(0)
    assert 0 < size_bytes <= MAX_PROBE_BYTES
    assert meter.probe_bytes(1) == 0
    meter.probed(10e6, 1)
    meter.probed(20e6, 61)
    assert meter.rate == 15e6
    for second in range(100, 104):
        meter.moved(1_000_000, second)  # the first call says nothing about time
    assert (meter.rate, meter.source) == (15e6, "probe"), "its sender may be slow"
    for second in range(104, 108):
        meter.moved(40_000_000, second)
    assert (meter.rate, meter.source) == (40e6, "transfer")
    assert meter.probe_bytes(107 + 59) == 0, "a link that shows its rate is not probed"
    assert meter.probe_bytes(108 + 60) == MAX_PROBE_BYTES
    assert meter.take_moved() == 4 * 41_000_000
    assert meter.take_moved() == 0


def test_a_probe_beside_a_transfer_counts_both() -> None:
    meter = Meter(60)
    for second in range(4):
        meter.moved(30_000_000, second)
    meter.probed(10e6, 3.5)
    assert meter.rate == pytest.approx((30e6 + 40e6) / 2)


def test_the_round_trip_is_the_least_of_the_last() -> None:
    meter = Meter(60)
    for late_s in (0.5, 0.01, *[0.2] * 7):
        meter.echoed(late_s)
    assert meter.round_trip_s == 0.01
    meter.echoed(0.2)
    assert meter.round_trip_s == 0.2


def _routed(chooser: Chooser, book: Book, terminal: str, now_s: float) -> Routed:
    return chooser.routed(book.graph(now_s), terminal, now_s)


def _diamond(book: Book, rate_b: int = _FAST, now_s: float = 0.0, number: int = 1) -> None:
    book.accept(said(A, 2, T, number=number), A, now_s)
    book.accept(said(B, 3, T, A, number=number, rate=rate_b), B, now_s)
    book.announce([(A, _FAST, _RTT_US), (B, _FAST, _RTT_US)], now_s)


def test_routes_come_with_reasons(book: Book) -> None:
    chooser = Chooser(S)
    assert _routed(chooser, book, T, 0).routes == ()
    _diamond(book)
    answer = _routed(chooser, book, T, 0)
    assert (answer.routes, answer.others) == (((A, T), (B, T)), ())
    assert answer.reasons[0].endswith("MB/s, 4 ms")
    assert answer.reason == "first found"
    book.announce([(A, _FAST, _RTT_US)], 1)
    assert _routed(chooser, book, T, 1).routes == ((A, T),)
    assert _routed(chooser, book, T, 1).reason == "s:1 > b:1 > t:1 is down"


def test_a_better_set_waits_and_says_so(book: Book) -> None:
    chooser = Chooser(S)
    book.accept(said(A, 2, T), A, 0)
    book.announce([(A, _FAST, _RTT_US)], 0)
    assert _routed(chooser, book, T, 0).routes == ((A, T),)
    _diamond(book, now_s=1, number=2)
    waiting = _routed(chooser, book, T, 1)
    assert (waiting.routes, waiting.others) == (((A, T),), ((B, T),))
    assert "not yet for 30 s" in waiting.reasons[1]
    assert [terminal for terminal, _ in chooser.update(book.graph(2 + BETTER_FOR_S), 2 + BETTER_FOR_S)] == [T]
    assert _routed(chooser, book, T, 2 + BETTER_FOR_S).routes == ((A, T), (B, T))


def test_a_route_through_a_router_in_use_is_named_as_such(book: Book) -> None:
    book.accept(said(A, 2, T), A, 0)
    book.accept(said(B, 3, A), B, 0)
    book.announce([(A, _FAST, _RTT_US), (B, _FAST, _RTT_US)], 0)
    answer = _routed(Chooser(S), book, T, 0)
    assert (answer.routes, answer.others) == (((A, T),), ((B, A, T),))
    assert "shares a:1 with a route in use" in answer.reasons[1]


def test_choices_are_kept_for_a_few_terminals_only(book: Book) -> None:
    ends = [f"t{number}:1" for number in range(30)]
    book.accept(said(A, 2, *ends), A, 0)
    book.accept(said(B, 3, *[f"u{number}:1" for number in range(30)]), B, 0)
    book.accept(said(T, 4, *[f"v{number}:1" for number in range(30)]), B, 0)
    book.announce([(A, _FAST, _RTT_US), (B, _FAST, _RTT_US), (T, _FAST, _RTT_US)], 0)
    chooser = Chooser(S)
    for letter in "tuv":
        for number in range(30):
            assert _routed(chooser, book, f"{letter}{number}:1", 0).routes
    assert len(chooser._choices) == 64


def test_a_task_that_misses_its_cancellation_ends_nevertheless() -> None:
    """As ``wait_for`` misses one that comes together with what it waits for."""

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    async def story() -> bool:
        tasks = [asyncio.ensure_future(deaf()), asyncio.ensure_future(asyncio.sleep(0))]
        await asyncio.sleep(0)
        await end(tasks)
        return all(task.done() for task in tasks)

    assert asyncio.run(story())
