"""A router's view of the network around it: its links, and the routes that it would take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.wire.fields import KnownRow
from stageout.overlay.wire.messages import Known, Routed, Routes
from stageout.overlay.wire.route import MAX_HOPS, Route, address, written

#: More links than any router keeps (256 routers with 32 each).
_MOST_LINKS = 8192
_USED_FOR_S = 15.0
_MOST_ROUTES = 4


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


def found_routes(asked: Sequence[str], end: Gateway) -> tuple[Route, ...]:
    """Routes to a router that other routers, which the sender can reach, know of: at most four that share no relay.

    :param asked: ``HOST:PORT`` of these; they must know the sender's key. Their answers are used for 15 s.
    :raises TransferFailure: none of them can be asked, or none knows a route; the text says why.
    """
    question = (tuple(asked), end.server, end.key_name)
    answer = _answers.get(question)
    if answer is None or time.monotonic() - answer[0] > _USED_FOR_S:
        _answers[question] = answer = (time.monotonic(), _ask_all(asked, end))
    return answer[1]


#: (asked, end, key) -> when (monotonic, s), routes.
_answers: dict[tuple[tuple[str, ...], str, str], tuple[float, tuple[Route, ...]]] = {}


def _ask_all(asked: Sequence[str], end: Gateway) -> tuple[Route, ...]:
    found: list[Route] = []
    used: set[str] = set()
    problems: list[str] = []
    for place in asked:
        host, port = address(place)
        try:
            answer = ask_routes(replace(end, host=host, port=port), end.server)
        except TransferFailure as failure:
            problems.append(str(failure))
            continue
        if not answer.routes:
            problems.append(answer.reason)
        for route in relays(written(host, port), answer):
            if not used & set(route) and len(route) < MAX_HOPS and len(found) < _MOST_ROUTES:
                found.append(route)
                used |= set(route[1:])
        used |= {written(host, port)}
    if not found:
        raise TransferFailure(
            ErrorClass.CONNECT_FAILED, f"no route to {end.server} is known: {'; '.join(problems)}", end.server
        )
    return tuple(found)


def relays(asked: str, answer: Routed) -> tuple[Route, ...]:
    """The routes in use as lists of relays, for a sender: the router that was asked first, the terminal left out."""
    return tuple((asked, *route[:-1]) if route else () for route in answer.routes)


class Network(NamedTuple):
    """Links that a router knows of, in order of their ends. :param router: its own address in them."""

    router: str
    links: list[KnownRow]


def ask_links(gateway: Gateway, route: Route = ()) -> Network:
    """All links that a router knows of. :raises TransferFailure: not reached, or refused."""
    found, router = list[KnownRow](), gateway.server
    with Channel(gateway, route) as channel:
        while len(found) < _MOST_LINKS:
            channel.send(Routes(first=len(found)))
            answer = channel.receive()
            if not isinstance(answer, Known):
                raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where KNOWN was due")
            found += answer.links
            router = answer.router or router
            if not answer.links or len(found) >= answer.total:
                break
    return Network(router, found)


def ask_uplink(gateway: Gateway) -> Known:
    """A router's answer about its uplink, and about some of its links.

    :raises TransferFailure: not reached, or refused.
    """
    with Channel(gateway) as channel:
        channel.send(Routes())
        answer = channel.receive()
        if not isinstance(answer, Known):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where KNOWN was due")
        return answer
