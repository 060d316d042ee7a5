"""Space in custody: a file counts once, however many tickets hold it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox_manager.custody.quota import Space

INODES = st.lists(st.tuples(st.integers(1, 6), st.just(0)), max_size=5)


def sized(inodes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(inode, 10**inode) for inode, _ in inodes]


def test_one_file_at_two_destinations_counts_once() -> None:
    space = Space()
    space.add("one", "alice", [(7, 100), (7, 100), (8, 5)])
    assert (space.used_bytes, dict(space.by_owner)) == (105, {"alice": 105})
    space.drop("one")
    assert (space.used_bytes, dict(space.by_owner)) == (0, {})


def test_what_two_tickets_hold_is_free_when_both_are_gone() -> None:
    space = Space()
    space.add("one", "alice", [(7, 100)])
    space.add("two", "bob", [(7, 100), (8, 1)])
    assert dict(space.by_owner) == {"alice": 100, "bob": 1}
    space.drop("one")
    assert dict(space.by_owner) == {"bob": 101}
    space.drop("one")
    space.drop("two")
    assert (space.used_bytes, dict(space.by_owner)) == (0, {})


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.sampled_from("abc"), INODES), max_size=30))
def test_it_is_always_the_sum_over_different_files(steps: list[tuple[bool, int, str, list[tuple[int, int]]]]) -> None:
    space, held = Space(), dict[str, tuple[str, list[tuple[int, int]]]]()
    for add, number, owner, inodes in steps:
        ticket = str(number)
        if add and ticket not in held:
            held[ticket] = (owner, sized(inodes))
            space.add(ticket, *held[ticket])
        elif not add:
            held.pop(ticket, None)
            space.drop(ticket)
        different = {item for _, files in held.values() for item in files}
        assert space.used_bytes == sum(space.by_owner.values()) == sum(size for _, size in different)
        for name, size in space.by_owner.items():
            mine = {item for one, files in held.values() if one == name for item in files}
            assert 0 < size <= sum(item for _, item in mine)
