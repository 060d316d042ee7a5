"""Where files are after any changes of names above them, whichever of their records have followed."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from random import Random

import pytest

from overlay_router.local import contents
from overlay_router.local.contents import SCHEMA, Contents, Identity, Made
from overlay_router.local.moves import Move, followed, sources
from stageout.overlay.wire.messages import Operation

_TRANSFERS = """
CREATE TABLE transfers (tid INTEGER PRIMARY KEY, digest TEXT);
CREATE TABLE staged (tid INTEGER, block INTEGER, digest BLOB);
INSERT INTO transfers VALUES (1, 'x');
INSERT INTO staged VALUES (1, 0, x'00');
"""
_WORLDS = 200


class _World:
    """Names of files as they are, beside what is recorded of them."""

    def __init__(self, random: Random, connection: sqlite3.Connection) -> None:
        connection.executescript(_TRANSFERS + SCHEMA)
        self._random, self._connection, self.kept = random, connection, Contents(connection)
        self.files: dict[str, int] = {}
        self._made = 0

    def step(self) -> None:
        kind = self._random.choice(["publish"] * 4 + ["rename"] * 4 + ["delete", "follow", "follow"])
        if kind == "publish" and self._is_free(path := self._path()):
            self._made += 1
            self.files[path] = self._made
            made = Made(1, Identity(self._made, 1, 1))
            self.kept.changed(Operation("o", 1, "publish", path, 0, blocks=1, manifest="m"), made)
        elif kind == "rename" and self.files:
            self._rename(self._some(), self._path())
        elif kind == "delete" and self.files:
            path = self._some()
            for gone in self._below(path):
                del self.files[gone]
            self.kept.changed(Operation("o", 1, "delete", path, 0), None)
        elif kind == "follow":
            self.kept.follow()

    def recorded(self) -> dict[str, int]:
        moves = self.kept._moves()
        rows = self._connection.execute("SELECT inode, path, since FROM contents")
        where = ((followed(path, since, moves), inode) for inode, path, since in rows)
        return {os.fsdecode(path): inode for path, inode in where if path is not None}

    def rows(self) -> dict[str, int]:
        return {
            os.fsdecode(path): inode for inode, path in self._connection.execute("SELECT inode, path FROM contents")
        }

    def _rename(self, path: str, target: str) -> None:
        apart = target != path and not target.startswith(path + "/") and not path.startswith(target + "/")
        if apart and self._is_free(target) and (target not in self.files or path in self.files):
            self.files.pop(target, None)
            for one in self._below(path):
                self.files[target + one[len(path) :]] = self.files.pop(one)
            self.kept.changed(Operation("o", 1, "rename", path, 0, target=target), None)

    def _path(self) -> str:
        return "/".join(self._random.choice(["a", "b", "a-", "a0", "c"]) for _ in range(self._random.randint(1, 4)))

    def _some(self) -> str:
        """A file, or a directory above it."""
        parts = self._random.choice(list(self.files)).split("/")
        return "/".join(parts[: self._random.randint(1, len(parts))])

    def _below(self, path: str) -> list[str]:
        return [one for one in self.files if one == path or one.startswith(path + "/")]

    def _is_free(self, path: str) -> bool:
        """A file may be there, and is replaced; nothing is below it, and no file above."""
        return not any(one.startswith(path + "/") or path.startswith(one + "/") for one in self.files)


def test_each_record_says_where_its_file_is_whatever_was_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = 0
    for seed in range(_WORLDS):
        random = Random(seed)
        for name, most in (("_AT_ONCE", random.randint(0, 3)), ("_STEP", random.randint(1, 3)), ("_MOST_MOVES", 4)):
            monkeypatch.setattr(contents, name, most)
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
            world = _World(random, connection)
            for _ in range(random.randint(5, 60)):
                world.step()
                noted += bool(world.kept._moves())
                assert world.recorded() == world.files, f"seed {seed}"
            while world.kept.follow():
                pass
            assert world.rows() == world.files, f"seed {seed}"
    assert noted > _WORLDS, "hardly anything was to follow"


def test_a_path_below_directories_that_were_renamed_level_by_level_is_looked_for_in_few_places() -> None:
    """There were twice as many with each level: 65536."""
    levels = [b"/".join([b"new"] * level) for level in range(17)]
    moves = [Move(level, b"%s/old" % levels[level - 1], levels[level], b"") for level in range(1, 17)]
    moves[0] = moves[0]._replace(path=b"old")
    places = sources(levels[16] + b"/f", moves)
    assert len(places) == 17
    assert all(followed(place, since, moves) == levels[16] + b"/f" for since, place in enumerate(_latest_last(places)))


def _latest_last(places: list[bytes]) -> list[bytes]:
    """As each move found them: the more of the old names, the earlier."""
    return sorted(places, key=lambda place: -place.split(b"/").count(b"old"))
