"""Ledgers of other versions: the manager refuses them, says what to do, and leaves all as it is."""

from __future__ import annotations

import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandbox_manager.custody.ledger import Ledger, LedgerError
from sandbox_manager.custody.schema import VERSION
from stageout.core.states import State
from stageout.wire.handoff import Receipt
from tests.unit.manager_site import Site, made, run

_BEFORE_RELEASE = (Path(__file__).parent / "ledgers" / "before_release_1.sql").read_text()
#: Version, and SQL that gives it to a ledger.
_OTHERS = {
    "1 from before the first release": _BEFORE_RELEASE,
    str(VERSION + 1): f"PRAGMA user_version = {VERSION + 1}",
    "7": "PRAGMA user_version = 7",
}


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def as_left(path: Path, script: str) -> None:
    """Make a ledger as a manager leaves it that was killed: what it wrote last is only in SQLite's journal."""
    before = path.with_name("living")
    if script is not _BEFORE_RELEASE:
        Ledger(before).close()
    with closing(sqlite3.connect(before, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(script)
        db.execute("INSERT INTO meta VALUES ('report_number', '4711')")
        for end in ("", "-wal"):
            shutil.copyfile(f"{before}{end}", f"{path}{end}")
    before.unlink()
    assert path.with_name(f"{path.name}-wal").stat().st_size


def content(directory: Path) -> dict[str, bytes]:
    """All files, without SQLite's index of the journal, which follows from the journal."""
    return {item.name: item.read_bytes() for item in directory.iterdir() if not item.name.endswith("-shm")}


@pytest.mark.parametrize("version", _OTHERS)
def test_a_ledger_of_another_version_is_refused_and_not_touched(version: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger" / "ledger.sqlite"
    path.parent.mkdir()
    as_left(path, _OTHERS[version])
    before = content(path.parent)
    for _ in range(2):
        with pytest.raises(LedgerError) as raised:
            Ledger(path, tmp_path)
        assert content(path.parent) == before
    text = str(raised.value)
    steps = [f"has version {version}, this program knows {VERSION} ", "start that version", "status --node --empty"]
    steps += [f"move {path.parent} out of the spool", "unknown/"]
    assert [text.find(step) for step in steps] == sorted(text.index(step) for step in steps), text


def test_output_of_another_version_is_delivered_by_that_version_after_a_refused_start(site: Site) -> None:
    """The first step that the message names."""
    path = site.base / "spool" / "ledger" / "ledger.sqlite"
    receipts: list[Receipt] = []

    async def accept() -> None:
        async with site.manager(moving=False) as node:
            receipts.append(await node.hand_off({"copy://h/ok/out": b"output"}))

    run(accept())
    set_version(path, VERSION + 1)
    with pytest.raises(LedgerError, match=f"has version {VERSION + 1}"):
        Ledger(path, site.base / "spool" / "sandboxes")
    set_version(path, VERSION)

    async def deliver() -> None:
        async with site.manager() as node:
            await node.confirm(*receipts)
            await node.until_state(State.RELEASED)

    run(deliver())
    assert site.delivered() == ["out"]


def set_version(path: Path, version: int) -> None:
    """Make a ledger one of another version."""
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before 3.11 only a disk that is really full is told apart, not a page limit"
)
def test_on_a_full_disk_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sandbox_manager.custody.ledger as module

    open_ledger = module._open

    def limited(path: Path) -> sqlite3.Connection:
        connection = open_ledger(path)
        connection.execute("PRAGMA max_page_count = 2")
        return connection

    with monkeypatch.context() as patches:
        patches.setattr(module, "_open", limited)
        with pytest.raises(LedgerError, match="make room") as raised:
            Ledger(tmp_path / "l")
    assert raised.value.is_temporary, "condor_master starts the manager again"
    Ledger(tmp_path / "l").close()
