"""CONNECT in a worker: the connection is joined to another router, and only bytes pass from then on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from overlay_router.http.asking import Desk
from overlay_router.http.stream import Stream
from stageout.overlay.http.claims import Subject
from stageout.overlay.http.heads import Head, Refused, answer_head
from stageout.overlay.tcp import wait_at_most
from stageout.overlay.wire.route import written
from stageout.wire.address import split_address

_FIRST_S = 60.0
PassOn = Callable[[socket.socket, socket.socket, str, str], None]
"""Passes bytes between two sockets until both directions have ended; with the address of the second, and the owner."""


def relay(stream: Stream, desk: Desk, head: Head, subject: Subject, is_private: bool, pass_on: PassOn) -> None:
    """Answer one CONNECT, and pass bytes on until both sides have ended.

    :param is_private: a token that counts more than once may come here. :raises Refused: nothing was connected.
    """
    hop = _hop(head)
    if not subject.may_relay(hop, is_private):
        raise Refused(403, "the token gives no right to pass on to this address here")
    token = subject.token
    _, descriptor = desk.ask(
        "connect", to=hop, once=bool(subject.relay_to), issuer=token.issuer, token=subject.token_id, made=token.made,
        ends=token.ends,
    )  # fmt: skip
    with socket.socket(fileno=descriptor) as far:
        stream.send(answer_head(200, {}))
        near, early = stream.plain()
        with contextlib.closing(near):
            if early:  # what came behind the head
                wait_at_most(far, _FIRST_S)
                far.sendall(early)
            pass_on(near, far, hop, subject.name)


def _hop(head: Head) -> str:
    try:
        return written(*split_address(head.target))
    except ValueError:
        raise Refused(400, "the target of CONNECT is HOST:PORT") from None
