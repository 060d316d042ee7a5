"""Blocks that one process receives and another sends on from the same memory."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from overlay_router.custodians.spooled import Growth
from overlay_router.data.ring import SLOTS, Lend, Piece, Ring, Rings, Shelf, Sums
from stageout.core.errors import ErrorClass
from stageout.overlay.sending import Sending
from stageout.overlay.wire import blocks
from stageout.overlay.wire.messages import Operation
from tests.harness.pool.waiting import wait_until

TID = 7
DIGEST = b"d" * 16
SUMS = Sums(DIGEST, "crc32c", 2**32 - 1)
#: Long enough for any machine; what is expected comes at once.
PATIENCE_S = 20.0


@dataclass
class Both:
    """A worker's ring, and the carrier that sees it."""

    rings: Rings
    shelf: Shelf
    control: socket.socket
    pieces: queue.SimpleQueue[Piece] = field(default_factory=queue.SimpleQueue)

    def shown(self, piece: Piece) -> bool:
        self.pieces.put(piece)
        return True

    def asked(self, lend: Lend) -> None:
        """Nothing is lent."""

    @property
    def ring(self) -> Ring:
        assert self.shelf.ring is not None
        return self.shelf.ring

    def connect(self) -> None:
        """As the daemon does when a carrier starts."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self.control, [b"\0"], [other.fileno()])
        other.close()
        self.shelf.connect(one)

    def want(self) -> None:
        self.rings.want(TID, self)
        wait_until(lambda: TID in self.ring._wanted, what="the ring to hear of it")


@pytest.fixture
def both() -> Iterator[Both]:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, other:
        rings = Rings()
        listening = threading.Thread(target=rings.listen, args=(other,))
        listening.start()
        made = Both(rings, Shelf(), mine)
        made.connect()
        yield made
        mine.close()
        listening.join(PATIENCE_S)


def test_a_block_is_seen_where_it_was_received_and_its_slot_serves_again(both: Both) -> None:
    assert both.ring.take(TID, 0) is None, "nobody wants it"
    both.want()
    slot = both.ring.take(TID, 0)
    assert slot is not None
    data = os.urandom(5000)
    slot.view[: len(data)] = data
    both.ring.offer(slot, 3, len(data), SUMS)
    piece = both.pieces.get(timeout=PATIENCE_S)
    assert (piece.block, piece.sums, bytes(piece.view)) == (3, SUMS, data)
    both.ring.leave(slot)
    assert slot.number in both.ring._busy, "it was written, and is not sent yet"
    piece.free(True)
    wait_until(lambda: not both.ring._busy, what="the slot to be free")


def test_a_slot_that_is_still_written_is_not_given_to_another_block(both: Both) -> None:
    both.want()
    slot = both.ring.take(TID, 0)
    assert slot is not None
    both.ring.offer(slot, 0, 1, SUMS)
    both.pieces.get(timeout=PATIENCE_S).free(False)
    wait_until(lambda: slot.holders == 1, what="the carrier to leave it")
    others = [both.ring.take(TID, 0) for _ in range(SLOTS)]
    assert slot.number not in [other.number for other in others if other]


def test_one_transfer_leaves_room_and_a_slow_hop_is_waited_for_ever_more_seldom(both: Both) -> None:
    both.want()
    while both.ring.take(TID, 0) is not None:
        pass
    assert 0 < len(both.ring._busy) < SLOTS
    waits: list[float | None] = []

    def wait_for(condition: object, timeout: float | None = None) -> None:
        waits.append(timeout)

    both.ring._changed.wait_for = wait_for  # type: ignore[method-assign, assignment]
    for _ in range(100):
        assert both.ring.take(TID, 30.0) is None
    assert 0 < len(waits) < 10
    assert all(wait_s is not None and wait_s < 1 for wait_s in waits)


def test_what_is_freed_meanwhile_is_waited_for(both: Both) -> None:
    both.want()
    slots = []
    while (slot := both.ring.take(TID, 0)) is not None:
        slots.append(slot)
    both.ring._wanted[TID].skips = 0
    threading.Timer(0.01, both.ring.leave, slots[:1]).start()
    assert both.ring.take(TID, PATIENCE_S) is not None


def test_nothing_is_shared_with_a_carrier_that_is_gone_and_all_with_the_next(both: Both) -> None:
    both.want()
    first = both.ring
    both.connect()
    wait_until(lambda: TID in both.ring._wanted, what="another ring to hear what is wanted")
    assert both.ring is not first
    both.rings.drop(TID, both)
    wait_until(lambda: TID not in both.ring._wanted and TID not in first._wanted, what="both to hear")
    assert both.ring.take(TID, 0) is None


def test_without_shared_memory_blocks_go_by_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shelf = Shelf()
    with one, other:
        shelf.connect(one)
        assert shelf.ring is None
        assert other.recv(1) == b"", "the carrier need not wait for memory"


class _Freed:
    """Pieces that know how often they were freed."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def piece(self, block: int, digest: bytes = DIGEST) -> Piece:
        return Piece(block, Sums(digest, "crc32", 1), memoryview(b"x"), lambda was_sent: self.freed.append(block))


class _Cargo:
    """Blocks of a file; nothing else is asked here."""

    blocks, connections, most_connections = 4, 1, 1


def _sending() -> Sending:
    return Sending(_Cargo(), -1, [], 60, grows=True)  # type: ignore[arg-type]


def test_each_piece_is_freed_once_whatever_becomes_of_it() -> None:
    pieces, growth, sending = _Freed(), Growth({0: DIGEST}, None), _sending()
    growth.follow(sending)
    assert not growth.shown(pieces.piece(0)), "it is on the disk"
    for block in (1, 2, 3):
        assert growth.shown(pieces.piece(block))
    assert list(sending.table.queue) == [1, 2, 3, 0], "what is in memory goes first, in turn"
    sent, lost = growth.take(1), growth.take(2)
    assert sent is not None and lost is not None
    growth.give_back(sent, True)
    assert growth.take(0) is None
    assert growth.is_readable(0)
    growth.close()
    growth.give_back(lost, True)
    assert sorted(pieces.freed) == [1, 2, 3]
    assert not growth.shown(pieces.piece(3)), "nothing is sent any more"


def test_a_block_that_was_sent_in_vain_goes_again_when_it_is_on_the_disk() -> None:
    growth, sending = Growth({}, None), _sending()
    growth.follow(sending)
    assert growth.shown(_Freed().piece(1))
    sent = growth.take(1)
    assert blocks.take(sending.table, 1) == 1
    assert sent is not None
    growth.give_back(sent, True)
    blocks.carrier_down(sending.table, 1)
    assert blocks.take(sending.table, 2) == 1
    assert growth.take(1) is None
    assert not growth.is_readable(1)
    assert not blocks.ready(sending.table)
    growth.arrived([(1, DIGEST)])
    assert blocks.ready(sending.table) == [1]
    assert growth.is_readable(1)


@pytest.mark.parametrize("in_memory", [True, False])
def test_other_bytes_for_a_block_that_was_sent_end_it(in_memory: bool) -> None:
    growth = Growth({}, None)
    assert growth.shown(_Freed().piece(1))
    assert growth.take(1) is not None
    if in_memory:
        assert not growth.shown(_Freed().piece(1, b"e" * 16))
    else:
        growth.arrived([(1, b"e" * 16)])
    assert growth.is_stopped


def test_custody_of_blocks_that_nobody_named_begins_anew() -> None:
    growth, sending = Growth({}, None), _sending()
    growth.follow(sending)
    growth.shown(_Freed().piece(0))
    growth.complete(Operation("0" * 32, 1, "publish", "f", 99, blocks=1))
    assert sending._failure is not None
    assert sending._failure.kind is ErrorClass.SERVER_BUSY


class _Told:
    """The fate of blocks that are not on the disk."""

    def __init__(self) -> None:
        self.said: list[tuple[list[int], list[int]]] = []

    def __call__(self, passed: Mapping[int, bytes], gone: Sequence[int]) -> None:
        self.said.append((sorted(passed), list(gone)))


def _sent(growth: Growth, sending: Sending, block: int, staged_first: bool) -> None:
    """A block comes, and is sent; its STAGED overtakes the end of its sending, or does not."""
    assert growth.shown(_Freed().piece(block))
    assert blocks.take(sending.table, 1) == block
    piece = growth.take(block)
    assert piece is not None
    if staged_first:
        blocks.staged(sending.table, [block])
        growth.heard()
    growth.give_back(piece, True)
    if not staged_first:
        blocks.staged(sending.table, [block])
        growth.heard()


@pytest.mark.parametrize("staged_first", [True, False])
def test_a_block_is_passed_when_the_next_hop_has_it_and_gone_when_it_must_be_sent_again(staged_first: bool) -> None:
    told, sending = _Told(), _sending()
    growth = Growth({}, None, (), told)
    growth.follow(sending)
    for block in (0, 1):
        _sent(growth, sending, block, staged_first)
    assert told.said == [([0], []), ([1], [])]
    blocks.reopened(sending.table, [])
    assert not growth.is_readable(1)
    assert told.said[2:] == [([], [0, 1])]
    assert not blocks.ready(sending.table)
    assert growth.shown(_Freed().piece(1)), "it comes again"
    assert blocks.ready(sending.table) == [1]


def test_what_was_sent_and_never_confirmed_is_gone_at_the_end() -> None:
    told, sending = _Told(), _sending()
    growth = Growth({}, None, (), told)
    growth.follow(sending)
    for block in (0, 1):
        growth.shown(_Freed().piece(block))
        piece = growth.take(block)
        assert piece is not None
        growth.give_back(piece, True)
    growth.arrived([(0, DIGEST)])
    growth.close()
    assert told.said == [([], [1])], "the other one was written after all"
    assert growth.on_disk() == {0: DIGEST}


def test_what_is_passed_need_not_be_written_once_it_was_sent(both: Both) -> None:
    both.rings.want(TID, both, passes=True)
    wait_until(lambda: TID in both.ring._wanted, what="the ring to hear of it")
    slots = []
    for block in (0, 1):
        slot = both.ring.take(TID, 0)
        assert slot is not None
        assert slot.passes
        slots.append(slot)
        both.ring.offer(slot, block, 1, SUMS)
        assert not both.ring.is_declined(slot)
    both.pieces.get(timeout=PATIENCE_S).free(True)
    both.pieces.get(timeout=PATIENCE_S).free(False)
    wait_until(lambda: slots[0].was_sent and both.ring.is_declined(slots[1]), what="the answers")
    assert not both.ring.keep(slots[0])
    assert both.ring.keep(slots[1])
    both.ring.leave(slots[1])
    assert not both.ring._busy


def test_a_block_that_is_being_written_is_the_workers(both: Both) -> None:
    both.rings.want(TID, both, passes=True)
    wait_until(lambda: TID in both.ring._wanted, what="the ring to hear of it")
    slot = both.ring.take(TID, 0)
    assert slot is not None
    both.ring.offer(slot, 0, 1, SUMS)
    assert both.ring.keep(slot)
    both.pieces.get(timeout=PATIENCE_S).free(True)
    wait_until(lambda: both.ring.is_declined(slot), what="the carrier to leave it")
    assert slot.number in both.ring._busy
    both.ring.leave(slot)
    assert not both.ring._busy
