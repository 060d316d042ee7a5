"""Removal of directories of untrusted users: no link is followed, and their owner has no access meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stageout.core import durable
from stageout.movers import trees

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that nobody may empty."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "precious").write_text("precious")
    return place


@pytest.fixture
def top(tmp_path: Path) -> Path:
    place = tmp_path / "top"
    place.mkdir()
    return place


class _Swap:
    """The disk as it is for a user who puts a link in place of a directory in the moment between two system calls."""

    def __init__(self, directory: Path, target: Path) -> None:
        self._directory, self._target = directory, target
        self._disk = durable.disk

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def stat(self, name: str, **more: object) -> os.stat_result:
        found: os.stat_result = self._disk.stat(name, **more)
        if name == self._directory.name and stat.S_ISDIR(found.st_mode):
            self._directory.rmdir()
            self._directory.symlink_to(self._target)
        return found


def test_link_in_place_of_the_parent_is_an_error(top: Path, outside: Path) -> None:
    (top / "link").symlink_to(outside)
    with pytest.raises(OSError, match="Not a directory"), trees.opened(top / "link"):
        pass
    with pytest.raises(OSError, match="Not a directory"):
        trees.remove(top / "link", "precious")
    assert (outside / "precious").exists()


def test_link_is_removed_and_not_followed(top: Path, outside: Path) -> None:
    (top / "user").mkdir()
    (top / "user/link").symlink_to(outside)
    trees.remove(top, "user")
    assert not list(top.iterdir())
    assert (outside / "precious").exists()


def test_link_that_replaces_a_directory_meanwhile_is_not_followed(
    top: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "user").mkdir()
    monkeypatch.setattr(durable, "disk", _Swap(top / "user", outside))
    with pytest.raises(OSError, match="Not a directory"):
        trees.remove(top, "user")
    assert (outside / "precious").exists()


@needs_root
def test_owner_has_no_access_while_a_directory_is_emptied(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / "user").mkdir(0o777)
    (top / "user/file").touch()
    os.chown(top / "user", 2001, 2001)
    seen = []
    unlink = durable.disk.unlink

    def note(name: str, **more: object) -> None:
        found = (top / "user").stat()
        seen.append((found.st_uid, stat.S_IMODE(found.st_mode)))
        unlink(name, **more)

    monkeypatch.setattr(durable.disk, "unlink", note)
    trees.remove(top, "user")
    assert seen == [(0, 0o700)]
