"""What leaves a socket is what was to leave, whatever the kernel takes at once."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from stageout.core import sockets

_HEAD = b"h" * 32


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """Of a file below ``tmp_path``."""
    (tmp_path / "file").write_bytes(os.urandom(400_001))
    return (tmp_path / "file").read_bytes()


def _sent(path: Path, data: bytes, offset: int, unread: bool = False) -> bytes:
    """What comes out of the other end."""
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
                sockets.send_unread(near, _HEAD, file.fileno(), offset, len(data) - offset)
            else:
                sockets.send_from(near, _HEAD, file.fileno(), offset, memoryview(data)[offset:])
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
