"""Durable steps against a disk that forgets what was not synced, and the table of states."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from stageout.core import durable
from stageout.core.states import MOVES, IllegalMove, State, move
from tests.crash.memory_disk import MemoryDisk


class _NoPower(BaseException):
    """The machine stops here."""


def _disk() -> MemoryDisk:
    disk = MemoryDisk(now_ns=lambda: 1)
    disk.make_dirs("/a")
    disk.make_dirs("/b")
    disk.put("/a/f", b"old")
    for path in ("/a/f", "/a"):
        descriptor = disk.open(path, 0)
        disk.fsync(descriptor)
        disk.close(descriptor)
    return disk


def _after_losses(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], calls: int, chances: int = 20) -> set[str]:
    """The states of the disk when the power goes before this call that changes something (or behind the last)."""
    found = set()
    for seed in range(chances):
        disk, left = _disk(), [calls]

        def called(name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise _NoPower

        disk.called = called
        monkeypatch.setattr(durable, "disk", disk)
        try:
            work()
        except _NoPower:
            pass
        else:
            found.add("returned")
        disk.lose_power(Random(seed))
        files = [path for path in ("/a/f", "/a/g", "/b/f") if disk.exists(path)]
        found.update(f"{path}={disk.get(path).decode('latin-1')}" for path in files or ["/a/f"])
    return found


@pytest.mark.parametrize(
    ("work", "before", "after"),
    [
        (lambda: durable.write_file("x", "/a/f", b"new"), "/a/f=old", "/a/f=new"),
        (lambda: durable.rename("x", "/a/f", "/b/f"), "/a/f=old", "/b/f=old"),
        (lambda: durable.rename("x", "/a/f", "/a/g"), "/a/f=old", "/a/g=old"),
    ],
    ids=["write", "rename", "rename-beside"],
)
def test_power_lost_at_any_moment_leaves_the_old_or_the_new_and_on_return_the_new(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], before: str, after: str
) -> None:
    seen: set[str] = set()
    for calls in range(20):
        found = _after_losses(monkeypatch, work, calls)
        seen |= found
        if "returned" in found:
            assert found == {"returned", after}
            break
        assert found <= {before, after}
    assert seen == {"returned", before, after}


def test_power_lost_while_a_file_grows_leaves_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for calls in range(20):
        found = _after_losses(monkeypatch, lambda: durable.append_file("x", "/a/f", b"new", 0o600, 3), calls)
        if "returned" in found:
            assert found == {"returned", "/a/f=oldnew"}
            break
        assert found and all(text.startswith("/a/f=old") for text in found)


def test_what_is_appended_to_a_full_disk_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _disk()
    monkeypatch.setattr(durable, "disk", disk)
    monkeypatch.setitem(durable._faults, "x", [durable.Fault("short-write", None)])
    with pytest.raises(OSError, match="No space left"):
        durable.append_file("x", "/a/f", b"new", 0o600, 3)
    assert disk.get("/a/f") == b"old"


def test_a_part_behind_the_end_is_cut_off_before_more_is_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _disk()
    monkeypatch.setattr(durable, "disk", disk)
    durable.append_file("x", "/a/f", b"new", 0o600, 1)
    assert disk.get("/a/f") == b"onew"


@pytest.mark.parametrize("old", State)
def test_a_move_that_is_not_in_the_table_raises(old: State) -> None:
    for new in State:
        if new in MOVES[old]:
            assert move(old, new) is new
        else:
            with pytest.raises(IllegalMove, match=f"from {old} to {new}"):
                move(old, new)
