"""A custodian's database that is older than its spool: accepted files that it does not know are never deleted."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay_router.rules.states import Outcome, Result
from stageout.core import durable
from stageout.overlay.wire.messages import Custody, Open, Opened
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S
from tests.unit.test_overlay_custodian import BLOCK, EXPIRES, ORIGIN, PEER, TERMINAL, Spooling, _Death, _faulty
from tests.unit.test_overlay_pack_custody import FILES, pack

PACK = f"{ORIGIN}-11"


@pytest.fixture
def spooling() -> Iterator[Spooling]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        made = Spooling(Path(path), 10_000)
        yield made
        made.close()


def backup(spooling: Spooling, name: str) -> Path:
    spooling.close()
    target = spooling.home / name
    shutil.copy(spooling.home / "store", target)
    spooling.open()
    return target


def put_back(spooling: Spooling, copy: Path) -> None:
    """As docs/administrator/messages.md says."""
    spooling.close()
    for path in spooling.home.glob("store*"):
        path.unlink()
    shutil.copy(copy, spooling.home / "store")


def unknown(spooling: Spooling) -> list[str]:
    place = spooling.home / "unknown"
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def data_of(spooling: Spooling, seq: int, data: bytes) -> int:
    """Give the file that is in custody these bytes; returns its number."""
    (tid,) = (item.tid for item in spooling.store.transfers() if item.ask.seq == seq)
    spooling.tree.staging(tid).write_bytes(data)
    return tid


def take(spooling: Spooling, seq: int, data: bytes) -> int:
    assert isinstance(spooling.take(seq, "custody").message, Custody)
    return data_of(spooling, seq, data)


def older_and_newer(spooling: Spooling) -> tuple[Path, Path, int]:
    """A first deposit; a backup; a second one and a pack; another backup. With the number of the second."""
    take(spooling, 1, b"one1")
    older = backup(spooling, "older")
    tid = take(spooling, 2, b"two2")
    (taken,) = spooling.one.packs.take([pack(11, "custody")])
    assert isinstance(taken.message, Custody)
    return older, backup(spooling, "newer"), tid


def in_custody(spooling: Spooling) -> list[int]:
    return sorted([held.key[1] for held in spooling.one.held()] + [held.seq for held in spooling.one.packs.held()])


def test_what_an_older_database_does_not_know_is_set_aside_and_goes_back_with_the_newest(
    spooling: Spooling, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer, tid = older_and_newer(spooling)
    put_back(spooling, older)
    spooling.open()
    assert in_custody(spooling) == [1]
    assert unknown(spooling) == sorted([PACK, str(tid)])
    assert (spooling.home / "unknown" / str(tid)).read_bytes() == b"two2"
    lines = [line for line in caplog.text.splitlines() if " unknown-custody-found " in line]
    assert [(f"directory={spooling.home / 'unknown'}" in line, "put the newest" in line) for line in lines] == [
        (True, True)
    ] * 2, "one for packs, one for other files"

    other = take(spooling, 3, b"3333")
    assert other > tid + 1000, "no number that the newest may have granted"
    put_back(spooling, newer)
    spooling.open()
    assert in_custody(spooling) == [1, 2, 11]
    assert spooling.tree.staging(tid).read_bytes() == b"two2"
    assert all(data in (spooling.home / f".stageout/packs/{PACK}").read_bytes() for data in FILES.values())
    assert unknown(spooling) == [str(other)], "the newest does not know what came since then"
    spooling.restart()
    assert (in_custody(spooling), unknown(spooling)) == ([1, 2, 11], [str(other)])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("label", ["router-aside", "router-take-back"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_a_death_at_any_step_changes_nothing_in_the_end(
    spooling: Spooling, label: str, after: bool, count: int
) -> None:
    older, newer, tid = older_and_newer(spooling)
    for copy, expected in ((older, ([1], sorted([PACK, str(tid)]))), (newer, ([1, 2, 11], []))):
        put_back(spooling, copy)
        with _faulty(label, _Death(), after, count):
            try:
                spooling.open()
            except _Death:
                spooling.close()
                spooling.open()
        assert (in_custody(spooling), unknown(spooling)) == expected
    assert spooling.tree.staging(tid).read_bytes() == b"two2"


def test_what_has_its_end_is_removed_as_before(spooling: Spooling, caplog: pytest.LogCaptureFixture) -> None:
    """A death between the record of the end and the removal leaves it; that is no reason to alarm anybody."""
    take(spooling, 2, b"two2")
    spooling.one.packs.take([pack(11, "custody")])
    (held,) = spooling.one.packs.held()
    with _faulty("custody-pack-free", _Death(), after=False), pytest.raises(_Death):
        spooling.one.packs.settle([(held, [Result(Outcome.DONE)] * held.files)])
    with _faulty("overlay-discard", _Death(), after=False), pytest.raises(_Death):
        spooling.one.settle((ORIGIN, 2), Result(Outcome.DONE))
    assert spooling.files() == 1
    spooling.restart()
    assert (spooling.files(), [*(spooling.home / ".stageout/packs").iterdir()]) == (0, [])
    assert unknown(spooling) == []
    assert "unknown-custody-found" not in caplog.text


def test_nothing_is_written_over_in_unknown(spooling: Spooling) -> None:
    for text in ("first", "second"):
        (spooling.home / f".stageout/packs/{PACK}").write_text(text)
        spooling.restart()
    assert {name: (spooling.home / "unknown" / name).read_text() for name in unknown(spooling)} == {
        PACK: "first", f"{PACK}.2": "second",
    }  # fmt: skip


def test_numbers_of_what_somebody_put_there_are_not_granted(spooling: Spooling) -> None:
    """As after the loss of all records: then an administrator moves the data there."""
    place = spooling.home / "unknown"
    place.mkdir()
    number = spooling.store.last_tid() + 5
    for name in (str(number), "9" * 40, "notes.txt"):
        (place / name).touch()
    spooling.restart()
    opened = spooling.one.open(Open(ORIGIN, 1, "f", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER).message
    assert isinstance(opened, Opened)
    assert opened.tid > number


def test_it_is_removed_when_whatever_it_was_has_expired(spooling: Spooling, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (spooling.home / f".stageout/packs/{PACK}").touch()
    spooling.restart()
    spooling.clock.now_s = time.time() + MOST_EXPIRES_AFTER_S - 60
    spooling.one.expire(())
    assert unknown(spooling) == [PACK]
    spooling.clock.now_s += 3600
    spooling.one.expire(())
    assert unknown(spooling) == []
    assert f"unknown-custody-deleted files=1 first={PACK}" in caplog.text


def test_where_it_cannot_be_set_aside_it_stays(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    older, _, tid = older_and_newer(spooling)
    put_back(spooling, older)
    with monkeypatch.context() as patched:
        patched.setattr(durable, "_faults", durable.parse_faults("router-aside=ENOSPC"))
        with pytest.raises(OSError, match="No space left"):
            spooling.open()
        spooling.close()
    assert (spooling.home / f".stageout/packs/{PACK}").exists()
    assert spooling.tree.staging(tid).stat().st_size == 4
    spooling.open()
    assert unknown(spooling) == sorted([PACK, str(tid)])
