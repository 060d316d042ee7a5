"""Circuits: a connection that asks for it is connected to the next hop and greeted there; then bytes pass both ways.

Only what the configuration names as a neighbour is ever connected to, so a router is no open proxy; each hop takes one
address off the route, so no circuit runs in a ring. Why a hop could not be reached is told to whoever asked, with the
name of the hop: behind VIA all refusals are checked with CRC-32, so they pass the hops before unchanged.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from overlay_router.peers.greeting import Unwelcome, introduce
from overlay_router.peers.keys import OwnCredential
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.frames import BadFrame
from stageout.overlay.wire.greeting import WrongKey
from stageout.overlay.wire.messages import Via
from stageout.overlay.wire.route import BadRoute, check

_CONNECT_S = 10.0
_AGAIN_S = 5


@dataclass(frozen=True)
class Neighbours:
    """The routers to which this router may pass circuits on.

    :param allowed: addresses in their one form. :param own: what this router shows to them.
    :param finds: routers that are found through the collector are allowed, too.
    """

    allowed: frozenset[str] = frozenset()
    own: OwnCredential = field(default_factory=OwnCredential)
    finds: bool = False


Dial = Callable[[str], Awaitable[socket.socket]]
"""Makes a connection to an address."""


async def onward(node: str, ask: Via, neighbours: Neighbours, dial: Dial) -> socket.socket:
    """A connection to the next hop, greeted with this router's key, that knows the rest of the route.

    :raises Unwelcome: it may not or cannot be made; the text names both routers and says who can mend it.
    """
    hop = ask.route[0]
    try:
        check(ask.route[:-1])
    except BadRoute as problem:
        raise Unwelcome(f"{node}: {problem}") from None
    if hop not in neighbours.allowed:
        raise Unwelcome(
            f"{node} does not pass anything on to {hop}: its administrator can name it in STAGEOUT_ROUTER_NEIGHBOURS"
        )
    try:
        return await asyncio.wait_for(_made(node, ask, neighbours, dial), _CONNECT_S)
    except (OSError, asyncio.TimeoutError, BadFrame) as problem:
        raise Unwelcome(
            f"{node} cannot reach {hop}: {_words(problem)}; is a router running there, and its port open to {node}?",
            retry_after_s=_AGAIN_S,
        ) from None


def _words(problem: Exception) -> str:
    if isinstance(problem, asyncio.TimeoutError):
        return f"no answer within {_CONNECT_S:.0f} s"
    if isinstance(problem, OSError) and problem.errno is not None and problem.errno > 0:
        return os.strerror(problem.errno)
    return str(problem)


async def _made(node: str, ask: Via, neighbours: Neighbours, dial: Dial) -> socket.socket:
    sock = await dial(ask.route[0])
    try:
        await _greet(sock, node, ask, neighbours.own.now.key)
    except BaseException:
        sock.close()
        raise
    return sock


async def _greet(sock: socket.socket, node: str, ask: Via, key: tuple[str, bytes]) -> None:
    loop, hop = asyncio.get_running_loop(), ask.route[0]
    try:
        peer = await introduce(sock, node, *key)
    except WrongKey:
        raise Unwelcome(
            f"{hop} does not have the key {key[0]!r} of {node}: its administrator must give it the same line"
        ) from None
    except Unwelcome as told:
        raise Unwelcome(f"{hop} refuses {node}: {told.reason}", retry_after_s=told.retry_after_s) from None
    await loop.sock_sendall(sock, messages.encode(replace(ask, route=ask.route[1:]), frames.checksums()[peer.checksum]))
