"""The terminal's role over a real destination: a death at each durable step changes nothing in the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlay_router.local.destination import Destination
from overlay_router.local.store import Store
from overlay_router.local.tree import Tree
from overlay_router.operations.receiving import Block, Receiving
from overlay_router.operations.side import Answer, Bringing, Caller, Refusal, SmallFile
from overlay_router.operations.table import Stored, Table
from overlay_router.operations.terminal import Terminal
from stageout.core import durable
from stageout.overlay.http.operations import BLOCK_BYTES, digest_kinds
from stageout.overlay.rules.limits import Share
from stageout.overlay.rules.operations import KEPT_S, LONGEST_S, Fields, Hop, Identity, Kind
from stageout.overlay.rules.states import State
from tests.unit.test_overlay_destination import Crash, _dying

ORIGIN, NOW = "0" * 32, 1_700_000_000
DATA = os.urandom(BLOCK_BYTES + 7)
ALICE = Caller("key:alice", ("key:alice",), share="alice", authority=("alice", ""))
BOB = Caller("key:bob", ("key:bob",), share="bob", authority=("bob", ""))


class Site:
    """A terminal that can be restarted, and its sender, who repeats itself until it knows the end."""

    def __init__(self, home: Path, **more: Any) -> None:
        self.home, self.more, self.now = home, more, NOW
        self.root = home / "root"
        self.root.mkdir(parents=True)
        self.trusted = True
        self.start()

    def start(self) -> None:
        self.tree = Tree(self.root)
        self.store = Store(self.home / "router.sqlite")
        self.destination = Destination(self.store, self.tree, lambda: self.now)
        self.table = Table(self.home / "operations.sqlite")
        self.receiving = Receiving(self.table, self.destination.own_place / "operations")
        self.terminal = Terminal(
            self.table, self.receiving, self.destination, lambda _: self.trusted, wall=lambda: self.now, **self.more
        )  # fmt: skip

    def stop(self) -> None:
        self.receiving.close()
        self.table.close()
        self.destination.close()
        self.store.close()
        self.tree.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def begin(self, fields: Fields, who: Caller = ALICE, **more: Any) -> Answer:
        return self.terminal.begin(who, Bringing(fields, **more))

    def stored(self, fields: Fields, who: Caller = ALICE) -> Stored:
        found = self.table.find(Identity(who.owner, fields.origin, fields.seq))
        assert found is not None
        return found

    def state(self, fields: Fields) -> State:
        return self.stored(fields).row.state

    def file(self, fields: Fields, data: bytes = DATA) -> Answer:
        """Bring a file, as the desk does."""
        answer = self.begin(fields)
        if answer.status != 201:
            return answer
        stored = self.stored(fields)
        if stored.row.state is State.RECEIVING:
            one = self.receiving.staging(stored)
            for number in range(-(-len(data) // BLOCK_BYTES)):
                part = data[number * BLOCK_BYTES :][:BLOCK_BYTES]
                digests = [digest_kinds()[kind].of(part) for kind in (fields.block_kind, fields.digest_kind)]
                if number not in self.receiving.claim(one, self, number, 1, digests[:1]):
                    os.pwrite(one.file, part, number * BLOCK_BYTES)
                    self.receiving.received(one, self, number, 1, [Block(number, *digests)])
            file, blocks = self.receiving.begin_sync(one)
            with os.fdopen(file, "rb"):
                self.receiving.bring_to_disk(one, file)
            self.receiving.synced(one, blocks)
        return self.terminal.complete(self.stored(fields))


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path / "site")
    yield found
    found.stop()


def op(seq: int, kind: Kind, path: str, **more: Any) -> Fields:
    size = len(DATA) if kind is Kind.FILE else None
    made = more.pop("made", NOW)
    return Fields(ORIGIN, seq, kind, path, "gw", made, made + 3600, **{"size": size, **more})


FILE, MOVED, GONE = op(1, Kind.FILE, "d/f"), op(2, Kind.RENAME, "d/f", second="d/g"), op(3, Kind.DELETE, "d/g")
AGAIN, MADE = op(5, Kind.FILE, "d/g"), op(4, Kind.MKDIR, "d/e", after=(3,))
DROPPED = op(6, Kind.FILE, "d/x")


def _tell(here: Site) -> None:
    """A small life: each call may be the second one."""
    held = here.begin(MADE) if here.table.find(Identity(ALICE.owner, ORIGIN, 4)) is None else None
    assert held is None or held.status == 202
    low = here.table.low(ALICE.owner, ORIGIN)
    for fields in [one for one in (FILE, MOVED, GONE) if one.seq >= low]:
        answer = here.file(fields) if fields.kind is Kind.FILE else here.begin(fields)
        assert answer == (200, here.terminal.state(here.stored(fields))) and answer.state.state == "done", fields
    assert here.file(AGAIN).state.state == "done"
    if here.begin(DROPPED).status == 201:
        assert here.terminal.cancel(ALICE, DROPPED, "").status == 200
    here.terminal.low(ALICE, ORIGIN, 3, "")


def _check(here: Site) -> None:
    assert (here.root / "d/g").read_bytes() == DATA and (here.root / "d/e").is_dir()
    assert sorted(path.name for path in (here.root / "d").iterdir()) == ["e", "g"]
    assert here.store.generation("d/g") == 3, "renamed to, deleted and published once each"
    assert list((here.root / ".stageout/operations").iterdir()) == []
    assert list((here.root / ".stageout/staging").iterdir()) == []
    assert (here.root / "d/g").stat().st_nlink == 1
    assert here.state(DROPPED) is State.CANCELLED and here.table.low(ALICE.owner, ORIGIN) == 3


LABELS = (
    "operation-reserve", "operation-row", "operation-blocks", "operation-intent", "operation-high-water",
    "operation-adopt", "operation-name", "operation-end", "operation-discard", "operation-low", "overlay-grant",
    "overlay-intent", "overlay-finish", "overlay-publish", "overlay-rename", "overlay-delete", "overlay-mkdir",
    "overlay-settle",
)  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("label", LABELS)
def test_a_death_at_each_step_changes_nothing_in_the_end(tmp_path: Path, label: str, when: str) -> None:
    for count in (1, 2, 3):
        here = Site(tmp_path / str(count))
        with _dying(label, count, when) as passed:
            try:
                _tell(here)
            except Crash:
                here.restart()
        assert label in passed
        _tell(here)
        _check(here)
        here.stop()


def small(first: int, *files: tuple[str, bytes]) -> list[SmallFile]:
    return [
        SmallFile(op(first + at, Kind.FILE, path, size=len(data)), memoryview(data))
        for at, (path, data) in enumerate(files)
    ]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "label",
    ["operation-intent", "operation-high-water", "overlay-pack-intent", "overlay-pack-publish", "overlay-pack-settle",
     "operation-end"],
)  # fmt: skip
def test_a_death_in_a_batch(here: Site, label: str, when: str) -> None:
    batch = small(1, ("d/a", b"1"), ("d/b", b""), ("d/c", DATA))
    with _dying(label, 1, when), pytest.raises(Crash):
        here.terminal.batch(ALICE, batch, "")
    here.restart()
    for _ in range(2):
        assert [one.state for one in here.terminal.batch(ALICE, batch, "")] == ["done"] * 3
        assert [(here.root / "d" / name).read_bytes() for name in "abc"] == [b"1", b"", DATA]
        assert [here.store.generation(f"d/{name}") for name in "abc"] == [1, 1, 1]
    assert here.table.in_state(State.PUBLISHING) == []


def test_each_file_of_a_batch_is_judged_by_itself(here: Site) -> None:
    (here.root / "way").mkdir()
    here.terminal.cancel(ALICE, op(2, Kind.FILE, "b", size=1), "")
    batch = small(1, ("a", b"1"), ("b", b"2"), ("way", b"3"), ("d", b"4"), ("no", b"5"))
    batch[4] = batch[4]._replace(denied="no right to modify no")
    states = here.terminal.batch(ALICE, batch, "")
    assert [one.state for one in states] == ["done", "cancelled", "refused", "done", "refused"]
    assert states[4].reason == "no right to modify no"
    assert sorted(path.name for path in here.root.iterdir()) == [".stageout", "a", "d", "way"]
    (here.root / "way").rmdir()
    (here.root / "a").unlink()
    batch[4] = batch[4]._replace(denied="")
    states = here.terminal.batch(ALICE, batch, "")
    assert [one.state for one in states] == ["done", "cancelled", "done", "done", "done"]
    assert not (here.root / "a").exists(), "a file that was done is not done again"


def test_the_disk_fails_once(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_faults", durable.parse_faults("overlay-publish=EIO"))
    with pytest.raises(Refusal) as why:
        here.file(FILE)
    assert why.value.status == 503 and here.state(FILE) is State.PUBLISHING
    monkeypatch.setattr(durable, "_faults", {})
    assert here.begin(FILE).state.state == "done"
    assert (here.root / "d/f").read_bytes() == DATA


def test_refused_bytes_stay(here: Site) -> None:
    (here.root / "d").write_bytes(b"in the way")
    with pytest.raises(Refusal) as why:
        here.begin(FILE)
    assert why.value.status == 409 and here.table.find(Identity(ALICE.owner, ORIGIN, 1)) is None
    (here.root / "d").unlink()
    stored = here.begin(FILE)
    assert stored.status == 201
    (here.root / "d").write_bytes(b"in the way")
    with pytest.raises(Refusal):
        here.file(FILE)
    (here.root / "d").unlink()
    stored_now = here.stored(FILE)
    assert stored_now.row.state in (State.RECEIVING, State.COMPLETE)
    assert here.file(FILE).state.state == "done"


def test_a_removed_key_stops_what_waits(here: Site) -> None:
    assert here.begin(MADE).status == 202
    here.begin(op(1, Kind.MKDIR, "d"))
    here.file(op(2, Kind.FILE, "d/g"))
    here.trusted = False
    assert here.begin(GONE).state.state == "done"  # its own token is looked at by the worker
    assert here.terminal.state(here.stored(MADE)).state == "refused" and not (here.root / "d/e").exists()
    here.trusted = True
    assert here.begin(MADE).state.state == "done"


def test_a_long_chain_of_those_that_wait(here: Site) -> None:
    fields = [op(seq, Kind.MKDIR, f"d{seq}", after=(seq - 1,) if seq > 1 else ()) for seq in range(1, 1_200)]
    for one in fields[1:]:
        assert here.begin(one).status == 202
    assert here.begin(fields[0]).state.state == "done"
    assert here.state(fields[-1]) is State.DONE


def test_it_expires(here: Site) -> None:
    here.begin(FILE)
    here.begin(MADE)
    here.now += 3600
    here.terminal._clock = here.terminal._clock.confirmed(here.now, here.terminal._clock.monotonic)
    here.now += 1
    here.terminal.expire()
    assert (here.state(FILE), here.state(MADE)) == (State.EXPIRED, State.EXPIRED)
    with pytest.raises(Refusal) as why:
        here.begin(op(9, Kind.MKDIR, "d"))
    assert why.value.status == 410
    assert list((here.root / ".stageout/operations").iterdir()) == []
    here.now += KEPT_S + LONGEST_S
    here.terminal._clock = here.terminal._clock.confirmed(here.now, here.terminal._clock.monotonic)
    with _dying("operation-forget", 1, "before"), pytest.raises(Crash):
        here.terminal.expire()
    here.terminal.expire()
    assert here.table.find(Identity(ALICE.owner, ORIGIN, 1)) is None


def test_a_clock_that_jumps_ends_nothing(here: Site) -> None:
    here.begin(MADE)
    here.now += 365 * 86400
    here.terminal.expire()
    assert here.state(MADE) is State.HELD


def test_shares(tmp_path: Path) -> None:
    here = Site(tmp_path / "site", limit=Share(rows=4, held=1, cancels=1, size=3 * len(DATA)))
    assert here.begin(MADE).status == 202
    with pytest.raises(Refusal) as why:
        here.begin(op(5, Kind.MKDIR, "x", after=(3,)))
    assert why.value.status == 429
    here.terminal.cancel(ALICE, op(20, Kind.MKDIR, "x"), "")
    with pytest.raises(Refusal) as why:
        here.terminal.cancel(ALICE, op(21, Kind.MKDIR, "x"), "")
    assert why.value.status == 429
    assert here.begin(op(6, Kind.MKDIR, "d")).status == 200 and here.begin(FILE).status == 201
    with pytest.raises(Refusal) as why:
        here.begin(op(7, Kind.MKDIR, "y"))
    assert why.value.status == 429 and here.begin(op(1, Kind.MKDIR, "bob"), BOB).status == 200
    here.stop()


def test_a_restored_table_begins_an_epoch(here: Site) -> None:
    here.stop()
    for name in ("operations.sqlite", "router.sqlite"):
        shutil.copy(here.home / name, here.home / f"{name}.old")
    here.start()
    assert here.terminal.epoch == 0
    here.file(FILE)
    here.begin(MOVED)
    here.stop()
    for name in ("operations.sqlite", "router.sqlite"):
        for beside in (here.home).glob(f"{name}-*"):
            beside.unlink()
        shutil.copy(here.home / f"{name}.old", here.home / name)
    here.start()
    assert here.terminal.epoch == NOW
    with pytest.raises(Refusal) as why:
        here.begin(MOVED)
    assert (why.value.status, why.value.word) == (409, "ask-first")
    assert here.terminal.cancel(ALICE, MOVED, "").status == 409
    here.stop()
    for name in ("operations.sqlite", "router.sqlite"):
        for beside in (here.home).glob(f"{name}-*"):
            beside.unlink()
        shutil.copy(here.home / f"{name}.old", here.home / name)
    here.start()
    assert here.terminal.epoch == NOW + 1
    again = here.begin(op(3, Kind.DELETE, "d/g"), hop=Hop(known_epoch=NOW + 1))
    assert (again.state.state, again.state.reason) == ("failed", "outcome-unknown")
    assert (here.root / "d/g").exists()
    new = op(4, Kind.FILE, "d/f", made=NOW + 601)
    assert here.file(new).state.state == "done"
