"""Durable steps of the overlay: their order, and what is known after a death between two of them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay_router.custodians.pack_carrier import Answer
from overlay_router.custodians.pack_forwarder import PackForwarder
from overlay_router.local import hidden
from overlay_router.local.hidden import Directories, Hidden
from overlay_router.peers.keys import OwnCredential
from overlay_router.rules.states import Outcome, Result
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import blocks, messages
from stageout.overlay.wire.messages import Cancel, Custody, Low, Open, Opened
from tests.unit.test_overlay_custodian import ORIGIN, PEER, Spooling, _Death, _faulty, coming
from tests.unit.test_overlay_destination import BLOCK, EXPIRES, Router, digests_of, op
from tests.unit.test_overlay_pack_custody import pack

KEY = (ORIGIN, 1)
#: Of what a terminal hears that is no operation.
BESIDE = ("overlay-unstage", "overlay-cancel", "overlay-low", "overlay-abandon", "overlay-forget")


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
    assert spooling.one.cancel(messages.Cancel(*KEY), PEER) == []
    spooling.restart()
    assert spooling.one.cancelled == {KEY}


def test_a_wish_that_could_not_be_recorded_is_recorded_when_it_is_said_again(spooling: Spooling) -> None:
    spooling.take(1)
    with _faulty("overlay-cancel", OSError(errno.EIO, "planned"), after=False):
        with pytest.raises(OSError, match="planned"):
            spooling.one.cancel(messages.Cancel(*KEY), PEER)
        spooling.one.cancel(messages.Cancel(*KEY), PEER)
    spooling.restart()
    assert spooling.one.cancelled == {KEY}


def test_what_a_loss_leaves_at_the_terminal_is_known_after_a_restart(spooling: Spooling) -> None:
    spooling.take(1, "custody")
    spooling.one.damaged(KEY, [0])
    spooling.restart()
    assert [stray.key for stray in spooling.one.strays()] == [KEY]


def test_what_comes_in_is_known_before_it_is_in_custody(spooling: Spooling) -> None:
    coming(spooling, 1)
    assert spooling.one.knows(*KEY)
    assert not spooling.one.knows(ORIGIN, 2)


def test_results_of_packs_that_their_origin_has_settled_are_not_told_again(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    spooling.one.packs.settle([(held, [Result(Outcome.DONE)] * 3) for held in spooling.one.packs.held()])
    spooling.one.low(messages.Low(ORIGIN, 2))
    for _ in range(2):
        assert list(spooling.store.results_of(ORIGIN, range(1, 4))) == [3]
        spooling.restart()


@pytest.mark.parametrize("kind", [ErrorClass.CONNECT_FAILED, ErrorClass.NO_SPACE_REMOTE])
def test_who_is_away_or_full_is_left_alone_for_as_long_as_it_says(spooling: Spooling, kind: ErrorClass) -> None:
    async def run() -> float:
        forwarder = PackForwarder(spooling.one.packs, None, None, OwnCredential(), spooling.clock)  # type: ignore[arg-type]
        spooling.one.packs.take([pack()])
        (held,) = spooling.one.packs.held()
        forwarder._failed(held, Answer(1, failure="not now", code=kind.code, retry_after_s=7.0))
        (pause,) = (*forwarder._away.values(), *forwarder._pauses.values())
        return pause.until_s - spooling.clock.now_s

    assert asyncio.run(run()) >= 7.0


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


def test_nobody_duplicates_blocks_while_others_wait_for_their_first_turn() -> None:
    table = blocks.BlockTable(3)
    blocks.reopened(table, [])
    assert blocks.take(table, 1) == 0
    blocks.staged(table, [1])
    assert blocks.tail(table, [2]) == [], "the last one has not gone yet"
    assert blocks.take(table, 1) == 2
    assert blocks.tail(table, [2]) == [0, 2]


# ---- the terminal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path / "router")
    yield made
    made.close()


def test_every_directory_that_a_change_touches_is_synced_before_its_result(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, set[int]()

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    trash = (router.root / ".stageout/trash").stat().st_ino

    def synced_by(operation: messages.Operation, data: bytes = b"") -> set[int]:
        synced.clear()
        assert router.send(operation, data) == "done"
        return set(synced)

    def inode(path: str) -> int:
        return (router.root / path).stat().st_ino

    assert inode("") in synced_by(op(1, "mkdir", "d"))
    touched = synced_by(op(2, "publish", "d/f"), b"data")
    assert {inode("d"), inode("d/f")} <= touched
    assert {inode("d"), inode("")} <= synced_by(op(3, "rename", "d/f", target="e"))
    assert inode("e") in synced_by(op(4, "setattr", "e", mode=0o600, attributes=("mode",)))
    assert {inode(""), trash} <= synced_by(op(5, "delete", "e"))


def test_what_was_done_and_could_not_be_recorded_is_not_done_again(router: Router) -> None:
    (router.root / "a").write_text("data")
    rename = op(1, "rename", "a", target="b")
    with _faulty("overlay-settle", OSError(errno.ENOSPC, "planned"), after=False), pytest.raises(OSError, match="plan"):
        router.send(rename)
    (router.root / "a").write_text("another")
    assert router.send(rename) == "done"
    assert router.content() == {"a": "another", "b": "data"}


def test_no_data_are_taken_for_a_path_that_cannot_be(router: Router) -> None:
    answer = router.place.open(messages.Open(ORIGIN, 1, "../f", 4, 4, EXPIRES), PEER).message
    assert isinstance(answer, messages.Result)
    assert (answer.outcome, "not a path below the root" in answer.reason) == ("failed", True)


def _told_beside(router: Router) -> None:
    """The messages that a terminal hears beside operations, data that are not as meant, and at last the end of all
    times."""
    place = router.place
    opened = place.open(Open(ORIGIN, 1, "f", 3, BLOCK, EXPIRES), PEER).message
    if isinstance(opened, Opened):
        router._write(opened.tid, [(b"abc", b"of something else"[:16])])
        manifest = hashlib.sha256(b"".join(digests_of(b"abc"))).hexdigest()
        place.operate(op(1, "publish", "f", size_bytes=3, blocks=1, manifest=manifest), PEER)
    if not router.content():
        assert router.send(op(1, "publish", "f"), b"abc") == "done"
    place.cancel(Cancel(ORIGIN, 2), PEER)
    assert router.send(op(2, "publish", "g"), b"x") in ("cancelled", "stale", "expired")
    place.open(Open(ORIGIN, 3, "h", 3, BLOCK, EXPIRES), PEER)
    place.cancel(Cancel(ORIGIN, 3, data_only=True), PEER)
    assert [one.ask.seq for one in router.store.transfers() if one.ask.seq == 3] == []
    place.low(Low(ORIGIN, 2))
    place.open(Open(ORIGIN, 4, "late", 3, BLOCK, EXPIRES), PEER)
    router.now = EXPIRES + 1
    place.expire()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("label", BESIDE)
def test_what_is_heard_beside_operations_is_heard_again_after_a_death(tmp_path: Path, label: str, after: bool) -> None:
    router = Router(tmp_path)
    with _faulty(label, _Death(), after) as passed:
        try:
            _told_beside(router)
        except _Death:
            router.restart()
            router.now = min(router.now, EXPIRES)
            _told_beside(router)
    assert label in passed, f"nobody passes {label}"
    for _ in range(2):
        assert (router.content(), router.leftovers(), router.store.transfers()) == ({"f": "abc"}, [], [])
        router.restart()
    router.close()
