"""Connections in TLS: a worker takes it off, or puts it on, and the daemon goes on with a plain socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass

from overlay_router.data.jobs import Job
from overlay_router.data.pool import Pool
from overlay_router.peers.greeting import Unwelcome
from stageout.overlay.tls import CLIENT_HELLO
from stageout.wire.address import split_address

_FIRST_BYTE_S = 10.0
_TLS = bytes([CLIENT_HELLO])
#: Tunnels are nobody's until the key inside is proved.
_NOBODY = "tls"


@dataclass(frozen=True)
class Cover:
    """How a router does TLS.

    :param cert: PEM file, "" for a router without. :param cert_key: "" when the key is in the same file.
    :param insists: senders that do not begin with TLS are refused; routers that pass on what is covered inside are not.
    """

    cert: str = ""
    cert_key: str = ""
    insists: bool = False


class HttpBegins(Exception):
    """An HTTP request came: a worker answers it. :param channel: for its questions. :param raw: the connection."""

    def __init__(self, channel: socket.socket, raw: socket.socket) -> None:
        super().__init__("HTTP")
        self.channel, self.raw = channel, raw


class Wire:
    """A connection as it is to be read now: the socket that was accepted, or the plain one behind TLS.

    :param owned: closes what is made.
    """

    def __init__(self, sock: socket.socket, owned: contextlib.ExitStack) -> None:
        self.sock, self.covered = owned.enter_context(sock), False
        self._owned = owned

    async def uncover(self, cover: Cover, pool: Pool) -> None:
        """Look whether TLS begins here; what was before does not count.

        :raises Unwelcome: there is no certificate. :raises HttpBegins: an HTTP request begins here, or inside TLS.
        """
        self.covered = False
        first = await _first_byte(self.sock)
        if first == _TLS:
            with self._take_off(cover, pool) as raw:
                try:
                    first = await _first_byte(self.sock)
                except BaseException:  # else the worker's thread waits on for the rest of a handshake
                    with contextlib.suppress(OSError):
                        raw.shutdown(socket.SHUT_RDWR)
                    raise
                if first.isupper():  # by the worker, which goes on with the request
                    self.sock.recv(1)
                    raise HttpBegins(self.sock, self._owned.enter_context(_same(raw)))
        elif first.isupper():
            mine, other = self._pair()
            with other:
                pool.give(Job("http", peer=_NOBODY), self.sock, other.fileno())
            raise HttpBegins(mine, self.sock)

    def _take_off(self, cover: Cover, pool: Pool) -> socket.socket:
        """Have a worker take off TLS; the connection itself."""
        if not cover.cert:
            raise Unwelcome("this router has no certificate: connect without TLS, or ask for STAGEOUT_ROUTER_CERT")
        mine, other = self._pair()
        raw = self.sock
        with other:
            pool.give(Job("tls", peer=_NOBODY, cert=cover.cert, cert_key=cover.cert_key), raw, other.fileno())
        self.sock, self.covered = mine, True
        return raw

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        mine, other = socket.socketpair()
        self._owned.enter_context(mine).setblocking(False)
        return mine, other


def _same(raw: socket.socket) -> socket.socket:
    """The same connection. ``dup`` would make it one that does not wait, for the worker as well."""
    return socket.socket(fileno=os.dup(raw.fileno()))


async def begins_with_tls(sock: socket.socket) -> bool:
    """Tell whether TLS comes next; nothing is taken. :raises asyncio.TimeoutError: nothing comes."""
    return await _first_byte(sock) == _TLS


def covered(sock: socket.socket, address: str, ca: str, pool: Pool) -> socket.socket:
    """The plain end of TLS over a connection that was just made, which it owns from now on.

    When there can be no TLS, the plain end hears a REFUSE that says why.

    :param address: of the other side, whose certificate must name its host. :param ca: file of those that are trusted.
    """
    mine, other = socket.socketpair()
    mine.setblocking(False)
    with other, sock:
        pool.give(Job("tls", peer=_NOBODY, cert=ca, host=split_address(address)[0]), sock, other.fileno())
    return mine


async def _first_byte(sock: socket.socket) -> bytes:
    """Return the next bytes without taking them; empty at the end. :raises asyncio.TimeoutError: nothing comes."""
    await asyncio.wait_for(_readable(sock), _FIRST_BYTE_S)
    return sock.recv(1, socket.MSG_PEEK)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(sock, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(sock)
