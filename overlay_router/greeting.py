"""The first frames of a connection: who is there, and which checksum and digest are used from now on."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from overlay_router.keys import Key
from stageout.wire import frames, overlay
from stageout.wire.frames import BadFrame, Checksum, Frame
from stageout.wire.overlay import Hello, Message, Prove, Refuse, Welcome

_TIMEOUT_S = 10.0
T = TypeVar("T")


class Peer(NamedTuple):
    """A peer that has proved its key."""

    node: str
    key: Key
    checksum: str
    digest: str


@dataclass
class Unwelcome(Exception):
    """The peer may not connect; the reason is told to it, with the checksum that it expects."""

    reason: str
    checksum: str = "crc32"

    def __str__(self) -> str:
        return self.reason


async def greet(sock: socket.socket, node: str, keys: Mapping[str, Key]) -> tuple[Peer, Message]:
    """HELLO, WELCOME, PROVE, and the frame behind them, of which nothing further was read.

    :raises Unwelcome: wrong key, clock or choices. :raises BadFrame: not in the protocol.
    :raises OSError: the connection ended or said nothing for 10 s.
    """
    hello = await _receive(sock, Hello, zlib.crc32)
    key = keys.get(hello.key)
    if key is None:
        raise Unwelcome(
            f"no key of the name {hello.key!r} is known here: ask for one, and for its line in the keys file"
        )
    if abs(hello.clock - time.time()) > overlay.MAX_CLOCK_SKEW_S:
        raise Unwelcome("the clocks are more than ten minutes apart: set them (NTP)")
    welcome = Welcome(
        node,
        secrets.token_hex(16),
        _choice(hello.checksums, frames.checksums()),
        _choice(hello.digests, frames.digests()),
        int(time.time()),
    )
    mine = overlay.proof(key.secret, "welcome", hello, welcome)
    answer = replace(welcome, proof=mine)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, overlay.encode(answer, zlib.crc32))
    checksum = frames.checksums()[welcome.checksum]
    proved = await _receive(sock, Prove, checksum)
    if not hmac.compare_digest(proved.proof, overlay.proof(key.secret, "hello", hello, welcome)):
        raise Unwelcome(f"the key {key.name!r} is not the one known here", welcome.checksum)
    first = overlay.decode(await _frame(sock, checksum))
    return Peer(hello.node, key, welcome.checksum, welcome.digest), first


async def introduce(sock: socket.socket, node: str, name: str, secret: bytes) -> Peer:
    """The side that connects: HELLO, the other's proof checked, PROVE.

    :param node: this router. :param name: of the key. :raises BadFrame: not in the protocol, or without the key.
    :raises Unwelcome: the other refuses. :raises OSError: the connection ended or said nothing for 10 s.
    """
    loop = asyncio.get_running_loop()
    hello = Hello(
        node, secrets.token_hex(16), tuple(frames.checksums()), tuple(frames.digests()), int(time.time()), name
    )
    await loop.sock_sendall(sock, overlay.encode(hello, zlib.crc32))
    welcome = overlay.decode(await _frame(sock, zlib.crc32))
    if isinstance(welcome, Refuse):
        raise Unwelcome(welcome.message)
    if not isinstance(welcome, Welcome):
        raise BadFrame(f"{type(welcome).__name__} where Welcome was due")
    if welcome.checksum not in frames.checksums() or welcome.digest not in frames.digests():
        raise BadFrame("the router chose a checksum that was not offered")
    if not hmac.compare_digest(welcome.proof, overlay.proof(secret, "welcome", hello, welcome)):
        raise BadFrame(f"the router does not have the key {name!r}")
    prove = Prove(overlay.proof(secret, "hello", hello, welcome))
    await loop.sock_sendall(sock, overlay.encode(prove, frames.checksums()[welcome.checksum]))
    return Peer(welcome.node, Key(name, secret, "-"), welcome.checksum, welcome.digest)


async def refuse(sock: socket.socket, why: Unwelcome) -> None:
    """Tell a peer why, as far as it still listens."""
    message = overlay.encode(Refuse(why.reason), frames.checksums()[why.checksum])
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, message), _TIMEOUT_S)
    except (OSError, asyncio.TimeoutError):
        return


async def _receive(sock: socket.socket, kind: type[T], checksum: Checksum) -> T:
    message = overlay.decode(await _frame(sock, checksum))
    if not isinstance(message, kind):
        raise BadFrame(f"{type(message).__name__} where {kind.__name__} was due")
    return message


async def _frame(sock: socket.socket, checksum: Checksum) -> Frame:
    """One frame, and not a byte more: what follows belongs to another process, perhaps."""
    header = frames.decode_header(await _exactly(sock, frames.HEADER_BYTES), checksum)
    if header.length_bytes > frames.MAX_GREETING_BYTES:
        raise BadFrame("too much before the connection has a purpose")
    payload = await _exactly(sock, header.length_bytes)
    if checksum(payload) != header.checksum:
        raise BadFrame(f"a {header.type.name} does not fit its checksum")
    return Frame(header, payload)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    loop = asyncio.get_running_loop()
    while len(data) < count:
        part = await asyncio.wait_for(loop.sock_recv(sock, count - len(data)), _TIMEOUT_S)
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return bytes(data)


def _choice(offered: tuple[str, ...], known: Mapping[str, object]) -> str:
    for name in known:
        if name in offered:
            return name
    raise Unwelcome(f"none of {', '.join(offered)} is known here; {', '.join(known)} are")
