"""The bytes that leave a socket are those that were to leave, whatever the kernel takes at once."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from overlay_router.data import sending
from overlay_router.data.jobs import Job
from overlay_router.data.known import Digests
from stageout.overlay import tcp

_HEAD = b"h" * 32


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """Of a file below ``tmp_path``."""
    (tmp_path / "file").write_bytes(os.urandom(400_001))
    return (tmp_path / "file").read_bytes()


def _sent(path: Path, data: bytes, offset: int, unread: bool = False) -> bytes:
    """The bytes at the other end."""
    near, far = socket.socketpair()
    received = bytearray()

    def receive() -> None:
        while part := far.recv(70_000):
            received.extend(part)

    reader = threading.Thread(target=receive)
    reader.start()
    try:
        with near, path.open("rb") as file:
            if unread:
                tcp.send_unread(near, _HEAD, file.fileno(), offset, len(data) - offset)
            else:
                tcp.send_from(near, _HEAD, file.fileno(), offset, memoryview(data)[offset:])
    finally:
        reader.join()
        far.close()
    return bytes(received)


@pytest.mark.parametrize("unread", [False, True])
def test_a_part_of_a_file_leaves_behind_its_header(tmp_path: Path, data: bytes, unread: bool) -> None:
    assert _sent(tmp_path / "file", data, 4097, unread) == _HEAD + data[4097:]


@pytest.mark.parametrize("unread", [False, True])
def test_what_was_read_or_is_then_leaves_where_there_is_no_sendfile(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, unread: bool
) -> None:
    def refuse(*arguments: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refuse)
    assert _sent(tmp_path / "file", data, 4097, unread) == _HEAD + data[4097:]
    if unread:
        os.truncate(tmp_path / "file", 200_000)
        with pytest.raises(OSError, match="became shorter"):
            _sent(tmp_path / "file", data, 4097, unread)


@pytest.mark.parametrize("unread", [False, True])
def test_a_file_that_was_cut_is_said_and_not_waited_for(tmp_path: Path, data: bytes, unread: bool) -> None:
    os.truncate(tmp_path / "file", 200_000)
    with pytest.raises(OSError, match="became shorter"):
        _sent(tmp_path / "file", data, 4097, unread)


@pytest.mark.parametrize(
    ("took_s", "waits_bytes"), [(0.0, 4 << 20), (0.001, 4 << 20), (0.005, 1 << 20), (0.08, 1 << 18)]
)
def test_what_may_wait_in_the_kernel_is_what_leaves_in_five_milliseconds(took_s: float, waits_bytes: int) -> None:
    assert tcp.unsent_bytes(1 << 20, took_s) == waits_bytes


def test_a_router_lets_more_wait_for_who_takes_blocks_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "unsent_bytes", lambda size_bytes, took_s: size_bytes)
    path = tmp_path / "file"
    path.write_bytes(bytes(8 << 20))
    job = Job("send", checksum="crc32", block_bytes=1 << 20, size_bytes=8 << 20, to="host", peer="key")
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as far, path.open("rb") as file:
        near = listener.accept()[0]
        reader = threading.Thread(target=lambda: all(iter(lambda: far.recv(1 << 20), b"")))
        reader.start()
        with near:
            sending.Sending(job, near, file.fileno(), Digests(job)).run()
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 1 << 20
        reader.join()


def test_what_has_arrived_counts_whether_it_was_read_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname()[:2])
        far, _ = listening.accept()
    with near, far:
        near.sendall(bytes(10_000))
        assert far.recv(10_000, socket.MSG_WAITALL | socket.MSG_PEEK)
        arrived_bytes = tcp.arrived_bytes(far)
        assert arrived_bytes is not None
        assert arrived_bytes >= 10_000
    assert tcp.arrived_bytes(far) is None
    one, other = socket.socketpair()
    with one, other:
        assert tcp.arrived_bytes(one) is None
