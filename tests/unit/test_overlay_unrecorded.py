"""A disk without room where a terminal has changed a name, and not recorded or synced that yet."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from overlay_router.local.store import Settled
from overlay_router.local.tree import Tree
from stageout.core import durable
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Open, Operation
from tests.unit.test_overlay_destination import BLOCK, EXPIRES, ORIGIN, PEER, Router, home, op

__all__ = ["home"]


@pytest.fixture
def router(home: Path) -> Iterator[Router]:
    made = Router(home / "router")
    yield made
    made.close()


def test_a_change_that_had_no_room_is_found_out_when_it_is_asked_again(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    (router.root / "a").write_text("data")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            router.send(op(1, "rename", "a", target="b"))
    assert router.send(op(1, "rename", "a", target="b")) == "done"
    assert router.content() == {"b": "data"}
    assert router.store.intents() == []


def without_record(router: Router, monkeypatch: pytest.MonkeyPatch, operation: Operation, data: bytes = b"") -> None:
    """It is executed; the disk has no room for the record of that, and then it has."""
    with monkeypatch.context() as full:
        full.setattr(durable, "_faults", durable.parse_faults("overlay-settle=ENOSPC"))
        with pytest.raises(OSError, match="No space"):
            router.send(operation, data)


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_executed_without_a_record_is_recorded_before_the_next_change_of_its_names(
    router: Router, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """After a death its names did not say any more that it had happened: it was done again, or said to have failed."""
    publish, rename = op(1, "publish", "d/f", parents=True), op(3, "rename", "e", target="d")
    without_record(router, monkeypatch, publish, b"data")
    assert router.send(op(2, "rename", "d", target="e")) == "done"
    without_record(router, monkeypatch, rename)
    assert router.send_together([(op(4, "rename", "d/f", target="g"), b""), (rename, b"")]) == {3: "done", 4: "done"}
    assert [one.path for one in router.store.contents.after(0, 9)] == ["g"]
    if dies:
        router.restart()
    assert (router.send(publish, b"data"), router.send(rename)) == ("done", "done")
    assert router.content() == {"d": "/", "g": "data"}
    assert (router.leftovers(), router.store.intents()) == ([], [])


@contextmanager
def _never_synced(self: Tree) -> Iterator[None]:
    yield
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_changed_and_not_synced_is_found_out_before_the_next_change_of_its_names(
    router: Router, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Its names did not say any more that it had happened: it was done again, or said to have failed."""
    publish, rename = op(1, "publish", "a"), op(3, "rename", "b", target="c")
    for before, after in ((publish, op(2, "rename", "a", target="b")), (rename, op(4, "rename", "c", target="d"))):
        with monkeypatch.context() as full:
            full.setattr(Tree, "together", _never_synced)
            with pytest.raises(OSError, match="No space"):
                router.send(before, b"data")
        assert router.send(after) == "done"
        assert [one.path for one in router.store.contents.after(0, 9)] == [after.target]
    if dies:
        router.restart()
    assert (router.send(publish, b"data"), router.send(rename)) == ("done", "done")
    assert router.content() == {"d": "data"}
    assert (router.leftovers(), router.store.intents()) == ([], [])


def test_what_cannot_be_recorded_is_in_the_way_of_nothing_that_makes_room(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_record(router, monkeypatch, op(1, "publish", "f"), b"data")
    settle, tried = router.store.settle, list[int]()

    def little_room(ends: Sequence[Settled]) -> None:
        tried.extend(one.operation.seq for one in ends)
        if tried == [1]:
            raise OSError(28, "No space left on device")
        settle(ends)

    monkeypatch.setattr(router.store, "settle", little_room)
    assert router.send(op(2, "delete", "f")) == "done"
    assert (tried, router.content()) == ([1, 2], {})
    assert router.send(op(1, "publish", "f"), b"data") == "done"


def test_data_of_the_dead_make_room_for_the_record_of_their_end(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Open(ORIGIN, 1, "f", 2 * BLOCK, BLOCK, EXPIRES + 100)
    opened = router.place.open(replace(later, expires=EXPIRES), PEER).message
    assert isinstance(opened, messages.Opened)
    router.place.staged(opened.tid, [(0, b"d" * 16)])
    router.now = EXPIRES + 1
    with monkeypatch.context() as full:
        full.setattr(durable, "_faults", durable.parse_faults("overlay-forget=ENOSPC"))
        with pytest.raises(OSError, match="No space"):
            router.place.expire()
        assert router.leftovers() == []
    again = router.place.open(later, PEER).message
    assert isinstance(again, messages.Opened)
    assert again.staged == (), "its data are gone"
    router.place.expire()
    assert (router.leftovers(), router.store.transfers()) == ([], [])
