"""All links that a router knows of: signed announcements, whose key an address has, and how much is kept. No I/O.

A router can only describe its own links: an announcement counts when it is signed with the key of its address. The
first key that speaks for an address is believed (the announcement came from routers that proved a shared key), and a
different one only after an hour without the first, or at once when it comes from that address itself, over a
connection that this router has made to it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from overlay_router.routing.routes import MAX_AGE_S, Advert, Graph, Link, LinkState
from stageout.core import signing
from stageout.core.signing import SigningKey
from stageout.overlay.wire.fields import MAX_LINKS, KnownRow
from stageout.overlay.wire.messages import Links

KIND = "OverlayLinks"
MAX_ROUTERS = 256
MAX_FROM_ONE = 128
PIN_S = 3600.0
#: Rates are compared in steps of a tenth: fewer different ones to try, fewer changes for nothing.
_STEP = math.log(1.1)


class Taken(NamedTuple):
    """The outcome of an announcement. :param newer: it is passed on. :param refusal: why it is not believed, or ""."""

    newer: bool
    refusal: str = ""


@dataclass
class _Entry:
    """The last announcement of a router. :param source: neighbour that it came by. :param heard_s: when made."""

    links: Links
    source: str
    heard_s: float


class Book:
    """Announcements of all routers.

    :param address: of this router. :param key: it signs with. :param incarnation: of this start.
    :param max_age_s: after which a silent router counts as gone.
    """

    def __init__(self, address: str, key: SigningKey, incarnation: int, max_age_s: float = MAX_AGE_S) -> None:
        self.address, self.max_age_s = address, max_age_s
        self._key = key
        self._own = Links(address, key.public, incarnation, 0, ())
        self._entries: dict[str, _Entry] = {}
        self._state = LinkState()

    def announce(self, rows: list[tuple[str, int, int]], now_s: float) -> Links:
        """The next announcement of this router's own links. :param rows: to, bytes a second, round trip in us."""
        links = replace(self._own, number=self._own.number + 1, links=tuple(sorted(rows)[:MAX_LINKS]))
        self._own = replace(links, signature=self._key.sign(KIND, _signed_text(links)))
        self._store(self._own, "", now_s)
        return self._own

    def accept(self, links: Links, source: str, now_s: float) -> Taken:
        """Take an announcement that came by a neighbour.

        :param source: address of the neighbour if this router has connected to it, else what names the connection.
        """
        if links.router == self.address:
            return self._of_oneself(links)
        known = self._entries.get(links.router)
        if links.age_ms >= self.max_age_s * 1000 or (known and not self._is_later(links, known)):
            return Taken(False)
        refusal = self._refusal(links, known, source, now_s)
        if not refusal:
            refusal = _unsigned(links)
        if refusal:
            return Taken(False, refusal)
        self._store(links, source, now_s)
        return Taken(True)

    def forwardable(self, now_s: float) -> list[Links]:
        """All announcements that are young enough, with their age, for a new neighbour."""
        return [
            self._aged(entry, now_s) for entry in self._entries.values() if self._age_s(entry, now_s) < self.max_age_s
        ]

    def aged(self, router: str, now_s: float) -> Links:
        """The announcement of a router that was just taken, with its age, to be passed on."""
        return self._aged(self._entries[router], now_s)

    def graph(self, now_s: float) -> Graph:
        """Links of all routers that have not aged out."""
        return self._state.graph(now_s, max_age_s=self.max_age_s)

    def rows(self, now_s: float) -> list[KnownRow]:
        """Every link of the graph, with its age, in order of its ends."""
        alive = (entry for entry in self._entries.values() if self._age_s(entry, now_s) < self.max_age_s)
        return sorted(
            (entry.links.router, to, rate, rtt, int(self._age_s(entry, now_s) * 1000))
            for entry in alive
            for to, rate, rtt in entry.links.links
        )

    def _of_oneself(self, links: Links) -> Taken:
        if links.key != self._own.key:
            return Taken(False, f"another router says that it is {self.address}")
        if (links.incarnation, links.number) > (self._own.incarnation, self._own.number) and not _unsigned(links):
            self._own = replace(self._own, incarnation=links.incarnation, number=links.number)
        return Taken(False)

    def _is_later(self, links: Links, known: _Entry) -> bool:
        if links.key != known.links.key:
            return True
        return (links.incarnation, links.number) > (known.links.incarnation, known.links.number)

    def _refusal(self, links: Links, known: _Entry | None, source: str, now_s: float) -> str:
        if known is None:
            return self._no_room(source, now_s)
        if links.key != known.links.key and source != links.router and now_s - known.heard_s < PIN_S:
            return f"{links.router} has another key, last heard {now_s - known.heard_s:.0f} s ago"
        return ""

    def _no_room(self, source: str, now_s: float) -> str:
        """Return why no further router is taken; the one that has been gone for longest makes room."""
        live = [entry for entry in self._entries.values() if self._age_s(entry, now_s) < self.max_age_s]
        if source and sum(entry.source == source for entry in live) >= MAX_FROM_ONE:
            return f"{MAX_FROM_ONE} routers are known from {source} already"
        if len(self._entries) < MAX_ROUTERS:
            return ""
        if len(live) >= MAX_ROUTERS:
            return f"{MAX_ROUTERS} routers are known already"
        gone = min(self._entries, key=lambda router: self._entries[router].heard_s)
        del self._entries[gone]
        del self._state.adverts[gone]
        return ""

    def _store(self, links: Links, source: str, now_s: float) -> None:
        made_s = now_s - links.age_ms / 1000
        known = self._entries.get(links.router)
        if known and known.links.key != links.key:
            del self._state.adverts[links.router]
        self._entries[links.router] = _Entry(links, source, made_s)
        table = {to: Link(_step(rate), rtt / 2e6) for to, rate, rtt in links.links if to != links.router}
        self._state.accept(Advert(links.router, links.incarnation, links.number, table), made_s)

    def _age_s(self, entry: _Entry, now_s: float) -> float:
        return now_s - entry.heard_s

    def _aged(self, entry: _Entry, now_s: float) -> Links:
        return replace(entry.links, age_ms=max(0, int(self._age_s(entry, now_s) * 1000)))


def _signed_text(links: Links) -> str:
    """The text that a signature covers (docs/developer/wire.md)."""
    return json.dumps([links.router, links.incarnation, links.number, links.links], separators=(",", ":"))


def _unsigned(links: Links) -> str:
    """Return why its signature does not hold, or ""."""
    try:
        signing.check(KIND, _signed_text(links), links.signature, links.key)
    except signing.BadSignature as problem:
        return str(problem)
    return ""


def _step(rate: float) -> float:
    return math.exp(round(math.log(rate) / _STEP) * _STEP) if rate >= 1 else 0.0
