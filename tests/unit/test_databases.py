"""The cause of a database's error is found where Python does not name it (before 3.11)."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from overlay_router.away import unwelcome
from overlay_router.local.store import Store
from overlay_router.local.tree import no_room
from stageout.core import durable
from stageout.core.databases import code_of, find_code, is_full, is_read_only, open_alone


def _as_before(problem: sqlite3.Error) -> sqlite3.Error:
    """The same, of a Python that says nothing of it."""
    for name in ("sqlite_errorcode", "sqlite_errorname"):
        with suppress(AttributeError):
            delattr(problem, name)
    return problem


def _fails(number: int) -> Callable[..., NoReturn]:
    def fails(*place: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fails


def test_a_database_that_has_all_pages_that_it_may_have_is_full(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE some (data BLOB)")
        connection.execute("PRAGMA max_page_count=3")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("INSERT INTO some VALUES (zeroblob(100000))")
        problem = _as_before(caught.value)
        connection.execute("PRAGMA max_page_count=2")
        find_code(problem, tmp_path / "db", connection)
    assert is_full(problem)
    assert no_room(problem)


@pytest.mark.parametrize(
    ("number", "full", "read_only"),
    [
        (errno.ENOSPC, True, False),
        (errno.EDQUOT, True, False),
        (errno.EROFS, False, True),
        (errno.EIO, False, False),
        (0, False, False),
    ],
)
def test_a_file_beside_it_meets_what_it_met(
    number: int, full: bool, read_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number:
        monkeypatch.setattr(os, "posix_fallocate", _fails(number))
    problem = sqlite3.OperationalError("whatever it says")
    find_code(problem, tmp_path / "db")
    assert (is_full(problem), is_read_only(problem)) == (full, read_only)
    assert list(tmp_path.iterdir()) == []


def test_what_is_known_is_believed_and_damage_is_no_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _fails(errno.ENOSPC))
    known, damaged = sqlite3.OperationalError("locked"), sqlite3.DatabaseError("malformed")
    vars(known)["sqlite_errorcode"] = 5
    for problem in (known, damaged):
        find_code(problem, tmp_path / "db")
    assert [code_of(problem) for problem in (known, damaged)] == [5, 0]


@pytest.mark.parametrize(("number", "word"), [(errno.ENOSPC, "is full"), (errno.EROFS, "read-only"), (0, "fails")])
def test_a_sender_hears_of_a_database_what_it_is(
    number: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was always told that the disk is full."""

    def fails(*place: object) -> NoReturn:
        raise sqlite3.OperationalError("something was not possible")

    with closing(Store(tmp_path / "db")) as store, monkeypatch.context() as patched:
        patched.setattr(durable, "commit", fails)
        if number:
            patched.setattr(os, "posix_fallocate", _fails(number))
        with pytest.raises(sqlite3.OperationalError) as caught:
            store.unstage(1)
    told = unwelcome(caught.value, "crc32")
    assert told is not None
    assert word in str(told)


def test_one_in_a_directory_that_is_not_there_is_not_full(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError) as caught:
        open_alone(tmp_path / "missing" / "db")
    assert not is_full(caught.value)
