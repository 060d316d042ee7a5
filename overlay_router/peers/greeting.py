"""The first frames of a connection: who is there, and which checksum and digest are used from now on."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from overlay_router.peers.keys import Key, Keys
from stageout.overlay.tcp import notice_loss
from stageout.overlay.wire import frames, messages, packs
from stageout.overlay.wire.frames import BadFrame, Checksum, Frame
from stageout.overlay.wire.greeting import accept, offer
from stageout.overlay.wire.messages import Hello, Message, Prove, Refuse, Welcome
from stageout.wire.address import split_address

_TIMEOUT_S = 10.0
#: Of what a peer goes on to say to a connection that is refused, so much is read; small messages may be many.
_LAST_BYTES = 64 * frames.MAX_GREETING_BYTES
T = TypeVar("T")


class Peer(NamedTuple):
    """A peer that has proved its key.

    :param nonce: of this router on that connection. :param host: address that it comes from, the last relay's on a
        circuit.
    """

    node: str
    key: Key
    checksum: str
    digest: str
    nonce: str = ""
    host: str = ""


@dataclass
class Unwelcome(Exception):
    """The peer may not connect, or gets no file; it is told why, with the checksum that it expects.

    :param retry_after_s: when it is worth another try; negative: never. :param code: class of the failure, 0: not said.
    """

    reason: str
    checksum: str = "crc32"
    retry_after_s: int = -1
    code: int = 0

    def __str__(self) -> str:
        return self.reason

    def encoded(self) -> bytes:
        """Return what the peer is sent."""
        message = Refuse(self.reason, self.retry_after_s, self.code)
        return messages.encode(message, frames.checksums()[self.checksum])


async def greet(
    sock: socket.socket,
    node: str,
    keys: Keys,
    proved: Callable[[str], None] = lambda key: None,
    store: str = "",
    packed_bytes: int = packs.MAX_TAKEN_BYTES,
) -> tuple[Peer, Message]:
    """HELLO, WELCOME, PROVE, and the frame behind them, of which nothing further was read.

    :param proved: called with the name of the key, before that frame has come.
    :param store: epoch of the store here, "" for none. :param packed_bytes: of a file that is taken in a pack.
    :raises Unwelcome: wrong key, clock or choices. :raises BadFrame: not in the protocol.
    :raises OSError: the connection ended or said nothing for 10 s.
    """
    hello = await _receive(sock, Hello, zlib.crc32)
    key = keys.get(hello.key)
    if key is None:
        raise Unwelcome(keys.unknown(hello.key))
    if abs(hello.clock - time.time()) > messages.MAX_CLOCK_SKEW_S:
        here = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        raise Unwelcome(f"{messages.CLOCKS_APART} (here it is {here} UTC): set the wrong one (NTP)")
    welcome = Welcome(
        node,
        secrets.token_hex(16),
        _choice(hello.checksums, frames.checksums()),
        _choice(hello.digests, frames.digests()),
        int(time.time()),
        store=store,
        cancels=True,
        packs=bool(store),
        parts=bool(store),
        packed_bytes=packed_bytes if store else 0,
    )
    mine = messages.proof(key.secret, "welcome", hello, welcome)
    answer = replace(welcome, proof=mine)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, messages.encode(answer, zlib.crc32))
    checksum = frames.checksums()[welcome.checksum]
    try:
        shown = await _receive(sock, Prove, checksum)
    except ConnectionError:  # who has another secret sees that from our proof, and leaves without a word
        words = f"it left before it proved the key {key.name!r}: it gave up, or its secret is not the one here"
        raise ConnectionResetError(words) from None
    right = messages.proof(key.secret, "hello", hello, welcome)
    if not shown.proof.isascii() or not hmac.compare_digest(shown.proof, right):
        raise Unwelcome(f"the key {key.name!r} is not the one known here", welcome.checksum)
    proved(key.name)
    first = messages.decode(await receive_frame(sock, checksum))
    return Peer(hello.node, key, welcome.checksum, welcome.digest, welcome.nonce), first


async def connect(address: str) -> socket.socket:
    """A connection to a router. :raises OSError: none within 10 s. :raises ValueError: no address."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), _TIMEOUT_S)
    except UnicodeError as problem:
        raise OSError(f"{address}: no host has such a name: {problem}") from None
    for last, (family, kind, protocol, _, place) in enumerate(found, 1 - len(found)):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_loss(sock)
            await asyncio.wait_for(loop.sock_connect(sock, place), _TIMEOUT_S)
            return sock
        except BaseException as problem:
            sock.close()
            if not last or not isinstance(problem, OSError):
                raise
    raise OSError(f"{address} has no address")


async def introduce(sock: socket.socket, node: str, name: str, secret: bytes) -> Peer:
    """The side that connects: HELLO, the other's proof checked, PROVE.

    :param node: this router. :param name: of the key. :raises WrongKey: the other does not have it.
    :raises BadFrame: not in the protocol. :raises Unwelcome: the other refuses.
    :raises OSError: the connection ended or said nothing for 10 s.
    """
    loop = asyncio.get_running_loop()
    hello = offer(node, name)
    await loop.sock_sendall(sock, messages.encode(hello, zlib.crc32))
    welcome = messages.decode(await receive_frame(sock, zlib.crc32))
    if isinstance(welcome, Refuse):
        raise Unwelcome(welcome.message, retry_after_s=welcome.retry_after_s)
    if not isinstance(welcome, Welcome):
        raise BadFrame(f"{type(welcome).__name__} where Welcome was due")
    prove = accept(hello, welcome, secret)
    await loop.sock_sendall(sock, messages.encode(prove, frames.checksums()[welcome.checksum]))
    return Peer(welcome.node, Key(name, secret, "-"), welcome.checksum, welcome.digest)


async def refuse(sock: socket.socket, why: Unwelcome) -> None:
    """Tell a peer why, as far as it still listens."""
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(_last_words(sock, why.encoded()), _TIMEOUT_S)


async def _last_words(sock: socket.socket, message: bytes) -> None:
    """Send them and read what still comes: a connection closed with bytes unread is reset, and the words are lost."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, message)
    sock.shutdown(socket.SHUT_WR)
    left_bytes = _LAST_BYTES
    while left_bytes > 0 and (data := await loop.sock_recv(sock, frames.MAX_GREETING_BYTES)):
        left_bytes -= len(data)


async def _receive(sock: socket.socket, kind: type[T], checksum: Checksum) -> T:
    message = messages.decode(await receive_frame(sock, checksum))
    if not isinstance(message, kind):
        raise BadFrame(f"{type(message).__name__} where {kind.__name__} was due")
    return message


async def receive_frame(sock: socket.socket, checksum: Checksum) -> Frame:
    """One frame, and not a byte more: what follows belongs to another process, perhaps.

    :raises BadFrame: it is damaged, or too much for a connection without a purpose. :raises OSError: it is lost.
    """
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
