"""Signed origins by the keys that brought their operations."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from overlay_router.peers.brought import Brought
from stageout.core import durable
from stageout.core.errors import StageoutError
from tests.unit.test_overlay_destination import Crash, _dying

ALICE, BOB, ROUTER = "aa" * 16, "bb" * 16, "0a" * 16
KNOWN, OTHER = "c0" * 20, "c1" * 20
NOW = 1_700_000_000
DAY_S = 86400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "brought.sqlite"


@pytest.fixture
def brought(path: Path) -> Iterator[Brought]:
    with closing(Brought(path)) as found:
        yield found


def changing(brought: Brought, said: str) -> dict[str, bool]:
    return {name.known: name.changes for name in brought.find(said)}


def test_the_first_key_and_routers_change_what_others_only_ask_about(brought: Brought, path: Path) -> None:
    assert brought.find(ALICE) == ()
    assert brought.bring(ALICE, KNOWN, NOW, is_router=False).changes
    assert not brought.bring(BOB, KNOWN, NOW, is_router=False).changes
    assert brought.bring(ROUTER, KNOWN, NOW, is_router=True).changes
    assert brought.bring(BOB, OTHER, NOW, is_router=False).changes
    brought.close()
    with closing(Brought(path)) as later:
        assert later.kept(BOB) is None
        assert [changing(later, said) for said in (ALICE, BOB, ROUTER)] == [
            {KNOWN: True}, {KNOWN: False, OTHER: True}, {KNOWN: True},
        ]  # fmt: skip
        assert later.bring(ALICE, KNOWN, NOW + 9000, is_router=False).changes, "the same one as before"
        assert not later.bring(BOB, KNOWN, NOW + 9000, is_router=False).changes


def test_a_row_is_written_once_an_hour_and_forgotten_a_day_behind_the_end(brought: Brought) -> None:
    assert brought.is_new(ALICE, KNOWN, NOW)
    brought.bring(ALICE, KNOWN, NOW, is_router=False)
    assert not brought.is_new(ALICE, KNOWN, NOW + 3600)
    assert brought.is_new(ALICE, KNOWN, NOW + 3601)
    assert brought.is_new(ALICE, OTHER, NOW)
    end = brought.find(ALICE)[0].expires
    brought.expire(end + 86400)
    assert changing(brought, ALICE) == {KNOWN: True}
    brought.expire(end + 86401)
    assert brought.find(ALICE) == ()


def test_what_cannot_be_written_is_known_until_the_next_start(
    brought: Brought, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DELETE that makes room on a full disk goes on."""

    def full(label: str, connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(durable, "commit", full)
    assert brought.bring(ALICE, KNOWN, NOW, is_router=False).changes
    assert changing(brought, ALICE) == {KNOWN: True}
    assert not brought.bring(BOB, KNOWN, NOW, is_router=False).changes
    monkeypatch.undo()
    assert brought.bring(ALICE, OTHER, NOW, is_router=False).changes
    brought.close()
    with closing(Brought(path)) as later:
        assert changing(later, ALICE) == {OTHER: True}


def test_a_database_of_a_later_version_or_another_program_is_left_alone(tmp_path: Path) -> None:
    for name, statement, words in (
        ("later", "CREATE TABLE brought (x); PRAGMA user_version=9", "a later version of the router made it"),
        ("other", "CREATE TABLE other (x)", "another program"),
    ):
        with closing(sqlite3.connect(tmp_path / name)) as made:
            made.executescript(statement)
        with pytest.raises(StageoutError, match=words):
            Brought(tmp_path / name)
    (tmp_path / "damaged").write_bytes(b"x" * 8192)
    with pytest.raises(StageoutError, match="it may be removed"):
        Brought(tmp_path / "damaged")


def _lived(path: Path) -> dict[str, bool]:
    with closing(Brought(path)) as brought:
        brought.expire(NOW + 2 * DAY_S)
        brought.bring(ALICE, KNOWN, NOW + 3 * DAY_S, is_router=False)
        brought.bring(BOB, KNOWN, NOW + 3 * DAY_S, is_router=False)
        return {**changing(brought, ALICE), f"bob's {KNOWN}": changing(brought, BOB)[KNOWN]}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("label", ["brought-make", "brought-write", "brought-forget"])
def test_a_death_at_each_step_is_mended_by_the_next_start(path: Path, label: str, when: str) -> None:
    if label != "brought-make":
        with closing(Brought(path)) as brought:
            brought.bring(ALICE, OTHER, NOW, is_router=False)
    with _dying(label, 1, when) as passed, pytest.raises(Crash):
        _lived(path)
    assert label in passed
    assert _lived(path) == {KNOWN: True, f"bob's {KNOWN}": False}
