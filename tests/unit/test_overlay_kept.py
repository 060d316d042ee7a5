"""Connections that files leave for the next ones: which of them, how many, how long."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.kept import Circuit, Kept, Place, place
from stageout.overlay.links import Claim, Lane
from stageout.overlay.tcp import UNSENT_BYTES
from stageout.overlay.wire import frames
from tests.harness.pool.waiting import wait_until

GATEWAY = Gateway("host", 1, "key", b"secret")
HERE = place("put", GATEWAY, ("relay:1",))


class _Channel:
    """A connection that goes nowhere."""

    def __init__(self) -> None:
        self.is_open, self.closed, self.said_something = True, False, False
        self.gateway = GATEWAY
        self.lanes: list[Lane | None] = []

    def close(self) -> None:
        self.closed = True

    def travel(self, lane: Lane | None) -> None:
        self.lanes.append(lane)

    def has_more(self, within_s: float) -> bool:
        return self.said_something


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept(idle_s=1000, most=6)
    yield made
    made.close()


def _circuit(carriers: int = 2) -> tuple[Circuit, list[_Channel]]:
    channels = [_Channel() for _ in range(1 + carriers)]
    control, *others = (cast(Channel, channel) for channel in channels)
    return Circuit(control, others), channels


def test_the_next_file_on_the_same_way_has_what_the_last_one_left(kept: Kept) -> None:
    (first, _), (second, channels) = _circuit(), _circuit()
    kept.leave(HERE, first)
    kept.leave(HERE, second)
    lane = cast(Lane, object())
    assert kept.take(HERE, GATEWAY, lane) is second
    assert all(channel.lanes == [None, lane] for channel in channels)
    assert kept.take(HERE, GATEWAY) is first
    assert kept.take(HERE, GATEWAY) is None


@pytest.mark.parametrize(
    "other",
    [
        place("get", GATEWAY, ("relay:1",)),
        place("put", GATEWAY, ()),
        place("put", GATEWAY, ("relay:1",), Claim(priority=3)),
        place("put", replace(GATEWAY, port=2), ("relay:1",)),
        place("put", replace(GATEWAY, secret=b"another"), ("relay:1",)),
        HERE._replace(process=1),
    ],
)
def test_nobody_else_gets_it(kept: Kept, other: Place) -> None:
    kept.leave(HERE, _circuit()[0])
    assert kept.take(other, GATEWAY) is None
    assert len(kept) == 3


def test_what_ended_meanwhile_is_not_given_away(kept: Kept) -> None:
    circuit, channels = _circuit()
    kept.leave(HERE, circuit)
    channels[1].is_open, channels[2].said_something = False, True
    found = kept.take(HERE, GATEWAY)
    assert found is not None
    assert found.carriers == []
    assert [channel.closed for channel in channels] == [False, True, True]
    circuit, channels = _circuit()
    kept.leave(HERE, circuit)
    channels[0].is_open = False
    assert kept.take(HERE, GATEWAY) is None
    assert all(channel.closed for channel in channels)


def test_the_oldest_are_closed_when_there_are_too_many(kept: Kept) -> None:
    left = [_circuit() for _ in range(3)]
    for circuit, _ in left:
        kept.leave(HERE, circuit)
    assert len(kept) == 6
    assert [channels[0].closed for _, channels in left] == [True, False, False]


def test_nothing_is_kept_where_no_thread_could_close_it_in_time(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (first, channels), (second, _) = _circuit(), _circuit()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        kept.leave(HERE, first)
    assert all(channel.closed for channel in channels)
    assert not len(kept)
    kept.leave(HERE, second)
    assert kept.take(HERE, GATEWAY) is second


def test_none_is_kept_for_long_or_for_thousands_of_files() -> None:
    brief = Kept(idle_s=0.001)
    circuit, channels = _circuit()
    brief.leave(HERE, circuit)
    wait_until(lambda: all(channel.closed for channel in channels), what="it to be closed")
    assert len(brief) == 0
    circuit, channels = _circuit()
    circuit.files = 1000
    brief.leave(HERE, circuit)
    assert all(channel.closed for channel in channels)


_FORKS = """
import os
from stageout.overlay.kept import kept
mine = kept()
child = os.fork()
if not child:
    os._exit(kept() is mine)
raise SystemExit(os.waitpid(child, 0)[1] != 0)
"""


def test_a_child_of_fork_has_none_of_them() -> None:
    subprocess.run([sys.executable, "-c", _FORKS], check=True, timeout=60)


def test_a_checksum_is_vouched_for_one_block_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file on the same connection has a block of the same number."""
    sent: list[bytes] = []
    monkeypatch.setattr("stageout.overlay.channel.send_both", lambda sock, head, data: sent.append(head))
    channel = Channel.__new__(Channel)
    channel._tap, channel._block_s, channel._vouched, channel.gateway = None, 0.0, (-1, 0), GATEWAY
    channel._kept_in, channel._unsent_bytes = (-1, -1, 0), UNSENT_BYTES
    channel._socket = channel._wire = socket.socket()
    channel._checksum_name, channel._checksum, channel.route = "crc32", zlib.crc32, ()
    channel.vouch(0, "crc32", zlib.crc32(b"first"))
    for number, data in enumerate((b"first", b"next")):
        channel.send_block(number, 0, data)
    channel._socket.close()
    assert [frames.decode_header(head, zlib.crc32).checksum for head in sent] == [
        zlib.crc32(b"first"), zlib.crc32(b"next"),
    ]  # fmt: skip
