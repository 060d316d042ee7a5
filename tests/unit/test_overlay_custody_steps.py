"""Order and memory of durable steps: what a death between two of them, or a start, must not lose."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay_router.local import hidden
from overlay_router.local.hidden import Directories, Hidden
from overlay_router.rules.states import Outcome, Result
from stageout.wire import blocks, overlay
from stageout.wire.overlay import Custody
from tests.unit.test_overlay_custodian import ORIGIN, PEER, Spooling, _Death, _faulty
from tests.unit.test_overlay_pack_custody import pack

KEY = (ORIGIN, 1)


@pytest.fixture
def spooling() -> Iterator[Spooling]:
    with tempfile.TemporaryDirectory() as place:
        made = Spooling(Path(place), 10_000)
        yield made
        made.close()


def test_a_pack_whose_sender_frees_it_is_recorded_only_behind_its_data(spooling: Spooling) -> None:
    """A record of data that never came to the disk would be a loss that nobody can mend."""
    one = pack(release="custody")
    with _faulty("custody-pack-write", _Death(), after=False), pytest.raises(_Death):
        spooling.one.packs.take([one])
    spooling.restart()
    assert spooling.one.packs.held() == []
    assert not spooling.store.record(ORIGIN).results
    (reply,) = spooling.one.packs.take([one])
    assert reply.message == Custody(ORIGIN, 1, "me:1")


def test_what_is_not_wanted_is_known_after_a_restart(spooling: Spooling) -> None:
    spooling.take(1)
    assert spooling.one.cancel(overlay.Cancel(*KEY), PEER) == []
    spooling.restart()
    assert spooling.one.cancelled == {KEY}


def test_a_wish_that_could_not_be_recorded_is_recorded_when_it_is_said_again(spooling: Spooling) -> None:
    spooling.take(1)
    with _faulty("overlay-cancel", OSError(errno.EIO, "planned"), after=False):
        with pytest.raises(OSError, match="planned"):
            spooling.one.cancel(overlay.Cancel(*KEY), PEER)
        spooling.one.cancel(overlay.Cancel(*KEY), PEER)
    spooling.restart()
    assert spooling.one.cancelled == {KEY}


def test_what_a_loss_leaves_at_the_terminal_is_known_after_a_restart(spooling: Spooling) -> None:
    spooling.take(1, "custody")
    spooling.one.damaged(KEY, [0])
    spooling.restart()
    assert [stray.key for stray in spooling.one.strays()] == [KEY]


def test_results_of_packs_that_their_origin_has_settled_are_not_told_again(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    spooling.one.packs.settle([(held, [Result(Outcome.DONE)] * 3) for held in spooling.one.packs.held()])
    spooling.one.low(overlay.Low(ORIGIN, 2))
    for _ in range(2):
        assert list(spooling.store.results_of(ORIGIN, range(1, 4))) == [3]
        spooling.restart()


@pytest.mark.parametrize("sync", [True, False])
def test_the_data_of_each_small_file_are_synced_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    place = os.open(tmp_path, os.O_RDONLY)
    try:
        with Hidden(place, None, 0o022) as batch:
            inodes = batch.write([(0o777, b"one"), (0o600, b"two")], sync)
    finally:
        os.close(place)
    assert synced == (inodes if sync else [])
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o777, 0o600}, "whatever the umask says"


def test_names_in_more_directories_than_stay_open_are_synced_with_the_filesystem(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[object] = []
    for name in ("a", "b", "c"):
        (spooling.home / name).mkdir()
    monkeypatch.setattr(hidden, "SYNC_ALL_FROM", 2)
    monkeypatch.setattr(hidden, "sync_filesystem", lambda place: synced.append("all"))
    monkeypatch.setattr(os, "fsync", synced.append)
    for names in ("ab", "abc"):
        with Directories(spooling.tree) as directories:
            descriptors = [directories.open(name, f"{name}/file") for name in names]
            directories.sync(0)
        assert synced == (descriptors if names == "ab" else ["all"])
        synced.clear()


def test_blocks_that_go_first_go_before_the_others_also_when_some_have_gone() -> None:
    table = blocks.BlockTable(4)
    blocks.await_all(table)
    blocks.arrived(table, [3])
    blocks.arrived(table, [0], first=True)
    assert blocks.take(table, 1) == 0
    blocks.arrived(table, [1, 2], first=True)
    assert [blocks.take(table, 1) for _ in range(3)] == [1, 2, 3]


def test_after_a_new_beginning_nobody_of_before_counts_as_a_carrier() -> None:
    """Else a block would wait for ever for one that has died long ago."""
    table = blocks.BlockTable(1)
    blocks.reopened(table, [])
    assert blocks.take(table, 1) == 0
    blocks.reopened(table, [])
    assert blocks.take(table, 2) == 0
    assert blocks.carrier_down(table, 2) == [0]
