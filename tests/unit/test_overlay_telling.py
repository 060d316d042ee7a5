"""When a worker tells the carrier what has left by its connections, all of it, and when they are back."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router.custodians import spooled
from overlay_router.custodians.spooled import Growth
from overlay_router.data import loans, receiving
from overlay_router.data.jobs import Job
from overlay_router.data.loans import Lent, Loan, Loans
from overlay_router.data.receiving import Gate, Receiver
from overlay_router.data.teller import Teller
from stageout.overlay.sending import Sending
from stageout.overlay.tcp import fill
from stageout.overlay.wire import blocks, frames
from stageout.overlay.wire.frames import Type
from stageout.overlay.wire.messages import BLOCK_BYTES, Operation
from tests.unit.test_overlay_loans import _lends
from tests.unit.test_overlay_ring import DIGEST, _sending, _Told

PATIENCE_S = 20.0
TID, COUNT, CHECKSUM, CRC = 7, 99, "crc32", frames.checksums()["crc32"]


@pytest.mark.parametrize(
    ("block", "late_s", "is_told"),
    [(0, 0.0, True), (0, 1e9, False), (COUNT - 1, 1e9, True)],
    ids=["a slow one", "a quick one", "the last one"],
)
def test_what_has_left_is_told_at_once_where_blocks_come_slowly_and_at_the_end_of_a_file(
    block: int, late_s: float, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next header comes with the end of a slow block: without it much would be told when the lease is over."""
    said: list[int] = []
    mine, data = Loans(lambda message: said.append(message[0])), bytes(BLOCK_BYTES)
    frame = frames.encode_header(Type.BLOCK, data, CRC, TID, block) + data
    shelf = cast(Any, SimpleNamespace(ring=SimpleNamespace(loans=mine)))
    job = Job("receive", TID, CHECKSUM, "blake2b-128", BLOCK_BYTES, COUNT * BLOCK_BYTES)
    near, here = socket.socketpair()
    hop, far = socket.socketpair()
    monkeypatch.setattr(receiving, "_LATE_S", late_s)
    monkeypatch.setattr(receiving, "readable", lambda ends, within_s: [0] if within_s else [])
    with near, here, hop, far, (tmp_path / "file").open("w+b") as file:
        mine.want(TID)
        mine._add(Loan(1, TID, 11, CHECKSUM, hop))
        receiver = Receiver(job, here, file.fileno(), lambda report: None, Gate(), shelf)
        both = [
            threading.Thread(target=near.sendall, args=(frame,)),
            threading.Thread(target=fill, args=(far, memoryview(bytearray(len(frame))))),
        ]
        for thread in both:
            thread.start()
        assert receiver._block()
        for thread in both:
            thread.join(PATIENCE_S)
        monkeypatch.setattr(receiving, "fill", lambda connection, view: False)
        assert not receiver._next_header()
        receiver._syncing.finish()
        if receiver._direct >= 0:
            os.close(receiver._direct)
    assert (loans.LEFT in said) is is_told


@pytest.mark.parametrize(("tell_s", "most"), [(0.0, 64), (1e9, 2)], ids=["after a while", "when it is much"])
def test_what_has_left_is_told_while_more_comes(tell_s: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver never pauses: the carrier must hear of it all the same."""
    monkeypatch.setattr(loans, "_TELL_S", tell_s)
    monkeypatch.setattr(loans, "_TELL_BLOCKS", most)
    said: list[bytes] = []
    mine, (hop, far) = Loans(said.append), socket.socketpair()
    with hop, far:
        loan = Loan(1, TID, 11, CHECKSUM, hop)
        for block in range(2):
            assert [len(loans.left(message)[1]) for message in said] == ([1] * block if tell_s == 0.0 else [])
            mine._note(loan, block, bytes(frames.DIGEST_BYTES))
    assert sum(len(loans.left(message)[1]) for message in said) == 2


@pytest.mark.parametrize("problem", [OSError(errno.ENOBUFS, "no memory"), RuntimeError("no thread")])
def test_what_cannot_be_said_ends_the_connection(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A carrier that was not told of a block would wait for it for ever."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.settimeout(PATIENCE_S)

    def fail(*arguments: object) -> bool:
        raise problem

    with mine, other, monkeypatch.context() as patched:
        teller = Teller(mine)
        if isinstance(problem, OSError):
            patched.setattr(teller, "_goes", fail)
        else:
            patched.setattr(teller, "_goes", lambda message: False)
            patched.setattr(threading.Thread, "start", fail)
        teller.say(b"left")
        assert other.recv(100) == b""


def test_connections_on_loan_come_back_when_nothing_more_comes() -> None:
    """Else they are closed with the file, and the next one has to make others."""
    said: list[int] = []
    growth = Growth({}, None, (), lambda passed, gone: None)

    def lend(connection: int, far_tid: int, checksum: str, heard: Any) -> Lent:
        return Lent(1, lambda message, descriptors: said.append(message[0]), heard)

    growth.asked(lend)
    assert growth.lend(3, 11, CHECKSUM) is not None
    growth.complete(Operation("0" * 32, 1, "publish", "f", 99))
    assert said == [loans.RECALL]


def _left_three(monkeypatch: pytest.MonkeyPatch) -> tuple[Growth, Sending, _Told]:
    """Three blocks are under way by a connection on loan."""
    monkeypatch.setattr(spooled, "_TELL_S", 1e9)
    told, sending = _Told(), _sending()
    growth = Growth({}, None, (), told)
    growth.follow(sending)
    lend: Any = _lends()
    growth.asked(lend)
    assert growth.lend(3, 11, CHECKSUM) is not None
    lend.heard({0: DIGEST, 1: DIGEST, 2: DIGEST})
    blocks.went(sending.table, [0, 1, 2], 7)
    blocks.staged(sending.table, [0])
    growth.heard()
    assert told.said == [([0], [])], "the first is told at once"
    return growth, sending, told


def test_passed_blocks_are_told_at_once_when_nothing_else_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    assert told.said[1:] == []
    blocks.staged(sending.table, [2])
    growth.heard()
    assert told.said[1:] == [([1, 2], [])]


def test_passed_blocks_are_told_together_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    monkeypatch.setattr(spooled, "_TELL_S", 0.0)
    blocks.staged(sending.table, [1])
    growth.heard()
    assert told.said[1:] == [([1], [])]


def test_passed_blocks_are_told_at_once_when_all_others_are_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more may be heard of the next hop, and the sender waits."""
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    assert told.said[1:] == [], "block 2 is nowhere yet"
    growth.arrived([(2, DIGEST)])
    assert told.said[1:] == [([1], [])]


def test_what_was_passed_and_not_told_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    growth.close()
    assert told.said[1:] == [([1], []), ([], [2])]


def test_what_is_passed_and_lost_before_it_was_told_is_only_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    growth.lose()
    assert told.said[1:] == [([], [0, 1, 2])]
