"""The servers that answer at the address of a router, and are none: the message comes within moments, with the
remedy."""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from overlay_router.peers import greeting
from overlay_router.peers.greeting import Unwelcome, greet, introduce, receive_frame, refuse
from overlay_router.peers.keys import Key
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import channel
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.greeting import WrongKey, offer


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A server that takes connections and says nothing."""
    monkeypatch.setattr(channel, "_GREETING_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Gateway("127.0.0.1", listening.getsockname()[1], "key", b"secret", timeout_s=60)


def test_a_put_to_what_is_no_router_ends_soon(silent: Gateway, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"bytes")
    began_s = time.monotonic()
    with pytest.raises(TransferFailure, match="is it the router's port") as failed:
        put(silent, tmp_path / "source", "name")
    assert failed.value.kind is ErrorClass.CONNECT_FAILED
    assert silent.server in str(failed.value)
    assert time.monotonic() - began_s < 30


def test_with_certificates_too(silent: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    import ssl

    monkeypatch.setattr(channel, "trusting", lambda ca: ssl.create_default_context())
    with pytest.raises(TransferFailure, match="is it the router's port") as failed:
        Channel(replace(silent, ca="any"))
    assert failed.value.kind is ErrorClass.CONNECT_FAILED


def test_who_is_silent_behind_relays_has_the_time_that_these_have() -> None:
    far = Channel.__new__(Channel)
    far.gateway = Gateway("host", 1, "key", b"secret")
    assert [far._patience_s("host:1", relays) for relays in (0, 2, 20)] == [15.0, 35.0, 60.0]


def test_a_router_that_has_answered_before_has_all_the_time_there_is(
    silent: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_answered", {silent.server})
    began_s = time.monotonic()
    with pytest.raises(TransferFailure, match="no router has answered"):
        Channel(replace(silent, timeout_s=0.5))
    assert time.monotonic() - began_s > 0.45


def test_a_router_knows_whose_secret_is_another() -> None:
    """Its log says so: the other side is told by its own program, and its administrator asks."""

    async def meet() -> None:
        here, there = socket.socketpair()
        for end in (here, there):
            end.setblocking(False)
        met = asyncio.ensure_future(greet(here, "gateway", {"site": Key("site", b"ours", "")}))
        with there, pytest.raises(WrongKey):
            await introduce(there, "node", "site", b"theirs")
        with here, pytest.raises(ConnectionError, match=r"the key 'site': .* secret is not the one"):
            await met

    asyncio.run(meet())


def test_who_is_refused_while_he_says_much_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """In however many pieces that comes: a connection that is closed before it was read is reset."""
    monkeypatch.setattr(greeting, "_TIMEOUT_S", 600.0)  # the pieces take as long as the machine lets them

    async def work() -> bytes:
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            far.setblocking(False)
            loop = asyncio.get_running_loop()
            refusing = asyncio.ensure_future(refuse(near, Unwelcome("no", "crc32")))
            for _ in range(200):
                await loop.sock_sendall(far, b"more")
                await asyncio.sleep(0.001)
            assert not refusing.done()
            far.shutdown(socket.SHUT_WR)
            await refusing
            return await loop.sock_recv(far, 1000)

    assert b"no" in asyncio.run(work())


def test_peer_without_the_secret_is_refused() -> None:
    """An attacker does not care whether the router proves the key: it claims to have it, and shows any proof."""

    async def meet() -> None:
        here, there = socket.socketpair()
        for end in (here, there):
            end.setblocking(False)
        loop = asyncio.get_running_loop()
        met = asyncio.ensure_future(greet(here, "gateway", {"site": Key("site", b"ours", "")}))
        with there, here:
            await loop.sock_sendall(there, messages.encode(offer("attacker", "site"), zlib.crc32))
            welcome = messages.decode(await receive_frame(there, zlib.crc32))
            assert isinstance(welcome, messages.Welcome)
            shown = messages.Prove(hmac.new(b"theirs", b"anything", "sha256").hexdigest())
            await loop.sock_sendall(there, messages.encode(shown, frames.checksums()[welcome.checksum]))
            there.shutdown(socket.SHUT_WR)
            with pytest.raises(Unwelcome, match="the key 'site' is not the one known here"):
                await met

    asyncio.run(meet())
