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
from overlay_router.custodians.carrier import Answer, Carrier, Note, Order
from overlay_router.data import worker
from overlay_router.data.jobs import Job, Report
from overlay_router.data.receiving import Gates
from overlay_router.data.ring import Rings, Shelf
from stageout.core.errors import ErrorClass
from stageout.wire import frames, overlay
from stageout.wire.frames import Decoder
from stageout.wire.overlay import Operation, Refuse


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)


@pytest.mark.parametrize("kind", ["receive", "send", "send-pack", "relay", "tls"])
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
    decoder = Decoder(frames.checksums()[job.checksum])
    decoder.feed(said)
    told = [overlay.decode(frame) for frame in decoder.frames()]
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
    said = list[Answer | Note]()
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
