"""Records that are damaged, lost or of another program: nothing is lost or overwritten, and it is said what to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from overlay_router import daemon
from overlay_router.copying.copies import CopyStore
from overlay_router.custodians.spool import CustodyStore, EgressStore
from overlay_router.local.store import Store, StoreError
from policy_service.lease_store import LeaseStore as Leases
from policy_service.lease_store import LeaseStoreError as LeasesError
from tests.unit.test_overlay_custodian import Spooling


@pytest.mark.parametrize("records", [Store, CustodyStore, EgressStore, CopyStore, Leases])
@pytest.mark.parametrize("version", [0, 4])
def test_the_database_of_another_program_is_not_touched(
    records: type[Store] | type[Leases], version: int, tmp_path: Path
) -> None:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (data BLOB)")
        connection.execute(f"PRAGMA user_version={version}")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises((StoreError, LeasesError), match=r"of another program.*move it away"):
        records(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("records", [CustodyStore, EgressStore, CopyStore])
def test_what_stands_in_the_place_of_others_is_not_touched(records: type[Store], tmp_path: Path) -> None:
    """As after a backup that was put back under the wrong name."""
    path = tmp_path / "db"
    Store(path).close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"another program, which was not touched: move it away"):
        records(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("table", ["meta", "transfers", "intents"])
def test_records_whose_damage_is_found_behind_their_beginning_are_said_to_be_damaged(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, root, keys = tmp_path / "home" / "router.sqlite", tmp_path / "root", tmp_path / "keys"
    records.parent.mkdir()
    root.mkdir()
    keys.touch(0o600)
    keys.write_text(f"site {'0' * 24} /\n")
    with closing(Store(records)) as store:
        (page,) = store._connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (page_bytes,) = store._connection.execute("PRAGMA page_size").fetchone()
    with records.open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(b"\xff" * page_bytes)
    settings = {"ROOT": root, "DIR": records.parent, "KEYS": keys, "HOST": "127.0.0.1", "PORT": 0}
    lines = tmp_path / "router.env"
    lines.write_text("".join(f"STAGEOUT_ROUTER_{name}={value}\n" for name, value in settings.items()))
    assert daemon.main(["--settings", str(lines)]) == 99
    said = capsys.readouterr().err
    assert f"{records}: " in said
    assert "It is damaged, and may be removed" in said


@pytest.mark.parametrize("records", [CustodyStore, EgressStore])
def test_nobody_is_told_to_remove_the_only_records_of_what_is_in_custody(
    records: type[CustodyStore], tmp_path: Path
) -> None:
    (tmp_path / "db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="damaged: put it back from a backup") as caught:
        records(tmp_path / "db")
    assert "may be removed" not in str(caught.value)


@pytest.mark.parametrize("is_there", [False, True])
def test_without_its_records_nothing_in_a_spool_is_removed(tmp_path: Path, is_there: bool) -> None:
    """As nobody's, as it was: a file that was cut off to nothing looks like a new one."""
    spooling = Spooling(tmp_path, 1000)
    spooling.take()
    spooling.close()
    (records,) = (path for path in tmp_path.iterdir() if path.is_file() and not path.name.endswith(("-wal", "-shm")))
    kept = records.read_bytes()
    for path in tmp_path.glob(f"{records.name}*"):
        path.unlink()
    if is_there:
        records.write_bytes(b"")
    staging = tmp_path / ".stageout/staging"
    before = sorted(staging.iterdir())
    assert before
    for _ in range(2):  # the first start has made new records
        with pytest.raises(StoreError, match=r"has data, and .* was empty, or not there"):
            spooling.open()
        spooling.close()
    assert sorted(staging.iterdir()) == before
    for path in tmp_path.glob(f"{records.name}-*"):
        path.unlink()
    records.write_bytes(kept)
    spooling.open()
    assert len(spooling.one.held()) == 1
    spooling.close()
