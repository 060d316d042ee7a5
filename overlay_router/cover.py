"""Connections that begin with TLS: a worker takes it off, and the daemon goes on with a plain socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from overlay_router.greeting import Unwelcome
from overlay_router.pool import Pool
from overlay_router.worker import Job
from stageout.core.tls import CLIENT_HELLO

_FIRST_BYTE_S = 10.0
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


class Wire:
    """A connection as it is to be read now: the socket that was accepted, or the plain one behind TLS.

    :param owned: closes what is made.
    """

    def __init__(self, sock: socket.socket, owned: contextlib.ExitStack) -> None:
        self.sock, self.covered = owned.enter_context(sock), False
        self._owned = owned

    async def uncover(self, cover: Cover, pool: Pool) -> None:
        """Look whether TLS begins here. :raises Unwelcome: it does, and there is no certificate."""
        await asyncio.wait_for(_readable(self.sock), _FIRST_BYTE_S)
        if self.sock.recv(1, socket.MSG_PEEK) != bytes([CLIENT_HELLO]):
            return
        if not cover.cert:
            raise Unwelcome("this router has no certificate: connect without TLS, or ask for STAGEOUT_ROUTER_CERT")
        mine, other = socket.socketpair()
        self._owned.enter_context(mine)
        mine.setblocking(False)
        with other, self.sock as raw:
            pool.give(Job("tls", peer=_NOBODY, cert=cover.cert, cert_key=cover.cert_key), raw, other.fileno())
        self.sock, self.covered = mine, True


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(sock, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(sock)
