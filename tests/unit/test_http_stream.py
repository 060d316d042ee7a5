"""A client that is slow with a head or a body is not waited for, in TLS or without it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trustme

from overlay_router.http.stream import Stream, TlsStream, TooSlow
from stageout.core.threads import started
from stageout.overlay.http.heads import Refused
from stageout.overlay.tls import Tunnel

_WINDOW_S, _LEAST_BYTES = 1.0, 6000
_Make = Callable[[], tuple[Stream, socket.socket, Callable[[bytes], bytes]]]


@pytest.fixture(params=["plain", "tls"])
def make(request: pytest.FixtureRequest) -> Iterator[_Make]:
    """A stream with the limit of some bytes in a short time, its client, and what the client sends for some bytes."""
    with contextlib.ExitStack() as stack:

        def connected() -> tuple[socket.socket, socket.socket]:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                client = stack.enter_context(socket.create_connection(listening.getsockname()))
                return stack.enter_context(listening.accept()[0]), client

        def plain() -> tuple[Stream, socket.socket, Callable[[bytes], bytes]]:
            raw, client = connected()
            return Stream(raw, _WINDOW_S, _LEAST_BYTES), client, lambda data: data

        def tls() -> tuple[Stream, socket.socket, Callable[[bytes], bytes]]:
            raw, client = connected()
            authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("host").configure_cert(context)
            trusting, incoming, outgoing = ssl.create_default_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
            authority.configure_trust(trusting)
            mine, tunnel = trusting.wrap_bio(incoming, outgoing, server_hostname="host"), Tunnel(raw, raw, context)
            shaking = started(tunnel.handshake, 20.0)
            while True:
                try:
                    mine.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    client.sendall(outgoing.read())
                    incoming.write(client.recv(65536))
            client.sendall(outgoing.read())
            shaking.join()

            def sealed(data: bytes) -> bytes:
                mine.write(data)
                return outgoing.read()

            return TlsStream(tunnel, b"", _WINDOW_S, _LEAST_BYTES), client, sealed

        yield plain if request.param == "plain" else tls


@contextlib.contextmanager
def _dribbling(client: socket.socket, data: bytes, part_bytes: int, every_s: float = 0.05) -> Iterator[None]:
    """A client that sends a part of its data at a time, until it has all sent."""
    over = threading.Event()

    def dribble() -> None:
        with contextlib.suppress(OSError):
            for start in range(0, len(data), part_bytes):
                client.sendall(data[start : start + part_bytes])
                if over.wait(every_s):
                    return

    thread = started(dribble)
    try:
        yield
    finally:
        over.set()
        thread.join()


def _read(stream: Stream, size_bytes: int) -> int:
    memory, left = memoryview(bytearray(65536)), size_bytes
    while left:
        left -= stream.read_into(memory[:left])
    return size_bytes


def test_a_body_that_comes_too_slowly_ends(make: _Make) -> None:
    """A part of a record of TLS is no excuse."""
    stream, client, sealed = make()
    with _dribbling(client, sealed(bytes(10_000)), 100):
        began_s = time.monotonic()
        with pytest.raises(TooSlow):
            _read(stream, 10_000)
        assert _WINDOW_S <= time.monotonic() - began_s < 3 * _WINDOW_S


def test_a_body_that_does_not_come_ends(make: _Make) -> None:
    stream, client, sealed = make()
    client.sendall(sealed(b"x" * 10))
    with pytest.raises(OSError):
        _read(stream, 10_000)


def test_a_body_that_is_fast_enough_is_waited_for(make: _Make) -> None:
    stream, client, sealed = make()
    data = b"".join(sealed(bytes(1200)) for _ in range(30))
    with _dribbling(client, data, 1300):
        assert _read(stream, 30 * 1200) == 36_000


def test_a_reader_that_takes_nothing_ends(make: _Make) -> None:
    stream, _, _ = make()
    with pytest.raises(OSError):
        for _ in range(1000):
            stream.send(bytes(1 << 20))


def test_a_head_comes_within_its_time(make: _Make) -> None:
    stream, client, sealed = make()
    with _dribbling(client, sealed(b"GET / HTTP/1.1\r\n" + b"X-Pad: 1234567890\r\n" * 50), 5):
        began_s = time.monotonic()
        try:
            assert stream.head(0.5, 0.5) == b""  # in TLS nothing has begun before a record is whole
        except Refused as why:
            assert why.status == 408
        assert 0.4 <= time.monotonic() - began_s < 2
