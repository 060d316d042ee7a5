"""Policies that divide the streams between one source and one destination among clients.

The reference is the greedy policy of the ADAPT project: Chervenak, Sim, Gu, Schuler and Hirpathak, "Adaptation and
Policy-Based Resource Allocation for Efficient Bulk Data Transfers in High Performance Computing Environments".
Its procedure PROVISION is :func:`greedy` here, without the printed faults. Policies are :data:`Policy` functions: who
asks, who holds what, the limits, and back comes the new number of streams of the asker.

A policy never takes streams away from anybody but the asker. When it wants others to hold less it says so when they
renew, and until then the asker waits: so the sum never passes the maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable


@dataclass(frozen=True)
class Limits:
    """Parameters of a policy for one pair of source and destination, all in streams.

    :param initial: s_i, for a new client. :param increment: s_u, for an update.
    :param max_pair: s_pmax, of all clients together. :param max_client: s_cmax, of one client.
    :param reserved: owner -> streams that only this owner's clients get (:func:`reserved`).
    """

    initial: int
    increment: int
    max_pair: int
    max_client: int
    reserved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """The streams that one client holds or waits for.

    :param client: its name, unique within the pair. :param owner: on whose behalf it works.
    :param streams: counted as its own now; 0 while it waits. :param wanted: more it could not use.
    :param priority: larger comes first (:func:`priority`).
    :param turn: grows with every change between waiting and holding, over all clients: tells who waits longest.
    """

    client: str
    streams: int
    wanted: int
    owner: str = ""
    priority: int = 0
    turn: int = 0


#: (the asker's grant as it is now, all grants of the pair with the asker's among them, limits) -> streams of the asker
Policy = Callable[[Grant, Sequence[Grant], Limits], int]


def available(asker: Grant, grants: Iterable[Grant], limits: Limits) -> int:
    """Count the streams that the asker may get on top of its own: never negative, also after a lowered maximum."""
    total = sum(grant.streams for grant in grants)
    room = min(limits.max_client, asker.wanted) - asker.streams
    return max(0, min(room, limits.max_pair - total))


def greedy(asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
    """Serve who comes first: PROVISION without its faults.

    A client keeps what it has, up to what it wants. After a maximum was lowered, each gives back its part as it renews.
    """
    total = sum(grant.streams for grant in grants)
    kept = max(0, min(asker.streams, limits.max_client, asker.wanted))
    if total > limits.max_pair:
        kept = min(kept, asker.streams * limits.max_pair // total)
    step = limits.increment if asker.streams else limits.initial
    return kept + min(step, available(asker, grants, limits))


def fair_share(asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
    """Give the same to all who want it; the others share what a client does not want.

    With more clients than streams they take turns: who waits longest comes first, who holds longest gives way at its
    next renewal. So nobody starves as long as holders renew or their leases end.
    """
    return _towards(asker, grants, limits, _level(grants, limits.max_pair, limits.max_client))


def priority(asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
    """Give the highest priority all it wants, then the next, equal ones by fair share. The lowest may get nothing."""
    shares: dict[str, int] = {}
    left = limits.max_pair
    for rank in sorted({grant.priority for grant in grants}, reverse=True):
        of_rank = _level([grant for grant in grants if grant.priority == rank], left, limits.max_client)
        left -= sum(of_rank.values())
        shares.update(of_rank)
    return _towards(asker, grants, limits, shares)


def reserved(asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
    """Keep each owner's reservation for its own clients, unused or not, and give all else by fair share.

    Reservations of more than the maximum in sum are cut in the order of the owners' names.
    """
    shares: dict[str, int] = {}
    left = limits.max_pair
    for owner in sorted(limits.reserved):
        own = min(limits.reserved[owner], left)
        left -= own
        shares.update(_level([grant for grant in grants if grant.owner == owner], own, limits.max_client))
    common = _level(grants, left, limits.max_client, shares)
    return _towards(asker, grants, limits, {name: shares.get(name, 0) + more for name, more in common.items()})


def _towards(asker: Grant, grants: Sequence[Grant], limits: Limits, shares: Mapping[str, int]) -> int:
    """Return the asker's share, or as much of it as others have left so far."""
    share = shares[asker.client]
    return min(share, asker.streams + available(asker, grants, limits))


def _level(
    grants: Sequence[Grant], streams: int, max_client: int, already: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Share out: everybody up to the same level, the rest one by one in the order of :func:`_first_served`."""
    had = already or {}
    wants = {grant.client: max(0, min(grant.wanted, max_client) - had.get(grant.client, 0)) for grant in grants}
    level = _highest_level(list(wants.values()), streams)
    shares = {client: min(want, level) for client, want in wants.items()}
    left = streams - sum(shares.values())
    for grant in sorted(grants, key=lambda grant: _first_served(grant, level)):
        if left > 0 and shares[grant.client] < wants[grant.client]:
            shares[grant.client] += 1
            left -= 1
    return shares


def _highest_level(wants: list[int], streams: int) -> int:
    """Find the largest level at which the sum of ``min(want, level)`` is at most ``streams``."""
    left, level = max(0, streams), 0
    for place, want in enumerate(sorted(wants)):
        level = left // (len(wants) - place)
        if want >= level:
            return level
        left -= want
    return max(wants, default=0)


def _first_served(grant: Grant, level: int) -> tuple[int, int, str]:
    """Order the clients for what is left: by turns with less than one stream each, else who has one more keeps it."""
    if level == 0:
        return (0, grant.turn, grant.client) if grant.streams == 0 else (1, -grant.turn, grant.client)
    return (0 if grant.streams > level else 1, grant.turn, grant.client)


BUILT_IN: dict[str, Policy] = {
    "greedy": greedy,
    "fair-share": fair_share,
    "priority": priority,
    "reserved": reserved,
}
