"""How much one peer may have of a router: connections, messages a second. A peer at its limits does not keep others
from being served."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from overlay_router.peers.greeting import Peer, Unwelcome
from stageout.core import log

MOST_STRANGERS = 512
MOST_STRANGERS_OF_ONE = 64
_COMPLAINT_EVERY_S = 3.0
_COMPLAINTS_AT_ONCE = 20
_MATTERS_KEPT = 4096
_AGAIN_S = 5


End = Callable[[], object]


class TooMany(Exception):
    """A limit was reached; the text says which."""


class Allowance:
    """So many messages a second on average. :param at_once: in a burst."""

    def __init__(self, per_s: float, at_once: float, now_s: float | None = None) -> None:
        self._per_s, self._at_once, self._left = per_s, at_once, at_once
        self._counted_s = time.monotonic() if now_s is None else now_s

    def ready(self, now_s: float) -> bool:
        """Tell whether one more would be in time."""
        return self._left + (now_s - self._counted_s) * self._per_s >= 1

    def take(self, now_s: float) -> float:
        """Count one message. How many seconds it comes too early; 0: in time."""
        self._left = min(self._at_once, self._left + (now_s - self._counted_s) * self._per_s) - 1
        self._counted_s = now_s
        return max(0.0, -self._left / self._per_s)


class Complaints:
    """Lines about peers, or files, at most twenty of a kind and peer in a row, and then one every three seconds."""

    def __init__(self) -> None:
        self._allowances: dict[tuple[str, str], Allowance] = {}
        self._unsaid: Counter[tuple[str, str]] = Counter()

    def warn(self, name: str, who: str, **facts: object) -> None:
        """Log it, or count it for the next line."""
        self._say(log.warn, name, who, peer=who, **facts)

    def ended(self, problem: str) -> None:
        """The same of connections that ended before anybody had said who they are."""
        self._say(log.warn, "connection-ended", problem, tid=0, problem=problem)

    def displaced(self, address: str) -> None:
        """The same of silent connections that have ended in favour of others, of whatever addresses."""
        why = "it is silent, and others want its place"
        self._say(log.warn, "limit-reached", why, peer=address, reason=why)

    def damaged(self, path: str, **facts: object) -> None:
        """The same of a published file: who asks for it again and again causes no more lines than others do."""
        self._say(log.error, "published-file-damaged", path, path=path, **facts)

    def _say(self, say: Callable[..., None], name: str, who: str, **facts: object) -> None:
        matter, now_s = (name, who), time.monotonic()
        if len(self._allowances) >= _MATTERS_KEPT:
            self._allowances.clear()
            self._unsaid.clear()
        allowance = self._allowances.setdefault(matter, Allowance(1 / _COMPLAINT_EVERY_S, _COMPLAINTS_AT_ONCE, now_s))
        if not allowance.ready(now_s):
            self._unsaid[matter] += 1
            return
        allowance.take(now_s)
        unsaid = self._unsaid.pop(matter, 0)
        say(name, **facts, **({"more_like_this": unsaid} if unsaid else {}))


class _Open:
    """Connections that are open, by a name, in the order in which they came; each with a call that ends it."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[object, End]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))

    def names(self) -> list[str]:
        """Return the names that have connections."""
        return list(self._ends)

    def count(self, name: str) -> int:
        """Return how many a name has."""
        return len(self._ends.get(name, ()))

    @contextlib.contextmanager
    def one(self, name: str, end: End) -> Iterator[None]:
        """Count a connection while this lasts."""
        mark = object()
        self._ends.setdefault(name, {})[mark] = end
        try:
            yield
        finally:
            self._drop(name, mark)

    def end_all(self, name: str) -> None:
        """End the connections of a name."""
        for mark, end in list(self._ends.get(name, {}).items()):
            self._drop(name, mark)
            end()

    def end_one_of_many(self) -> str:
        """End the oldest connection of the name that has most. Return that name."""
        name = max(self._ends, key=self.count)
        mark, end = next(iter(self._ends[name].items()))
        self._drop(name, mark)
        end()
        return name

    def _drop(self, name: str, mark: object) -> None:
        found = self._ends.get(name, {})
        found.pop(mark, None)
        if not found:
            self._ends.pop(name, None)


@dataclass
class Limits:
    """Connections of this process.

    :param elsewhere: how many connections of a key are with the workers. :param most: of one key.
    :param messages_per_s: on one control connection.
    :param on_displaced: called with the address whose silent connection has ended in favour of another one.
    """

    elsewhere: Callable[[str], int]
    most: int
    messages_per_s: float
    on_displaced: Callable[[str], None] = lambda address: None
    _strangers: _Open = field(default_factory=_Open)
    _idle: _Open = field(default_factory=_Open)
    _known: _Open = field(default_factory=_Open)

    @contextlib.contextmanager
    def stranger(self, host: str, end: End = lambda: None) -> Iterator[Callable[[str], None]]:
        """Count a connection that has not proved a key yet. The call that is given takes the key, once it is proved.

        Each address has places of its own. When all addresses together have too many, the oldest connection of the
        address with most ends: silent ones keep nobody else out.

        :param end: ends the connection.
        :raises TooMany: there are enough of that address; or of that key, which ask for nothing.
        """
        address = _address_of(host)
        if self._strangers.count(address) >= MOST_STRANGERS_OF_ONE:
            raise TooMany(f"{MOST_STRANGERS_OF_ONE} connections of {address} have not said who they are")
        if len(self._strangers) >= MOST_STRANGERS:
            self.on_displaced(self._strangers.end_one_of_many())
        with contextlib.ExitStack() as counted:

            def proved(key: str) -> None:
                if self._idle.count(key) >= max(self.most, MOST_STRANGERS_OF_ONE):
                    raise TooMany(f"{self._idle.count(key)} connections of the key {key!r} ask for nothing")
                counted.close()
                counted.enter_context(self._idle.one(key, end))

            counted.enter_context(self._strangers.one(address, end))
            yield proved

    @contextlib.contextmanager
    def peer(self, key: str, end: End = lambda: None) -> Iterator[None]:
        """Count a connection that has proved a key. :param end: ends it.

        :raises TooMany: there are enough of that key, here and with the workers.
        """
        if self._known.count(key) + self.elsewhere(key) >= self.most:
            raise TooMany(f"the key {key!r} has {self.most} connections; close some, or ask for more (STAGEOUT_ROUTER_"
                          "PEER_CONNECTIONS)")  # fmt: skip
        with self._known.one(key, end):
            yield

    @contextlib.contextmanager
    def of(self, peer: Peer, end: End = lambda: None) -> Iterator[None]:
        """The same for a peer. :raises Unwelcome: there are enough."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.peer(peer.key.name, end))
            except TooMany as reason:
                raise Unwelcome(str(reason), peer.checksum, retry_after_s=_AGAIN_S) from None
            yield

    def keys(self) -> set[str]:
        """Return the names of keys that have connections here."""
        return {*self._idle.names(), *self._known.names()}

    def end(self, key: str) -> None:
        """End all connections of a key."""
        self._idle.end_all(key)
        self._known.end_all(key)

    def allowance(self) -> Allowance:
        """For a new control connection."""
        return Allowance(self.messages_per_s, self.messages_per_s)


def plain(host: str) -> str:
    """The address of a peer as people write it: a socket for both kinds says ``::ffff:192.0.2.1`` of IPv4."""
    mapped = host.rpartition(":")[2]
    return mapped if host == f"::ffff:{mapped}" and "." in mapped else host


def _address_of(host: str) -> str:
    """Return what counts as one address: of IPv6 the network of 64 bits, out of which a host takes any it likes."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv4Address):
        return host
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), 64), strict=False))
