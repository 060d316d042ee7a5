"""Connections to the next hop that the carrier lends to who receives."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from overlay_router.custodians import spooled
from overlay_router.custodians.spooled import Growth
from overlay_router.data import loans
from overlay_router.data.jobs import Job
from overlay_router.data.loans import Lent, Loan
from overlay_router.data.receiving import Gate, Receiver
from overlay_router.data.ring import SLOTS, Lend, Piece, Ring, Rings, Shelf
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.sockets import readable
from stageout.overlay.channel import Channel
from stageout.overlay.tcp import fill, send_at_most
from stageout.overlay.way import Way
from stageout.overlay.wire import blocks, frames
from stageout.overlay.wire.frames import Header, Type
from stageout.overlay.wire.messages import BLOCK_BYTES, Open
from tests.harness.pool.waiting import wait_until
from tests.unit.test_overlay_ring import DIGEST, PATIENCE_S, TID, _sending, _Told

FAR_TID, CHECKSUM, CRC = 11, "crc32", frames.checksums()["crc32"]
#: More than two sockets hold.
LARGE_BYTES = 4 * BLOCK_BYTES


class Both:
    """A worker, and the carrier that lends it one end of ``connection`` when it asks."""

    def __init__(self) -> None:
        self.far, self.near = socket.socketpair()
        self.heard: dict[int, bytes] = {}
        self.lent: list[Lent] = []
        self.lends = True
        self.rings, self.shelf = Rings(), Shelf()

    def shown(self, piece: Piece) -> bool:
        return False

    def asked(self, lend: Lend) -> None:
        if self.lends:
            self.lends = False
            made = lend(self.near.fileno(), FAR_TID, CHECKSUM, self.hear)
            assert made is not None
            self.lent.append(made)

    def hear(self, left: Mapping[int, bytes]) -> None:
        self.heard.update(left)

    @property
    def ring(self) -> Ring:
        assert self.shelf.ring is not None
        return self.shelf.ring

    def loan(self) -> Loan:
        """One that is free, as soon as it was lent."""
        found: list[Loan] = []

        def is_there() -> bool:
            loan = self.ring.loans.take(TID, CHECKSUM)
            found.extend([loan] if loan else [])
            return bool(found)

        wait_until(is_there, what="a connection to be lent")
        wait_until(lambda: self.lent, what="who lends it to know that")
        return found[0]

    def send(self, loan: Loan, block: int, data: bytes, digest: bytes = DIGEST) -> bool:
        header = Header(Type.BLOCK, 0, len(data), TID, block, CRC(data))
        return self.ring.loans.send(loan, header, memoryview(data), CRC, digest)

    def frame(self) -> tuple[Header, bytes]:
        """The next one at the next hop."""
        head = bytearray(frames.HEADER_BYTES)
        assert fill(self.far, memoryview(head))
        header = frames.decode_header(head, CRC)
        data = bytearray(header.length_bytes)
        assert fill(self.far, memoryview(data))
        assert CRC(data) == header.checksum
        return header, bytes(data)

    def frames_until_back(self) -> Iterator[tuple[int, bytes]]:
        """Blocks at the next hop until the carrier has the connection again."""
        self.lent[0].recall()
        until_s = time.monotonic() + PATIENCE_S
        while not self.lent[0].is_back or readable([self.far.fileno()], 0):
            if readable([self.far.fileno()], 0.01):
                header, came = self.frame()
                yield header.block, came
            assert time.monotonic() < until_s

    def is_free(self) -> bool:
        """Whether the worker has given all of them back."""
        return not self.ring.loans._loans


@pytest.fixture
def both() -> Iterator[Both]:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Both()
    with mine, other, made.far, made.near:
        listening = threading.Thread(target=made.rings.listen, args=(other,))
        listening.start()
        one, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(mine, [b"\0"], [theirs.fileno()])
        theirs.close()
        made.shelf.connect(one)
        made.rings.want(TID, made, passes=True)
        wait_until(lambda: TID in made.ring.loans._wanted, what="the worker to hear of it")
        yield made
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        mine.close()
        listening.join(PATIENCE_S)


def test_a_block_leaves_under_the_number_of_the_next_hop_and_the_carrier_hears_of_it(both: Both) -> None:
    data = os.urandom(5000)
    assert both.send(both.loan(), 3, data)
    header, came = both.frame()
    assert (header.number, header.block, came) == (FAR_TID, 3, data)
    assert both.ring.loans.has_untold, "more may come at once"
    both.ring.loans.flush()
    assert both.lent[0].wait(PATIENCE_S) == {3}
    assert both.heard == {3: DIGEST}


def test_it_is_given_back_as_it_was(both: Both) -> None:
    """The worker's settings of it are set at the carrier, too."""
    send_at_most(both.near, 60.0)
    assert both.send(both.loan(), 0, b"x")
    assert _send_timeout(both.near) != 60
    both.lent[0].recall()
    wait_until(lambda: both.lent[0].is_back, what="the connection to come back")
    assert _send_timeout(both.near) == 60


def _send_timeout(connection: socket.socket) -> int:
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 8), sys.byteorder)


def test_many_blocks_are_told_together_without_being_asked(both: Both) -> None:
    for block in range(loans._TELL_BLOCKS):
        assert both.send(both.loan(), block, b"x")
    assert len(both.lent[0].wait(PATIENCE_S)) == loans._TELL_BLOCKS


def test_nothing_is_lent_for_what_nobody_wants_or_with_other_checksums(both: Both) -> None:
    assert both.ring.loans.take(TID + 1, CHECKSUM) is None
    both.ring.loans.leave(both.loan())
    assert both.ring.loans.take(TID, "crc32c") is None
    assert both.is_free()
    wait_until(lambda: both.lent[0].is_back, what="the carrier to have it back")


def test_a_hop_that_takes_nothing_is_waited_for_ever_more_seldom(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    both.ring.loans.leave(both.loan())
    waits: list[float] = []
    monkeypatch.setattr(Loan, "is_ready", lambda self, within_s: waits.append(within_s))
    for _ in range(200):
        assert both.ring.loans.take(TID, CHECKSUM) is None
    assert 0 < len(waits) < 10


def test_a_block_that_lags_is_for_the_disk_and_its_frame_is_brought_to_its_end(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loans, "_STALL_S", 0.01)
    data = os.urandom(LARGE_BYTES)[: frames.MAX_BULK_BYTES]
    blocks_sent = 0
    while both.send(loan := both.loan(), blocks_sent, data):
        blocks_sent += 1
    assert both.ring.loans.take(TID, CHECKSUM) is None, "it is not another's before it is whole"
    both.lent[0].recall()
    for block in range(blocks_sent + 1):
        header, came = both.frame()
        assert (header.block, came) == (block, data)
    wait_until(lambda: both.lent[0].is_back, what="it to come back after the block")
    assert loan.number not in both.ring.loans._loans
    assert both.lent[0].end()
    assert both.heard.keys() == set(range(blocks_sent + 1))


def test_a_frame_that_is_not_whole_shuts_the_connection(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans, "_STALL_S", 0.01)
    monkeypatch.setattr(loans, "_FINISH_S", 0.01)
    data = bytes(frames.MAX_BULK_BYTES)
    blocks_sent = 0
    while both.send(both.loan(), blocks_sent, data):
        blocks_sent += 1
    wait_until(both.is_free, what="it to be given up")
    assert both.lent[0].end()
    assert both.heard.keys() == set(range(blocks_sent)), "nothing is said of the last one"
    for _ in range(blocks_sent):
        both.frame()
    rest = b""
    while some := both.far.recv(1 << 20):
        rest += some
    assert len(rest) < len(data)


def test_a_next_hop_that_is_gone_is_no_error_of_who_sends(both: Both) -> None:
    loan = both.loan()
    both.far.close()
    assert not both.send(loan, 0, b"x")
    wait_until(both.is_free, what="it to be given up")
    assert both.lent[0].end()
    assert not both.heard


def test_one_that_is_recalled_while_a_block_comes_goes_at_once(both: Both) -> None:
    loan = both.loan()
    both.lent[0].recall()
    wait_until(lambda: both.lent[0].is_back, what="it to be given back")
    assert not both.send(loan, 0, b"x"), "the block is for the disk"
    assert not loan.is_ready(0)
    both.far.setblocking(False)
    with pytest.raises(BlockingIOError):
        both.far.recv(1)


def test_what_comes_too_late_is_given_back(both: Both) -> None:
    both.ring.loans.leave(both.loan())
    both.rings.drop(TID, both)
    wait_until(lambda: both.lent[0].is_back, what="it to be given back")
    late = both.rings._lend(
        next(iter(both.rings._workers)), set(), TID, both.near.fileno(), FAR_TID, CHECKSUM, both.hear
    )
    assert late is not None
    wait_until(lambda: late.is_back, what="one that nobody wants to be given back")


def test_a_worker_that_dies_has_none_of_them_any_more(both: Both) -> None:
    both.loan()
    both.ring._link.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: both.lent[0].has_ended, what="the carrier to see it")
    with pytest.raises(TransferFailure) as caught:
        both.lent[0].wait(0)
    assert caught.value.kind is ErrorClass.CONNECTION_LOST
    assert both.lent[0].end()


def test_whoever_receives_sends_and_writes_what_the_hop_does_not_take(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks go on before they are on the disk; behind a hop that stops the rest is written, and nothing is missing."""
    monkeypatch.setattr(loans, "_STALL_S", 0.01)
    monkeypatch.setattr(loans, "_PATIENCE_S", 0.01)
    count = 8
    data = [os.urandom(BLOCK_BYTES) for _ in range(count)]
    ends = socket.socketpair()
    reports: list[Any] = []

    def send() -> None:
        both.ring.loans.leave(both.loan())
        for block, content in enumerate(data):
            ends[0].sendall(frames.encode_header(Type.BLOCK, content, CRC, TID, block) + content)
        ends[0].shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    with (tmp_path / "file").open("w+b") as file:
        job = Job("receive", TID, CHECKSUM, "blake2b-128", BLOCK_BYTES, count * BLOCK_BYTES)
        Receiver(job, ends[1], file.fileno(), reports.append, Gate(), both.shelf).run()
    sender.join(PATIENCE_S)
    on_disk = {block for report in reports for block, _ in report.blocks}
    assert on_disk, "nobody reads at the next hop"
    sent = dict(both.frames_until_back())
    assert sent == {block: data[block] for block in sent}
    written = (tmp_path / "file").read_bytes()
    assert all(written[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] == data[block] for block in on_disk)
    assert both.lent[0].end()
    assert both.heard.keys() == sent.keys()
    assert sent.keys() | on_disk == set(range(count))


def test_what_a_worker_has_sent_is_passed_when_the_next_hop_has_it_and_gone_when_it_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spooled, "_TELL_S", 1e9)
    told, sending = _Told(), _sending()
    growth = Growth({}, None, (), told)
    growth.follow(sending)
    lend: Any = _lends()
    growth.asked(lend)
    assert growth.lend(3, FAR_TID, CHECKSUM) is not None
    assert growth.lend(3, FAR_TID, CHECKSUM) is None, "nobody else has asked"
    blocks.staged(sending.table, [0])
    for block in (0, 1, 2):
        lend.heard({block: DIGEST})
        blocks.went(sending.table, [block], 7)
    assert told.said == [([0], [])], "the STAGED of one was quicker"
    blocks.staged(sending.table, [1])
    growth.heard()
    assert told.said[1:] == [], "another one is under way: this is told with it, or after a moment"
    blocks.carrier_down(sending.table, 7)
    assert blocks.ready(sending.table) == [2]
    assert not growth.is_readable(2)
    assert told.said[1:] == [([1], []), ([], [2])], "in their order"
    assert growth.shown(Piece(2, loans_sums(), memoryview(b"x"), lambda was_sent: None)), "it comes again"


def test_other_bytes_for_a_block_that_a_worker_sent_end_it() -> None:
    growth = Growth({0: DIGEST}, None, (), told := _Told())
    growth.follow(_sending())
    lend: Any = _lends()
    growth.asked(lend)
    growth.lend(3, FAR_TID, CHECKSUM)
    lend.heard({0: b"e" * 16, 1: DIGEST})
    assert growth.is_stopped
    assert told.said == [([], [0, 1])], "what was told with it comes again, too"


def test_nothing_is_lent_between_the_end_of_a_sending_and_the_next_one() -> None:
    """Nobody would hear what left by it."""
    growth = Growth({}, None, (), _Told())
    for _ in range(2):
        growth.follow(_sending())
        growth.asked(cast(Any, _lends()))
        growth.asked(cast(Any, _lends()))
        assert growth.lend(3, FAR_TID, CHECKSUM) is not None
        growth.decline()
        growth.asked(cast(Any, _lends()))
        assert growth.lend(3, FAR_TID, CHECKSUM) is None


def test_whoever_asks_before_there_is_a_connection_is_lent_the_first_one() -> None:
    growth = Growth({}, None, (), _Told())
    growth.asked(cast(Any, _lends()))
    growth.follow(_sending())
    assert growth.lend(3, FAR_TID, CHECKSUM) is not None


def test_one_that_lies_idle_is_recalled_when_another_worker_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, said = Growth({}, None, (), _Told()), list[int]()
    growth.follow(_sending())

    def lend(connection: int, far_tid: int, checksum: str, heard: Any) -> Lent:
        return Lent(1, lambda message, descriptors: said.append(message[0]), heard)

    growth.asked(lend)
    lent = growth.lend(3, FAR_TID, CHECKSUM)
    growth.asked(lend)
    assert lent is not None and not said, "it may be about to be used"
    monkeypatch.setattr(spooled, "_IDLE_S", 0.0)
    growth.asked(lend)
    assert said == [loans.RECALL]


def test_where_it_is_not_known_what_a_worker_has_sent_all_that_is_not_known_comes_again() -> None:
    told = _Told()
    growth = Growth({1: DIGEST}, None, (), told)
    growth.lose()
    assert told.said == [([], [0])]


def test_a_worker_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans, "_BACK_S", 0.01)
    lent = Lent(1, lambda message, descriptors: None, lambda left: None)
    began_s = time.monotonic()
    assert not lent.end()
    assert time.monotonic() - began_s < PATIENCE_S


def loans_sums() -> Any:
    """As of a block that came again."""
    from tests.unit.test_overlay_ring import SUMS

    return SUMS


class _lends:
    """Lends nothing, and keeps who hears of it."""

    def __call__(self, connection: int, far_tid: int, checksum: str, heard: Any) -> Lent:
        self.heard = heard
        return Lent(1, lambda message, descriptors: None, heard)


def test_one_is_never_given_back_before_all_that_left_by_it_is_told() -> None:
    """Another thread is about to tell it when the connection is recalled."""
    said: list[int] = []
    is_telling, may_tell = threading.Event(), threading.Event()

    def say(message: bytes) -> None:
        if message[0] == loans.LEFT:
            is_telling.set()
            may_tell.wait(0.1)
        said.append(message[0])

    mine = loans.Loans(say)
    mine.want(TID)
    one, other = socket.socketpair()
    with one, other:
        mine._add(Loan(1, TID, FAR_TID, CHECKSUM, other))
        loan = mine.take(TID, CHECKSUM)
        assert loan is not None
        assert mine.send(loan, Header(Type.BLOCK, 0, 1, TID, 0, CRC(b"x")), memoryview(b"x"), CRC, DIGEST)
        telling = threading.Thread(target=mine.flush)
        telling.start()
        assert is_telling.wait(PATIENCE_S)
        mine.drop(TID)
        may_tell.set()
        telling.join(PATIENCE_S)
    assert said == [loans.LEFT, loans.BACK]


def test_one_that_comes_without_a_descriptor_is_given_back() -> None:
    said: list[bytes] = []
    mine = loans.Loans(said.append)
    mine.want(TID)
    assert mine.hear(loans._LEND.pack(loans.LEND, TID, 7, FAR_TID, CHECKSUM.encode()), [])
    assert [loans.back(message) for message in said] == [7]


class _Channel:
    """A connection by which nothing comes."""

    def lendable(self) -> int:
        return 3

    def has_more(self, within_s: float) -> bool:
        return False

    def failure(self, kind: ErrorClass, message: str) -> TransferFailure:
        return TransferFailure(kind, message)


@pytest.mark.parametrize("what", ["its worker dies", "the route is lost", "the transfer begins anew"])
def test_what_left_just_before_the_end_of_a_loan_comes_again_where_it_is_lost(what: str) -> None:
    """Told with the end, so that nobody waits for it any more."""
    growth, channel, control = Growth({}, None, (), told := _Told()), cast(Any, _Channel()), cast(Any, object())
    sending = _sending()
    growth.follow(sending)
    way = Way(sending, (), False)
    sending.ways, way.control = [way], control
    number = sending.carrier(way)

    def say(message: bytes, descriptors: list[int]) -> None:
        if message[0] == loans.LEND and what == "its worker dies":
            lent.left({2: DIGEST})
            lent.lost()
        elif message[0] == loans.LEND and what == "the route is lost":
            way.control = None
        elif message[0] == loans.LEND:
            sending._epoch = "another"
        else:
            lent.left({2: DIGEST})
            lent.back()

    def lend(channel: Channel, tid: int) -> Lent:
        lent.lend(TID, tid, CHECKSUM, 3)
        return lent

    lent = Lent(1, say, growth._left)
    way._channels = {channel, cast(Any, _Channel())}
    cargo = cast(Any, sending.cargo)
    cargo.lend, cargo.ask = lend, lambda: Open("0" * 32, 1, "f", 4 * BLOCK_BYTES, BLOCK_BYTES, 99)
    with pytest.raises(TransferFailure) as caught:
        way._lend(control, channel, number)
    sending.lost(number, caught.value)
    assert blocks.ready(sending.table) == [2]
    assert not growth.is_readable(2)
    assert told.said == [([], [2])]


def test_a_worker_goes_on_reading_while_the_carrier_does_not() -> None:
    """Each message of the carrier here has an answer, which it does not read before it has said all."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.settimeout(PATIENCE_S)
    count, shelf = 3000, Shelf()
    with other:
        shelf.connect(mine)
        _, found, _, _ = socket.recv_fds(other, 100, 1)
        os.close(found[0])
        for number in range(count):
            other.send(loans._LEND.pack(loans.LEND, TID, number, FAR_TID, CHECKSUM.encode()))
        assert [loans.back(other.recv(100)) for _ in range(count)] == [*range(count)]


def test_a_worker_that_stands_still_holds_up_neither_the_carrier_nor_other_workers(both: Both) -> None:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    still, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    count, said = 1000, list[int]()

    def talk() -> None:
        for tid in range(TID + 1, TID + count):
            both.rings.want(tid, both, True)
            said.append(tid)

    still.settimeout(PATIENCE_S)
    with mine, other, still:
        listening = threading.Thread(target=both.rings.listen, args=(other,))
        listening.start()
        memory = os.memfd_create("blocks")
        os.truncate(memory, SLOTS * BLOCK_BYTES)
        socket.send_fds(mine, [b"\0"], [theirs.fileno()])
        theirs.close()
        socket.send_fds(still, [b"memory"], [memory])
        os.close(memory)
        assert _asked(still) == TID
        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        talking.join(PATIENCE_S)
        assert not talking.is_alive(), f"{len(said)} could be said"
        wait_until(lambda: len(both.ring.loans._wanted) == count, what="the other worker to hear all")
        wait_until(
            lambda: [bool(one._waiting) for one in both.rings._workers].count(True) == 1, what="nothing on its way"
        )
        for worker in both.rings._workers:
            lent = both.rings._lend(worker, set(), TID, both.near.fileno(), FAR_TID, CHECKSUM, both.hear)
            assert (lent is None) == bool(worker._waiting), "who does not read is lent none"
        assert [_asked(still) for _ in range(1, count)] == [*range(TID + 1, TID + count)]
        mine.close()
        listening.join(PATIENCE_S)


def _asked(worker: socket.socket) -> int:
    """The transfer that a carrier speaks of next."""
    return int(loans._WORD.unpack(worker.recv(100))[1])


def test_nobody_has_to_wait_while_one_is_asked_for() -> None:
    said: list[int] = []

    def say(message: bytes) -> None:
        assert not mine._lock.locked()
        said.append(message[0])

    mine = loans.Loans(say)
    mine.want(TID)
    assert mine.take(TID, CHECKSUM) is None
    assert said == [loans.WANTED]


def test_what_left_just_as_the_carrier_died_is_not_waited_for(both: Both, tmp_path: Path) -> None:
    """Its sender hears that the connection has ended, so it gives again what is not STAGED."""
    near, far = socket.socketpair()
    both.ring.loans.leave(both.loan())
    job = Job("receive", TID, CHECKSUM, "blake2b-128", BLOCK_BYTES, 2 * BLOCK_BYTES)
    data = os.urandom(BLOCK_BYTES)
    with near, far, (tmp_path / "file").open("w+b") as file:
        receiver = Receiver(job, far, file.fileno(), lambda report: None, Gate(), both.shelf)
        receiving = threading.Thread(target=receiver.run, daemon=True)
        receiving.start()
        near.sendall(frames.encode_header(Type.BLOCK, data, CRC, TID, 0) + data)
        assert both.frame()[1] == data
        both.ring._link.shutdown(socket.SHUT_RDWR)
        receiving.join(PATIENCE_S)
        assert not receiving.is_alive()
