"""Blocks that come back into the local file: what fits into memory stays there, what does not leaves it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.overlay import writing
from stageout.overlay.wire.messages import BLOCK_BYTES
from stageout.overlay.writing import LARGE_BYTES, STEP_BYTES, Writing

STEP_BLOCKS = STEP_BYTES // BLOCK_BYTES


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges (from, to) whose pages are not needed any more."""
    told: list[tuple[int, int]] = []

    def advised(file: int, start: int, size_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        told.append((start, start + size_bytes))

    monkeypatch.setattr(os, "posix_fadvise", advised)
    return told


def _write(file: int, size_bytes: int, blocks: int, every: int = 1) -> bytes:
    """Blocks of a file of that size: each of the first ones, or the last one of each few."""
    whole, data = Writing(file, size_bytes), os.urandom(BLOCK_BYTES)
    for block in range(every - 1, blocks, every):
        whole.write(memoryview(data), block * BLOCK_BYTES)
    return data


@pytest.mark.parametrize("room", [None, LARGE_BYTES, LARGE_BYTES + 1])
def test_what_fits_stays_in_memory(
    file: int, let_go: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    monkeypatch.setattr(writing, "room_bytes", lambda: room)
    _write(file, LARGE_BYTES, 2 * STEP_BLOCKS)
    assert not let_go


@pytest.mark.parametrize("room", [0, LARGE_BYTES - 1])
def test_what_does_not_fit_leaves_it_as_it_comes(
    file: int, let_go: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(writing, "room_bytes", lambda: room)
    _write(file, LARGE_BYTES, 7 * STEP_BLOCKS, STEP_BLOCKS)
    assert [end for _, end in let_go] == [step * STEP_BYTES for step in range(1, 8)]
    assert let_go[0] == (0, STEP_BYTES)
    assert let_go[-1] == (STEP_BYTES, 7 * STEP_BYTES), "what was not on the disk yet is told of again"


def test_it_leaves_once_for_many_blocks(
    file: int, let_go: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "room_bytes", lambda: 0)
    _write(file, LARGE_BYTES, STEP_BLOCKS + 1)
    assert let_go == [(0, STEP_BYTES)]


def test_what_leaves_memory_is_in_the_file(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "room_bytes", lambda: 0)
    blocks = 2 * STEP_BLOCKS
    data = _write(file, LARGE_BYTES, blocks)
    assert os.pread(file, blocks * BLOCK_BYTES + 1, 0) == data * blocks


def test_of_a_small_file_nobody_asks(file: int, let_go: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> int:
        pytest.fail("nobody needs to know")

    monkeypatch.setattr(writing, "room_bytes", asked)
    _write(file, LARGE_BYTES - 1, STEP_BLOCKS)
    assert not let_go


def test_a_filesystem_that_takes_no_hints_is_written_all_the_same(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(writing, "room_bytes", lambda: 0)
    monkeypatch.setattr(os, "posix_fadvise", refused)
    data = _write(file, LARGE_BYTES, STEP_BLOCKS)
    assert os.pread(file, STEP_BYTES, 0) == data * STEP_BLOCKS


def test_what_a_disk_takes_in_pieces_is_written_whole(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, write = os.urandom(5000), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, part, offset: write(file, part[:999], offset))
    Writing(file, len(data)).write(memoryview(data), 0)
    assert os.pread(file, len(data) + 1, 0) == data
