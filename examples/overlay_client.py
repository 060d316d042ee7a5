"""A client of the overlay made from docs/developer/wire.md and its pages alone: one file to a router and back.

    overlay_client.py put FILE HOST PORT KEYFILE PATH
    overlay_client.py get FILE HOST PORT KEYFILE PATH

It shows the least that a client must do. One that is used would go on after a lost connection (the same OPEN again says
which blocks are there already), and use several connections for the blocks.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

HEADER = struct.Struct(">BBHIQQI")  # behind it stands the checksum of these 28 bytes
BLOCK_BYTES = 1 << 20
HELLO, WELCOME, PROVE, OPEN, OPENED, BLOCK = 1, 2, 5, 10, 11, 12
ATTACH, OPERATION, RESULT, LOW, GET, FOUND = 16, 20, 23, 26, 30, 34


class Connection:
    """A TCP connection on which both sides have proved the key. Its checksum is CRC-32, its digest BLAKE2b."""

    def __init__(self, host: str, port: int, key: str, secret: str) -> None:
        self._socket = socket.create_connection((host, port), 30)
        node, nonce = socket.gethostname(), os.urandom(16).hex()
        self.say(HELLO, node=node, nonce=nonce, checksums=["crc32"], digests=["blake2b-128"],
                 clock=int(time.time()), key=key)  # fmt: skip
        welcome = self.hear(WELCOME)
        chosen = [node, nonce, key, welcome["node"], welcome["nonce"], welcome["checksum"], welcome["digest"]]

        def proof(side: str) -> str:
            return hmac.new(secret.encode(), "\0".join([side, *chosen]).encode(), "sha256").hexdigest()

        if not hmac.compare_digest(proof("welcome"), welcome["proof"]):
            raise SystemExit("the router does not have the key")
        self.say(PROVE, proof=proof("hello"))

    def send(self, kind: int, payload: bytes, number: int = 0, block: int = 0) -> None:
        """One frame."""
        start = HEADER.pack(1, kind, 0, len(payload), number, block, zlib.crc32(payload))
        self._socket.sendall(start + struct.pack(">I", zlib.crc32(start)) + payload)

    def say(self, message: int, **fields: object) -> None:
        """A frame of meta data."""
        text = json.dumps(fields).encode()
        self.send(message, struct.pack(">I", len(text)) + text)

    def receive(self) -> tuple[int, int, bytes]:
        """Type, position of the block, and payload of the next frame."""
        start, check = self._exactly(HEADER.size), self._exactly(4)
        _, kind, _, length, _, block, checksum = HEADER.unpack(start)
        payload = self._exactly(length)
        if struct.unpack(">I", check)[0] != zlib.crc32(start) or checksum != zlib.crc32(payload):
            raise SystemExit("a frame does not fit its checksums")
        return kind, block, payload

    def hear(self, wanted: int) -> dict[str, Any]:
        """The next message of a type; STAGED and others that may come before are left out."""
        while True:
            kind, _, payload = self.receive()
            fields: dict[str, Any] = json.loads(payload[4 : 4 + struct.unpack(">I", payload[:4])[0]])
            if kind == wanted:
                return fields
            if kind in (RESULT, 3, 15, 33):  # REFUSE, NOSPACE, ANSWER
                raise SystemExit(str(fields))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise SystemExit("the router closed the connection: its log says why")
            data += part
        return data


def put(file: Path, peer: tuple[str, int, str, str], path: str) -> int:
    """Send a file; it has its name, and is on the router's disk, on return. Its generation there."""
    size_bytes, digests = file.stat().st_size, []
    origin, expires, blocks = os.urandom(16).hex(), int(time.time()) + 3600, -(-size_bytes // BLOCK_BYTES)
    control = Connection(*peer)
    control.say(OPEN, origin=origin, seq=1, path=path, size_bytes=size_bytes, block_bytes=BLOCK_BYTES, expires=expires)
    tid = control.hear(OPENED)["tid"]
    data = Connection(*peer)
    data.say(ATTACH, tid=tid)
    with file.open("rb") as source:
        for block in range(blocks):
            content = source.read(BLOCK_BYTES)
            digests.append(hashlib.blake2b(content, digest_size=16).digest())
            data.send(BLOCK, content, tid, block)
    manifest = hashlib.sha256(b"".join(digests)).hexdigest()
    control.say(OPERATION, origin=origin, seq=1, kind="publish", path=path, expires=expires, tid=tid,
                size_bytes=size_bytes, blocks=blocks, manifest=manifest, parents=True)  # fmt: skip
    result = control.hear(RESULT)
    if result["outcome"] != "done":
        raise SystemExit(f"{path}: {result['outcome']} {result['reason']}")
    control.say(LOW, origin=origin, seq=1)
    return int(result["generation"])


def get(file: Path, peer: tuple[str, int, str, str], path: str) -> int:
    """Fetch a file, whose generation it returns."""
    connection = Connection(*peer)
    connection.say(GET, path=path)
    found = connection.hear(FOUND)
    with file.open("wb") as target:
        while target.tell() < found["size_bytes"]:
            kind, block, content = connection.receive()
            if kind != BLOCK or block * found["block_bytes"] != target.tell():
                raise SystemExit("something else where a block was due")
            target.write(content)
    return int(found["generation"])


def main() -> None:
    """The command line."""
    action, file, host, port, key_file, path = sys.argv[1:]
    key, secret = Path(key_file).read_text().split()[:2]
    generation = {"put": put, "get": get}[action](Path(file), (host, int(port), key, secret), path)
    print(f"{path}: generation {generation}")


if __name__ == "__main__":
    main()
