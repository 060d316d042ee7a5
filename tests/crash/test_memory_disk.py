"""The disk of the simulation keeps what POSIX promises, and forgets the rest."""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.crash.memory_disk import MemoryDisk


@pytest.fixture
def disk() -> MemoryDisk:
    made = MemoryDisk(now_ns=lambda: 1)
    made.make_dirs("/a/b")
    made.make_dirs("/a/c")
    return made


def _sync(disk: MemoryDisk, path: str) -> None:
    descriptor = disk.open(path, os.O_RDONLY)
    disk.fsync(descriptor)
    disk.close(descriptor)


def _outcomes(disk_of: object, look: object) -> set[object]:
    found = set()
    for seed in range(200):
        disk = disk_of()  # type: ignore[operator]
        disk.lose_power(Random(seed))
        found.add(look(disk))  # type: ignore[operator]
    return found


def _made(*synced: str) -> MemoryDisk:
    disk = MemoryDisk(now_ns=lambda: 1)
    disk.make_dirs("/a/b")
    disk.make_dirs("/a/c")
    disk.put("/a/b/file", b"content")
    for path in synced:
        _sync(disk, path)
    return disk


def test_what_was_synced_is_kept() -> None:
    assert _outcomes(lambda: _made("/a/b/file", "/a/b"), lambda disk: disk.get("/a/b/file")) == {b"content"}


def test_a_name_that_was_not_synced_may_go() -> None:
    assert _outcomes(lambda: _made("/a/b/file"), lambda disk: disk.exists("/a/b/file")) == {True, False}


def test_data_that_were_not_synced_may_be_gone_or_zeros() -> None:
    found = _outcomes(lambda: _made("/a/b"), lambda disk: disk.get("/a/b/file"))
    assert {b"content", b"", b"\0" * 7} <= found


def test_a_rename_survives_as_a_whole_or_not_at_all() -> None:
    def moved() -> MemoryDisk:
        disk = _made("/a/b/file", "/a/b")
        disk.rename("/a/b/file", "/a/c/other")
        return disk

    assert _outcomes(moved, lambda disk: (disk.exists("/a/b/file"), disk.exists("/a/c/other"))) == {
        (True, False),
        (False, True),
    }


def test_a_lock_goes_with_its_process(disk: MemoryDisk) -> None:
    disk.put("/a/lock", b"")
    disk.owner = "first"
    assert disk.try_lock(disk.open("/a/lock", os.O_RDWR))
    disk.owner = "second"
    assert not disk.try_lock(disk.open("/a/lock", os.O_RDWR))
    disk.end_process("first")
    assert disk.try_lock(disk.open("/a/lock", os.O_RDWR))


def test_a_refused_sync_is_told_once_and_leaves_zeros() -> None:
    disk, told = _made("/a/b"), list[str]()
    disk.refuses = lambda: told.append("refused")
    descriptor = disk.open("/a/b/file", os.O_RDONLY)
    with pytest.raises(OSError, match="Input/output"):
        disk.fdatasync(descriptor)
    disk.fdatasync(descriptor)
    assert (told, disk.get("/a/b/file")) == (["refused"], b"\0" * 7)


def test_a_full_disk_takes_nothing_and_gives_everything_back(disk: MemoryDisk) -> None:
    disk.put("/a/b/file", b"content")
    disk.full = True
    with pytest.raises(OSError, match="No space left"):
        disk.put("/a/b/more", b"x")
    disk.unlink("/a/b/file")
    assert disk.files_below("/a/b") == []
