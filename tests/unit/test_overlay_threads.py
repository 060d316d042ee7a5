"""Processes of a router that may have no more threads refuse what they are given, and live on."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from overlay_router.away import is_disk, unwelcome
from overlay_router.custodians import pack_carrier
from overlay_router.custodians.carrier import Answer, Carrier, Note, Order
from overlay_router.custodians.pack_records import pack_text
from overlay_router.data import worker
from overlay_router.data.jobs import Job, Report
from overlay_router.data.receiving import Gates
from overlay_router.data.ring import Rings, Shelf
from overlay_router.delivery.lessee import Lessee
from stageout.core.errors import ErrorClass
from stageout.core.pools import Pool
from stageout.core.threads import NoThread
from stageout.overlay.channel import Gateway
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.frames import Decoder
from stageout.overlay.wire.messages import Leased, Operation, Pack, Refuse

_start = threading.Thread.start


def _fails(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _fails)


@pytest.mark.parametrize("kind", ["receive", "send", "send-pack", "relay", "tls", "http"])
def test_a_worker_without_a_thread_for_a_job_refuses_it(kind: str, tmp_path: Path) -> None:
    reports, gates = list[Report](), Gates()
    near, far = socket.socketpair()
    file = os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)
    with far:
        far.settimeout(30)
        job = Job(kind, 7, peer="site")
        worker.begin(job, [near.detach(), file], cast(Any, reports.append), gates, Shelf())
        said = b""
        while data := far.recv(4096):
            said += data
    assert not gates._gates
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)
    problem, ended = reports
    assert "allow it more" in problem.problem
    assert (problem.tid, problem.errno, ended.ended) == (7, errno.EAGAIN, "site")
    if kind == "http":
        assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\n")
        assert b"short of threads" in said
        return
    decoder = Decoder(frames.checksums()[job.checksum])
    decoder.feed(said)
    told = [messages.decode(frame) for frame in decoder.frames()]
    if kind in ("relay", "tls"):
        assert told == []
        return
    (refusal,) = told
    assert isinstance(refusal, Refuse)
    assert (ErrorClass.from_code(refusal.code), refusal.retry_after_s) == (ErrorClass.SERVER_BUSY, 1)
    assert "allow it more" in refusal.message


def test_the_control_connection_hears_it_too() -> None:
    assert is_disk(errno.EAGAIN)
    told = unwelcome(OSError(errno.EAGAIN, "none"), "crc32")
    assert told is not None
    assert str(told).startswith("this router has as many threads as it may; who runs this router: allow it more")


def test_a_carrier_without_a_thread_for_an_order_answers_that(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Answer | Note] = []
    carrier = Carrier(Rings())
    monkeypatch.setattr(carrier, "_say", said.append)
    operation = Operation("0a" * 16, 1, "delete", "f", 2**40)
    order = Order(3, "t:1", "key", "00", json.dumps(asdict(operation)))
    carrier._begin(order)
    (answer,) = said
    assert isinstance(answer, Answer)
    assert (answer.number, ErrorClass.from_code(answer.code)) == (3, ErrorClass.SERVER_BUSY)
    assert "threads" in answer.failure
    assert not carrier._growing


def test_what_is_shared_with_a_carrier_needs_a_thread_and_goes_by_the_disk_without() -> None:
    shelf = Shelf()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        shelf.connect(near)
        assert shelf.ring is None


def test_a_pack_to_a_terminal_for_which_there_is_no_thread_is_answered() -> None:
    said = list[pack_carrier.Answer]()
    ways, before = pack_carrier.Ways(said.append), set(Path("/proc/self/fd").iterdir())
    pack = Pack("0a" * 16, 1, 2**40, ("f",), (1,), (0o644,), "")
    for number in (3, 4):
        ways.take(pack_carrier.Order(number, "t:1", "key", "00", pack_text(pack), "f", "d"))
    assert [(one.number, ErrorClass.from_code(one.code)) for one in said] == [
        (3, ErrorClass.SERVER_BUSY), (4, ErrorClass.SERVER_BUSY),
    ]  # fmt: skip
    assert said[0].failure.startswith("this process has as many threads as it may: allow it more")
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_lease_that_nobody_can_watch_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two threads that it takes, only that which renews it is to be had."""
    begun, given_back = list[threading.Thread](), list[tuple[str, ...]]()

    def one_begins(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        _start(thread)

    lessee = Lessee(lambda: Gateway("127.0.0.1", 1, "k", b""), "me:1")
    monkeypatch.setattr(threading.Thread, "start", one_begins)
    monkeypatch.setattr(lessee, "ask", lambda places, held: Leased(places))
    monkeypatch.setattr(lessee, "_give_back", given_back.append)
    with pytest.raises(NoThread), lessee.alone(["u"], lambda: None, lambda until_s: None):
        pass
    assert len(given_back) == 1
    (renewing,) = begun
    renewing.join(30)
    assert not renewing.is_alive()


def test_what_finds_no_thread_of_a_pool_is_not_done_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The giver gives it again, and would have it done twice."""
    done, free = list[str](), threading.Event()
    with Pool(2) as pool:
        monkeypatch.setattr(threading.Thread, "start", _start)
        first = pool.submit(free.wait, 60)
        monkeypatch.setattr(threading.Thread, "start", _fails)
        with pytest.raises(NoThread, match="allow it more"):
            pool.submit(done.append, "refused")
        free.set()
        assert first.result(60)
        monkeypatch.setattr(threading.Thread, "start", _start)
        pool.submit(done.append, "given again").result(60)
    assert done == ["given again"]


def test_a_pool_answers_with_what_was_raised() -> None:
    with pytest.MonkeyPatch.context() as patch, Pool(1) as pool:
        patch.setattr(threading.Thread, "start", _start)
        with pytest.raises(ValueError, match="no number"):
            pool.submit(_no_number).result(60)


def _no_number() -> NoReturn:
    raise ValueError("no number")
