"""The time that Python needs for the system calls of small files between two processes, and nothing else: no digests,
records, rights or results. Packs of 1 MiB and the way to make a file are those of the router.

``bare.py FOLDER`` prints a port and receives; :func:`send` is the other side.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from pathlib import Path

from overlay_router.local import unnamed
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_PACK_BYTES

_HEAD = struct.Struct("!II")


def send(port: int, source: Path, into: str) -> None:
    """All files of a directory; each has its name on return."""
    room = memoryview(bytearray(MAX_PACK_BYTES + MAX_FILE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        names: list[str] = []
        sizes: list[int] = []
        with os.scandir(source) as entries:
            files = sorted((entry.path, entry.name) for entry in entries)
        at = 0
        for path, name in files:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size_bytes = os.fstat(descriptor).st_size
            at += os.readv(descriptor, (room[at : at + size_bytes + 1],))
            os.fstat(descriptor)
            os.close(descriptor)
            names.append(name)
            sizes.append(size_bytes)
            if at >= MAX_PACK_BYTES:
                _send_pack(connection, into, names, sizes, room[:at])
                names, sizes, at = [], [], 0
        _send_pack(connection, into, names, sizes, room[:at])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def _send_pack(connection: socket.socket, into: str, names: list[str], sizes: list[int], data: memoryview) -> None:
    head = json.dumps([into, names, sizes]).encode()
    connection.sendall(_HEAD.pack(len(head), len(data)) + head)
    connection.sendall(data)


def _receive(connection: socket.socket, folder: Path) -> None:
    """Packs of one connection. Its end is also the answer: all files have their names."""
    room = memoryview(bytearray(MAX_PACK_BYTES + MAX_FILE_BYTES))
    with connection.makefile("rb", buffering=0) as stream:
        while head := stream.read(_HEAD.size):
            head_bytes, data_bytes = _HEAD.unpack(head)
            _fill(connection, room[:head_bytes])
            into, names, sizes = json.loads(bytes(room[:head_bytes]))
            _fill(connection, room[:data_bytes])
            (folder / into).mkdir(exist_ok=True)
            directory = os.open(folder / into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _make(directory, names, sizes, room)
            os.close(directory)


def _make(directory: int, names: list[str], sizes: list[int], room: memoryview) -> None:
    link = unnamed.way_to_link(directory)
    assert link is not None
    at = 0
    for name, size_bytes in zip(names, sizes):
        descriptor = unnamed.make(directory, 0o644)
        os.write(descriptor, room[at : at + size_bytes])
        os.fstat(descriptor)
        link(descriptor, directory, name)
        os.close(descriptor)
        at += size_bytes


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError
        view = view[count:]


def main() -> None:
    """Receive until killed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            with listening.accept()[0] as connection:
                _receive(connection, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
