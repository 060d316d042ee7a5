"""Somebody on the way to a router who knows the protocol, and no key."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import socket
import threading
import time
import zlib

from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.frames import Checksum, Decoder, Frame, Type
from stageout.overlay.wire.messages import BLOCK_BYTES, Operation, Welcome

_PIECE_BYTES = 65536


class Forger:
    """Passes connections on to a port of this machine, with other bytes in place of a file's, and a DELETE of its own.

    :param forged: what arrives in place of the file, of the same length. :param victim: the name that it deletes.
    :ivar port: where it listens.
    """

    def __init__(self, target: int, forged: bytes, victim: str) -> None:
        self._target, self._forged, self._victim = target, forged, victim

    def __enter__(self) -> Forger:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pass_on, args=(near, far), daemon=True).start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError):
            from_sender, from_router = Decoder(), Decoder()
            far.sendall(_encoded(_next(near, from_sender), zlib.crc32))
            answer = _next(far, from_router)
            near.sendall(_encoded(answer, zlib.crc32))
            welcome = messages.decode(answer)
            assert isinstance(welcome, Welcome)
            from_sender.checksum = frames.checksums()[welcome.checksum]
            threading.Thread(target=_copy, args=(far, near), daemon=True).start()
            while True:
                far.sendall(self._altered(_next(near, from_sender), welcome))

    def _altered(self, frame: Frame, welcome: Welcome) -> bytes:
        checksum = frames.checksums()[welcome.checksum]
        if frame.header.type is Type.BLOCK:
            start = frame.header.block * BLOCK_BYTES
            frame = frame._replace(payload=self._forged[start : start + len(frame.payload)])
        elif frame.header.type is Type.OPERATION:
            operation = messages.decode(frame)
            assert isinstance(operation, Operation)
            operation = dataclasses.replace(operation, manifest=self._manifest(welcome.digest))
            return messages.encode(operation, checksum) + messages.encode(self._deletion(), checksum)
        return _encoded(frame, checksum)

    def _manifest(self, digest: str) -> str:
        starts = range(0, len(self._forged), BLOCK_BYTES)
        blocks = [frames.digests()[digest](self._forged[start : start + BLOCK_BYTES]) for start in starts]
        return hashlib.sha256(b"".join(blocks)).hexdigest()

    def _deletion(self) -> Operation:
        return Operation(os.urandom(16).hex(), 1, "delete", self._victim, int(time.time()) + 60)


def _next(sock: socket.socket, decoder: Decoder) -> Frame:
    """Return the next frame. :raises OSError: the connection ended."""
    while not decoder.has_more:
        data = sock.recv(_PIECE_BYTES)
        if not data:
            raise ConnectionResetError("the connection ended")
        decoder.feed(data)
    for frame in decoder.frames():
        return frame
    return _next(sock, decoder)


def _encoded(frame: Frame, checksum: Checksum) -> bytes:
    kind, payload = frame.header.type, bytes(frame.payload)
    return frames.encode_header(kind, payload, checksum, frame.header.number, frame.header.block) + payload


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
