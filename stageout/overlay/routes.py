"""What a router knows of the network around it: its links, and the routes that it would take."""

from __future__ import annotations

from stageout.core.errors import ErrorClass
from stageout.overlay.channel import Channel, Gateway
from stageout.wire.fields import KnownRow
from stageout.wire.overlay import Known, Routed, Routes
from stageout.wire.route import Route, address, written

#: More links than any router keeps (256 routers with 32 each).
_MOST_LINKS = 8192


def ask_routes(gateway: Gateway, terminal: str) -> Routed:
    """Routes from a router to a terminal, with reasons.

    :param terminal: ``HOST[:PORT]``. :raises TransferFailure: not reached, or refused. :raises BadRoute: no address.
    """
    with Channel(gateway) as channel:
        channel.send(Routes(written(*address(terminal))))
        answer = channel.receive()
        if not isinstance(answer, Routed):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where ROUTED was due")
        return answer


def relays(gateway: Gateway, answer: Routed) -> tuple[Route, ...]:
    """The routes in use as lists of relays, for a sender: the router that was asked first, the terminal left out."""
    return tuple((gateway.server, *route[:-1]) if route else () for route in answer.routes)


def ask_links(gateway: Gateway) -> list[KnownRow]:
    """All links that a router knows of, in order of their ends. :raises TransferFailure: not reached, or refused."""
    found: list[KnownRow] = []
    with Channel(gateway) as channel:
        while len(found) < _MOST_LINKS:
            channel.send(Routes(first=len(found)))
            answer = channel.receive()
            if not isinstance(answer, Known):
                raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where KNOWN was due")
            found += answer.links
            if not answer.links or len(found) >= answer.total:
                break
    return found
