"""The custodian's decisions on a real spool, with a clock of its own."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlay_router.custodians import carrier, forwarder
from overlay_router.custodians.custodian import Custodian
from overlay_router.custodians.finding import Finding
from overlay_router.custodians.forwarder import Forwarder
from overlay_router.custodians.spool import CustodyStore
from overlay_router.data.jobs import Report
from overlay_router.ends import Ends
from overlay_router.local.replies import Reply
from overlay_router.local.tree import Tree
from overlay_router.peers.deposits import Terminals, read_terminals
from overlay_router.peers.keys import Key, OwnCredential
from overlay_router.rules import lots
from overlay_router.rules.states import Outcome, Result
from stageout.core import durable
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError
from stageout.core.signing import new_key
from stageout.overlay.wire import frames, messages, packs
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.capability import issue
from stageout.overlay.wire.messages import Custody, NoSpace, Open, Opened, Operation, Staged

ORIGIN, PEER, BLOCK, EXPIRES, TERMINAL = "0a" * 16, "site/" + "0a" * 16, 4, 1000, "t:1"
MANIFEST = hashlib.sha256(b"d" * 16).hexdigest()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class Spooling:
    """A custodian that can be restarted."""

    def __init__(self, home: Path, size_bytes: int) -> None:
        self.home, self.size_bytes, self.clock = home, size_bytes, Clock()
        self.open()

    def open(self) -> None:
        self.store = CustodyStore(self.home / "store")
        self.tree, terminals = Tree(self.home), Terminals({TERMINAL: frozenset()})
        self.spool = lots.Spool(self.size_bytes)
        self.one = Custodian(self.store, self.tree, self.spool, terminals, "me:1", self.clock)

    def close(self) -> None:
        self.store.close()
        self.tree.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def take(self, seq: int = 1, release: str = "delivered") -> Reply:
        """A file of one block into custody; the last reply."""
        opened = self.one.open(Open(ORIGIN, seq, f"f{seq}", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER).message
        if isinstance(opened, Custody):
            return Reply(PEER, opened)
        assert isinstance(opened, Opened)
        self.one.staged(opened.tid, [(0, b"d" * 16)])
        return self.one.operate(publish(seq, release), PEER, "blake2b-128")[-1]

    def files(self) -> int:
        return len(list(self.tree.staged_numbers()))


def publish(seq: int = 1, release: str = "delivered") -> Operation:
    return Operation(
        ORIGIN, seq, "publish", f"f{seq}", EXPIRES, size_bytes=BLOCK, blocks=1, manifest=MANIFEST, terminal=TERMINAL,
        release=release,
    )  # fmt: skip


@pytest.fixture
def spooling() -> Iterator[Spooling]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        made = Spooling(Path(path), 10)
        yield made
        made.close()


def outcome(replies: list[Reply]) -> str:
    (reply,) = replies
    assert isinstance(reply.message, messages.Result)
    return reply.message.outcome


def test_custody_only_with_all_blocks_and_it_survives_a_restart(spooling: Spooling) -> None:
    opened = spooling.one.open(Open(ORIGIN, 1, "f1", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER).message
    assert isinstance(opened, Opened)
    assert spooling.one.operate(publish(), PEER, "blake2b-128") == []
    (staged,) = spooling.one.staged(opened.tid, [(0, b"d" * 16)])
    assert isinstance(staged.message, Staged)
    assert spooling.one.is_whole(opened.tid)
    (taken,) = spooling.one.whole(opened.tid)
    assert taken == Reply(PEER, Custody(ORIGIN, 1, "me:1"))
    assert spooling.one.attach(opened.tid) is None, "what is in custody is not written to"
    for _ in range(2):
        assert spooling.one.status(messages.Status(ORIGIN, 1), "other/x") == [Reply("other/x", taken.message)]
        assert [held.key for held in spooling.one.due()] == [(ORIGIN, 1)]
        assert lots.reserved_bytes(spooling.spool) == BLOCK
        spooling.restart()
    assert outcome(spooling.one.settle((ORIGIN, 1), Result(Outcome.DONE))) == "done"
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (0, 0)
    assert outcome(spooling.one.operate(publish(), PEER, "blake2b-128")) == "done"


def test_what_its_origin_has_settled_elsewhere_is_neither_done_nor_failed(spooling: Spooling) -> None:
    """Another custodian was quicker, and the terminal has forgotten what came of it: nobody here can say."""
    spooling.take(1)
    forgotten = forwarder.result_of(carrier.Answer(1, "stale"))
    assert outcome(spooling.one.settle((ORIGIN, 1), forgotten)) == "stale"
    spooling.restart()
    assert outcome(spooling.one.status(messages.Status(ORIGIN, 1), PEER)) == "stale"
    assert spooling.files() == 0


def test_wrong_data_are_asked_for_again(spooling: Spooling) -> None:
    opened = spooling.one.open(Open(ORIGIN, 1, "f1", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER).message
    assert isinstance(opened, Opened)
    spooling.one.staged(opened.tid, [(0, b"x" * 16)])
    (again,) = spooling.one.operate(publish(), PEER, "blake2b-128")
    assert again.message == replace(opened, staged=())


def test_the_lot_is_for_the_whole_and_what_leaves_keeps_its_share(spooling: Spooling) -> None:
    spooling.take(1)
    spooling.take(2)  # 8 of 9 usable bytes
    reply = spooling.one.open(Open(ORIGIN, 3, "f3", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER)
    assert reply.message == NoSpace(ORIGIN, 3, int(lots.RETRY_AFTER_S))
    spooling.one.settle((ORIGIN, 1), Result(Outcome.DONE))
    assert isinstance(spooling.take(3).message, Custody)


def test_who_goes_away_before_custody_leaves_nothing(spooling: Spooling) -> None:
    spooling.one.open(Open(ORIGIN, 1, "f1", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER)
    spooling.take(2)
    spooling.restart()
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (2, 2 * BLOCK)
    spooling.clock.now_s += lots.LEASE_S + 1
    assert spooling.one.expire(()) == []
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (1, BLOCK)


def test_space_of_a_file_in_custody_does_not_run_out(spooling: Spooling) -> None:
    """The lease of its space is over long before a terminal that is away comes back."""
    spooling.take(1, "custody")
    spooling.clock.now_s += 2 * lots.LEASE_S
    spooling.one.expire(())
    assert lots.expire(spooling.spool, spooling.clock.now_s) == []
    assert spooling.files() == 1
    assert lots.reserved_bytes(spooling.spool) == BLOCK


@pytest.mark.parametrize(("release", "word"), [("delivered", "expired"), ("custody", "lost")])
def test_at_its_expiry_the_owner_is_told_and_for_an_hour(spooling: Spooling, release: str, word: str) -> None:
    spooling.take(1, release)
    spooling.clock.now_s = EXPIRES + 1
    assert spooling.one.expire({(ORIGIN, 1)}) == [], "what is being delivered may still arrive"
    assert spooling.files() == 1
    assert outcome(spooling.one.expire(())) == word
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (0, 0)
    spooling.restart()
    assert outcome(spooling.one.status(messages.Status(ORIGIN, 1), PEER)) == word
    spooling.clock.now_s += 3601
    spooling.one.expire(())
    assert not spooling.one.knows(ORIGIN, 1)


def test_damage_without_another_copy_is_a_loss(spooling: Spooling) -> None:
    spooling.take(1, "custody")
    assert outcome(spooling.one.damaged((ORIGIN, 1), [0])) == "lost"


def test_damage_with_another_copy_is_mended(spooling: Spooling) -> None:
    spooling.take(1)
    (asked,) = spooling.one.damaged((ORIGIN, 1), [0])
    assert isinstance(asked.message, Opened)
    assert spooling.one.due() == []
    spooling.restart()
    assert spooling.one.due() == []
    again = spooling.one.open(Open(ORIGIN, 1, "f1", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER).message
    assert isinstance(again, Opened)
    assert (again.tid, again.staged) == (asked.message.tid, asked.message.staged)
    attached = spooling.one.attach(asked.message.tid)
    assert attached is not None
    os.close(attached.file)
    assert isinstance(spooling.take(1).message, Custody)
    assert len(spooling.one.due()) == 1


def test_data_of_the_dead_make_room_for_the_record_of_their_end(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seq in (1, 2):
        coming(spooling, seq)
    spooling.clock.now_s += lots.LEASE_S + 1
    with monkeypatch.context() as full:
        full.setattr(durable, "_faults", durable.parse_faults("custody-abandon=ENOSPC"))
        with pytest.raises(OSError, match="No space"):
            spooling.one.expire(())
        assert spooling.files() == 0
    again = spooling.one.open(Open(ORIGIN, 1, "f1", 2, 1, EXPIRES, TERMINAL), PEER).message
    assert isinstance(again, Opened)
    assert again.staged == (), "its data are gone"
    spooling.one.expire(())
    assert [item.ask.seq for item in spooling.store.transfers()] == [1]
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (1, 2)


def test_what_was_refused_or_never_completed_is_not_remembered_for_ever(spooling: Spooling) -> None:
    big = Open(ORIGIN, 1, "big", 10**9, BLOCK, EXPIRES, TERMINAL)
    assert isinstance(spooling.one.open(big, PEER).message, NoSpace)
    assert spooling.one.operate(publish(2), PEER, "blake2b-128") == []
    assert (len(spooling.one._asked), len(spooling.one._waiting)) == (1, 1)
    spooling.one.expire(())
    assert (len(spooling.one._asked), len(spooling.one._waiting)) == (0, 1), (
        "the data of an operation may still be on their way"
    )
    spooling.clock.now_s = EXPIRES + 1
    spooling.one.expire(())
    assert not spooling.one._waiting


def coming(spooling: Spooling, seq: int) -> int:
    """A file of two blocks, the first of which is here; its transfer number."""
    opened = spooling.one.open(Open(ORIGIN, seq, f"f{seq}", 2, 1, EXPIRES, TERMINAL), PEER, "blake2b-128").message
    assert isinstance(opened, Opened)
    spooling.one.staged(opened.tid, [(0, b"d" * 16)])
    return opened.tid


def test_what_was_sent_on_of_a_file_that_never_came_whole_is_dropped_at_the_terminal(spooling: Spooling) -> None:
    tid = coming(spooling, 1)
    begun = spooling.one.begin(tid)
    assert begun is not None
    assert begun.blocks == [(0, b"d" * 16)]
    assert spooling.one.strays() == []
    spooling.clock.now_s += lots.LEASE_S + 1
    spooling.one.expire(())
    assert not spooling.one.is_coming(tid)
    spooling.restart()
    assert [stray.key for stray in spooling.one.strays()] == [(ORIGIN, 1)]
    again = coming(spooling, 1)
    assert spooling.one.strays() == [], "its sender is back"
    spooling.one.cancel(messages.Cancel(ORIGIN, 1), PEER)
    assert not spooling.one.is_coming(again)
    assert [stray.terminal for stray in spooling.one.strays()] == [TERMINAL]
    spooling.one.dropped((ORIGIN, 1))
    spooling.restart()
    assert spooling.one.strays() == []


def test_a_terminal_is_not_asked_to_drop_what_it_has_settled_or_forgotten(spooling: Spooling) -> None:
    spooling.one.begin(coming(spooling, 1))
    spooling.take(2)
    for seq in (1, 2):
        assert spooling.one.settle((ORIGIN, seq), Result(Outcome.DONE)) == [] or seq == 2
    spooling.one.low(messages.Low(ORIGIN, 2))
    assert [stray.key for stray in spooling.one.strays()] == [(ORIGIN, 1)]
    spooling.clock.now_s = EXPIRES + 1
    assert spooling.one.strays() == []
    spooling.restart()
    assert spooling.store.begun() == []


def test_a_loss_leaves_nothing_at_the_terminal(spooling: Spooling) -> None:
    spooling.take(1, "custody")
    spooling.one.damaged((ORIGIN, 1), [0])
    assert [stray.key for stray in spooling.one.strays()] == [(ORIGIN, 1)]


def test_operations_without_data_need_room_too(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold no lot; who sends them without end is not answered, and asks again."""
    monkeypatch.setattr("overlay_router.custodians.custodian.MOST_OPERATIONS", 2)
    made = [replace(publish(seq), kind="mkdir", blocks=0, size_bytes=0, manifest="") for seq in (1, 2, 3)]
    told = [spooling.one.operate(one, PEER, "") for one in made]
    assert [len(replies) for replies in told] == [1, 1, 0]
    assert len(spooling.one.held()) == 2


def test_low_forgets_no_custody(spooling: Spooling) -> None:
    spooling.take(1)
    spooling.one.low(messages.Low(ORIGIN, 1))
    assert len(spooling.one.due()) == 1
    spooling.one.settle((ORIGIN, 1), Result(Outcome.DONE))
    spooling.one.low(messages.Low(ORIGIN, 1))
    assert outcome(spooling.one.status(messages.Status(ORIGIN, 1), PEER)) == "stale"


def test_only_versions_of_one_owner_wait_for_each_other(spooling: Spooling) -> None:
    """A key, or the holder of a capability, whichever key brings that."""
    mine, theirs, signed = "0b" * 16, "0c" * 16, ["d1" * 20, "d2" * 20, "d3" * 20]
    made = Operation("", 1, "mkdir", "d", EXPIRES, terminal=TERMINAL)
    alice, bob = (_capability_of(new_key().public) for _ in range(2))
    for origin, peer, capability in (
        (mine, "site/1", ""),
        (theirs, "small/1", ""),
        (signed[0], "site/2", alice),
        (signed[1], "site/3", bob),
        (signed[2], "hop/4", alice),
        ("0d" * 16, "site/5", ""),
    ):
        order = replace(made, origin=origin, capability=capability)
        assert isinstance(spooling.one.operate(order, peer, "")[0].message, Custody)
    due = [mine, theirs, signed[0], signed[1]]
    assert [held.key[0] for held in spooling.one.due()] == due
    spooling.restart()
    assert [held.key[0] for held in spooling.one.due()] == due
    spooling.one.settle((signed[0], 1), Result(Outcome.DONE))
    assert [held.key[0] for held in spooling.one.due()] == [mine, theirs, signed[1], signed[2]]


def _capability_of(holder: str) -> str:
    return issue(new_key(), holder, "", ("write",), EXPIRES, terminals=(TERMINAL,))


def test_an_operation_waits_for_what_must_come_before_it(spooling: Spooling) -> None:
    spooling.take(1)
    rename = Operation(ORIGIN, 2, "rename", "f1", EXPIRES, target="g", after=(1,), terminal=TERMINAL, priority=9)
    assert isinstance(spooling.one.operate(rename, PEER, "")[0].message, Custody)
    assert [held.key[1] for held in spooling.one.due()] == [1]
    spooling.one.settle((ORIGIN, 1), Result(Outcome.DONE))
    assert [held.key[1] for held in spooling.one.due()] == [2]


def test_of_many_files_those_that_ended_or_rotted_are_not_due(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlay_router.custodians.custodian._FEW", 0)
    spooling.take(1)
    spooling.take(2)
    assert [held.key[1] for held in spooling.one.due()] == [1, 2]
    spooling.one.settle((ORIGIN, 1), Result(Outcome.DONE))
    spooling.one.damaged((ORIGIN, 2), [0])
    assert spooling.one.due() == []
    spooling.take(3)
    spooling.clock.now_s += 1
    assert [held.key[1] for held in spooling.one.due()] == [3]


def test_another_key_can_neither_continue_nor_cancel(spooling: Spooling) -> None:
    spooling.take(1)
    other = "other/" + ORIGIN
    for replies in (
        [spooling.one.open(Open(ORIGIN, 1, "f1", BLOCK, BLOCK, EXPIRES, TERMINAL), other)],
        spooling.one.operate(publish(), other, "blake2b-128"),
    ):
        assert outcome(replies) == "failed"
    assert spooling.one.cancel(messages.Cancel(ORIGIN, 1), other) == [Reply(other, Custody(ORIGIN, 1, "me:1"))]
    assert len(spooling.one.due()) == 1


def test_the_list_of_terminals() -> None:
    found = read_terminals("A.org=x,y b:1")
    assert [found.reason_against("a.org:9621", key) == "" for key in ("x", "y", "z")] == [True, True, False]
    assert found.reason_against("b:1", "anyone") == ""
    assert "STAGEOUT_ROUTER_TERMINALS" in found.reason_against("c:1", "x")
    assert not read_terminals("")
    with pytest.raises(ConfigError, match="apart by blanks"):
        read_terminals("a:port")


# ---- every durable step --------------------------------------------------------------------------------------------

_ORDERING = Path(__file__).resolve().parents[2] / "docs/developer/durable-steps.md"
#: Those of this section but for packs; a schedd agent has one of its own of that name.
LABELS = re.findall(
    r"^\| `(custody-(?!pack-)[a-z-]+)` \|", _ORDERING.read_text().partition("## The overlay's custodian")[2], re.M
)


def test_without_a_process_deliveries_wait_for_one(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlay_router.custodians.carrier_process.FIRST_S", 0.01)

    async def run() -> None:
        tries, again = [], asyncio.Event()

        async def start() -> None:
            tries.append(1)
            if len(tries) > 1:
                again.set()
            forwarder.wake.set()
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        async def on_disk(work: Callable[[], Any]) -> Any:
            return work()

        forwarder = Forwarder(spooling.one, on_disk, lambda replies: None, OwnCredential(), 1, SystemClock())
        monkeypatch.setattr(forwarder, "_start", start)
        task, waiting = asyncio.ensure_future(forwarder.run()), asyncio.ensure_future(again.wait())
        await asyncio.wait({task, waiting}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done()
        assert len(tries) == 2
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())


def test_a_file_whose_digests_cannot_be_read_is_not_left_open(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooling.take()

    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    def digests(held: object) -> list[bytes]:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(spooling.one, "digests", digests)
    with pytest.raises(sqlite3.OperationalError):
        asyncio.run(_find(Finding(spooling.one, on_disk)))
    (held,) = spooling.one.held()
    assert spooling.one.file(held) not in [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]


async def _find(finding: Finding) -> Any:
    return await finding.file(Key("site", b"", ""), messages.Get("f1", terminal=TERMINAL))


def test_a_file_on_its_way_is_read_as_a_whole_for_the_first_who_fetches_it(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_disk(work: Any) -> Any:
        return work()

    def check(file: int, held: Any, digests: Any) -> bool:
        os.close(file)
        checked.append(held.tid)
        return len(checked) != 2

    async def story() -> None:
        finding = Finding(spooling.one, on_disk)
        (held,) = spooling.one.held()
        for one in [*await asyncio.gather(_find(finding), _find(finding)), await _find(finding)]:
            os.close(one.file)
        assert len(checked) == 1
        os.utime(spooling.one.file(held))
        assert "damaged" in (await _find(finding)).message
        os.close((await _find(finding)).file)
        assert len(checked) == 3, "what was damaged is looked at again"

    checked: list[int] = []
    monkeypatch.setattr("overlay_router.custodians.finding._is_right", check)
    spooling.take(1)
    asyncio.run(story())


def passing(spooling: Spooling, release: str = "delivered") -> tuple[int, Operation]:
    """A file of two blocks: the first is on the disk here, the second only at the next hop."""
    ask = Open(ORIGIN, 1, "f1", 2 * BLOCK, BLOCK, EXPIRES, TERMINAL, release="delivered")
    opened = spooling.one.open(ask, PEER, "blake2b-128").message
    assert isinstance(opened, Opened)
    coming = spooling.one.begin(opened.tid)
    assert coming is not None
    assert coming.passes
    spooling.one.staged(opened.tid, [(0, b"d" * 16)])
    (said,) = spooling.one.passed(opened.tid, {1: b"e" * 16})
    assert said.message == Staged(opened.tid, ((1, 2),), opened.epoch)
    manifest = hashlib.sha256(b"d" * 16 + b"e" * 16).hexdigest()
    return opened.tid, replace(publish(1, release), size_bytes=2 * BLOCK, blocks=2, manifest=manifest)


def test_blocks_that_only_the_next_hop_has_make_custody_of_what_its_sender_keeps(spooling: Spooling) -> None:
    tid, operation = passing(spooling)
    (said,) = spooling.one.operate(operation, PEER, "blake2b-128")
    assert isinstance(said.message, Custody)
    (held,) = spooling.one.due()
    assert spooling.one.blocks(held) == ([(0, b"d" * 16)], [(1, b"e" * 16)])
    assert spooling.one.find(TERMINAL, "f1") is None, "not all of it can be read here"
    assert spooling.one.gone(tid, ()) == spooling.one.gone(tid, [0]) == [], "nothing is lost of what is in custody"


@pytest.mark.parametrize("how", ["gone", "restart"])
def test_a_file_in_custody_waits_for_what_the_next_hop_has_lost(spooling: Spooling, how: str) -> None:
    tid, operation = passing(spooling)
    spooling.one.operate(operation, PEER, "blake2b-128")
    if how == "restart":
        spooling.restart()
        (reply,) = spooling.one.status(messages.Status(ORIGIN, 1), PEER)
    else:
        (reply,) = spooling.one.gone(tid, [1])
    assert isinstance(reply.message, Opened)
    assert reply.message.staged == ((0, 1),)
    assert spooling.one.due() == []
    assert spooling.one.operate(operation, PEER, "blake2b-128") == []
    spooling.one.staged(tid, [(1, b"e" * 16)])
    (said,) = spooling.one.whole(tid)
    assert isinstance(said.message, Custody)
    spooling.restart()
    assert len(spooling.one.due()) == 1


def test_what_is_gone_is_asked_for_in_another_epoch_that_no_late_word_belongs_to(spooling: Spooling) -> None:
    tid, operation = passing(spooling)
    (before,) = spooling.one.status(messages.Status(ORIGIN, 1), PEER)
    (reply,) = spooling.one.gone(tid, [1])
    assert isinstance(reply.message, Opened)
    assert isinstance(before.message, Staged)
    assert before.message.staged == ((0, 2),)
    assert reply.message.staged == ((0, 1),)
    assert before.message.epoch not in ("", reply.message.epoch)
    assert spooling.one.operate(operation, PEER, "blake2b-128") == []
    (_, said) = spooling.one.passed(tid, {1: b"e" * 16})
    assert isinstance(said.message, Custody), "it was sent again, and is whole"


def test_nothing_is_passed_of_what_its_sender_frees(spooling: Spooling) -> None:
    _, operation = passing(spooling, "custody")
    assert outcome(spooling.one.operate(operation, PEER, "blake2b-128")) == "failed"
    opened = spooling.one.open(Open(ORIGIN, 2, "f2", BLOCK, BLOCK, EXPIRES, TERMINAL), PEER, "blake2b-128").message
    assert isinstance(opened, Opened)
    coming = spooling.one.begin(opened.tid)
    assert coming is not None
    assert not coming.passes


def test_of_a_cut_block_that_was_damaged_all_parts_must_come_again(spooling: Spooling) -> None:
    block_bytes, half, spooling.spool.size_bytes = 2 * PART_BYTES, PART_BYTES, 8 * PART_BYTES
    ask = Open(ORIGIN, 1, "f1", 2 * block_bytes, block_bytes, EXPIRES, TERMINAL, release="delivered")
    ends, opened = Ends(custodian=spooling.one), spooling.one.open(ask, PEER, "blake2b-128").message
    assert isinstance(opened, Opened)
    tid, file = opened.tid, spooling.tree.staging(opened.tid)
    halves = [Report(tid, parts=((start * half, half),), digest="blake2b-128") for start in (2, 3)]
    good = frames.digests()["blake2b-128"](b"g" * block_bytes)

    def write(data: bytes, start: int) -> None:
        with file.open("r+b") as staging:
            os.pwrite(staging.fileno(), data, start)

    def come(report: Report) -> tuple[tuple[int, str], ...]:
        write(b"g" * half, report.parts[0][0])
        return ends.record(report)[0].blocks

    assert [come(report) for report in halves] == [(), ((1, good.hex()),)]
    assert spooling.one.passed(tid, {0: b"d" * 16})
    operation = replace(publish(), size_bytes=ask.size_bytes, blocks=2, manifest=packs.manifest([b"d" * 16, good]))
    assert isinstance(spooling.one.operate(operation, PEER, "blake2b-128")[0].message, Custody)
    write(b"bad", block_bytes + half)
    spooling.one.damaged((ORIGIN, 1), [1])
    assert [come(report) for report in halves] == [(), ((1, good.hex()),)]


class _Death(BaseException):
    """The process dies here."""


@contextmanager
def _faulty(label: str, fault: BaseException, after: bool, count: int = 1) -> Iterator[list[str]]:
    """That label is met by a fault, once, when it is passed for the ``count``-th time."""
    passed: list[str] = []
    real = durable.step

    @contextmanager
    def step(name: str) -> Iterator[None]:
        passed.append(name)
        hit = name == label and passed.count(label) == count
        if hit and not after:
            raise fault
        with real(name):
            yield
        if hit:
            raise fault

    durable.step = step  # type: ignore[assignment]
    try:
        yield passed
    finally:
        durable.step = real


def _given_up(spooling: Spooling) -> None:
    """A file of which some was sent on, whose sender goes away; the terminal drops what it has."""
    if not spooling.one.knows(ORIGIN, 1) and not spooling.store.begun():
        tid = coming(spooling, 1)
        spooling.one.begin(tid)
    spooling.clock.now_s += lots.LEASE_S + 1
    spooling.one.expire(())
    for stray in spooling.one.strays():
        spooling.one.dropped(stray.key)


def _mended(spooling: Spooling) -> None:
    """A file that is taken, rots, comes again and is delivered."""
    if not spooling.store.record(ORIGIN).results.get(2):
        spooling.take(2)
        spooling.one.damaged((ORIGIN, 2), [0])
        spooling.take(2)
        assert spooling.one.digests(spooling.one.held()[0]) == [b"d" * 16]
        spooling.one.said.say((ORIGIN, 2), "records")
        spooling.one.settle((ORIGIN, 2), Result(Outcome.DONE))


@pytest.mark.parametrize("what", ["kill-before", "kill-after", "EIO"])
@pytest.mark.parametrize("label", LABELS)
def test_no_step_that_fails_or_is_the_last_loses_anything(spooling: Spooling, label: str, what: str) -> None:
    fault = OSError(errno.EIO, "planned") if what == "EIO" else _Death()
    with _faulty(label, fault, what == "kill-after") as passed:
        for story in (_given_up, _mended):
            try:
                story(spooling)
            except OSError:
                story(spooling)
            except _Death:
                spooling.restart()
                story(spooling)
    assert label in passed, f"nobody passes {label}"
    for _ in range(2):
        assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (0, 0)
        assert (spooling.one.held(), spooling.one.strays(), spooling.store.transfers()) == ([], [], [])
        assert outcome(spooling.one.status(messages.Status(ORIGIN, 2), PEER)) == "done"
        spooling.restart()
