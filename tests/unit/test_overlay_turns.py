"""The order of fetches: places are shared among keys, and some are kept for later ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay_router.delivery.turns import Turns, Wish

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abc"), st.sampled_from(["x", "y"])),
        st.tuples(st.just("join"), st.sampled_from("abc"), st.integers(0, 5)),
        st.tuples(st.just("leave"), st.just(""), st.integers(0, 20)),
    ),
    max_size=40,
)


@settings(max_examples=50)
@given(st.integers(1, 6), _STEPS)
def test_no_key_and_no_target_takes_all_and_who_has_none_is_next(
    most: int, steps: list[tuple[str, str, object]]
) -> None:
    turns, waiting, running = Turns(most), list[Wish](), list[Wish]()
    for what, key, which in steps:
        everything = waiting + running
        if what == "ask":
            waiting.append(Wish(which, [key]))
            turns.ask(waiting[-1])
        elif what == "join" and waiting:
            waiting[int(str(which)) % len(waiting)].keys.append(key)
        elif what == "leave" and everything:
            gone = everything[int(str(which)) % len(everything)]
            (waiting if gone in waiting else running).remove(gone)
            turns.leave(gone)
        while True:
            places = Counter(one.key for one in running)
            targets = Counter(one.target for one in running)
            free = most - len(running)
            open_ = [one for one in waiting if targets[one.target] < max(1, most - 1)]
            begun = turns.next()
            if begun is None:
                assert not free or not any(not places[key] for one in open_ for key in one.keys)
                break
            assert begun in open_
            assert begun.key in begun.keys
            assert places[begun.key] < free
            assert places[begun.key] == 0 or all(places[key] for one in open_ for key in one.keys)
            waiting.remove(begun)
            running.append(begun)
            assert len(running) <= most
            assert Counter(one.key for one in running)[begun.key] <= -(-most // 2)
            assert Counter(one.target for one in running)[begun.target] <= max(1, most - 1)


def _begun(turns: Turns) -> list[Wish]:
    return list(iter(turns.next, None))


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_one_key_alone_leaves_half_of_the_places(most: int, expected: int) -> None:
    turns = Turns(most)
    for number in range(20):
        turns.ask(Wish(number, ["tarpit"]))
    assert len(_begun(turns)) == expected
    turns.ask(Wish("another", ["other"]))
    assert [one.key for one in _begun(turns)] == ["other"] * (most > 1)


@pytest.mark.parametrize(("most", "expected"), [(3, 1), (4, 2), (5, 2), (8, 4)])
def test_one_key_alone_leaves_half_of_the_places_that_a_target_has(most: int, expected: int) -> None:
    """One fewer than all."""
    turns = Turns(most)
    for _ in range(20):
        turns.ask(Wish("t", ["tarpit"]))
    assert len(_begun(turns)) == expected
    turns.ask(Wish("t", ["other"]))
    assert [one.key for one in _begun(turns)] == ["other"]


def test_keys_take_turns_whatever_came_first() -> None:
    turns, done = Turns(1), list[str]()
    for key in "aaaabbc":
        turns.ask(Wish(key, [key]))
    while (wish := turns.next()) is not None:
        done.append(wish.key)
        turns.leave(wish)
    assert done == list("abcabaa")


def test_a_file_that_several_keys_want_waits_for_none_of_them_that_has_enough() -> None:
    turns = Turns(4)
    for number in range(3):
        turns.ask(Wish(number, ["greedy"]))
    assert len(_begun(turns)) == 2
    shared = next(iter(turns._waiting))
    shared.keys.append("other")
    assert [(one, one.key) for one in _begun(turns)] == [(shared, "other")]


def test_keys_that_are_gone_are_forgotten() -> None:
    turns = Turns(2)
    for number in range(50):
        turns.ask(wish := Wish("x", [f"token:{number}"]))
        assert turns.next() is wish
        turns.leave(wish)
    assert not turns._last_turn
