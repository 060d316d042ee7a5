"""The terminal's trash: however deep or odd a tree, it goes, follows no link and holds up nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from overlay_router.local.trash import Trash
from stageout.core import durable
from stageout.movers import trees
from tests.polling import wait_for

DEPTH = 3000


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Nothing is left of it that would be too deep for whoever removes the directories of tests."""
    made = tmp_path / "trash"
    made.mkdir()
    yield made
    trees.remove(tmp_path, "trash")


def make_deep(parent: Path, depth: int) -> None:
    """Directories in each other, a file in the innermost: paths of such a depth are longer than the kernel takes."""
    inner = os.open(parent, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=inner))
    os.close(inner)


@pytest.mark.parametrize("in_thread", [False, True])
def test_any_depth(place: Path, in_thread: bool) -> None:
    make_deep(place, DEPTH)
    with closing(Trash(place, in_thread)) as trash:
        trash.remove("d")
        wait_for(lambda: not any(place.iterdir()), "the tree to be removed")


def test_who_deletes_waits_for_no_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, real = threading.Event(), durable.disk.rmdir

    def slow(*names: str, **more: int) -> None:
        assert go_on.wait(60)
        real(*names, **more)

    monkeypatch.setattr(durable.disk, "rmdir", slow)
    (place / "d").mkdir()
    (place / "file").touch()
    with closing(Trash(place, in_thread=True)) as trash:
        trash.remove("d")
        trash.remove("file")
        assert [path.name for path in place.iterdir()] == ["d"]
        go_on.set()
        wait_for(lambda: not any(place.iterdir()), "the directory to be removed")


def test_links_are_removed_and_not_followed(place: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (place / "d" / "e").mkdir(parents=True)
    (place / "d" / "e" / "link").symlink_to(outside)
    (place / "link").symlink_to(outside)
    Trash(place, in_thread=False).remove_all()
    assert [*place.iterdir()] == []
    assert (outside / "precious").exists()


def test_what_cannot_be_removed_holds_up_nothing_else(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        (place / name).mkdir()
    (place.parent / "armed").touch()
    faults = durable.parse_faults(f"overlay-empty=EROFS@{place.parent / 'armed'}")
    monkeypatch.setattr(durable, "_faults", faults)
    with closing(Trash(place, in_thread=True)) as trash:
        trash.remove("first")
        trash.remove("second")
        wait_for(lambda: [path.name for path in place.iterdir()] == ["first"], "the second to be removed")
        assert "data-cleanup-failed" in caplog.text
        trash.remove_all()
        wait_for(lambda: not any(place.iterdir()), "the first to be removed")
