"""Sockets whose path may be long, and waiting for sockets and pipes, however many a daemon has open."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterable
from pathlib import Path

_DAY_S = 86400.0


def readable(descriptors: Iterable[int], within_s: float) -> list[int]:
    """Return the sockets that become readable within a time limit in seconds (at most a day).

    ``select.select`` does the same, but not for descriptors from 1024 on, which a busy daemon has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(min(within_s, _DAY_S) * 1000)]


def listen_at(path: Path, mode: int, backlog: int = 1024) -> socket.socket:
    """Return a listening socket at ``path``, which appears with its final mode or not at all. It does not block.

    A socket's address has room for 107 bytes (unix(7)), a pilot's directory often needs more: the address that is bound
    names the open directory instead.

    :raises OSError: the socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        aside = f".{path.name}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=directory)
        listener.bind(f"/proc/self/fd/{directory}/{aside}")
        os.chmod(aside, mode, dir_fd=directory)
        listener.listen(backlog)
        listener.setblocking(False)
        os.rename(aside, path.name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(directory)
    return listener


def connect_to(sock: socket.socket, path: Path) -> None:
    """Connect to a socket, however long its path is. :raises OSError: nobody listens there."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
