"""How much one peer may have of a router: connections, messages a second. Whatever it does, others are served."""

from __future__ import annotations

import contextlib
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


class TooMany(Exception):
    """A limit was reached; the text says which."""


class Allowance:
    """So many messages a second on average. :param at_once: in a burst."""

    def __init__(self, per_s: float, at_once: float, now_s: float | None = None) -> None:
        self._per_s, self._at_once, self._left = per_s, at_once, at_once
        self._counted_s = time.monotonic() if now_s is None else now_s

    def ready(self, now_s: float) -> bool:
        """Whether one more would be in time."""
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

    def damaged(self, path: str, **facts: object) -> None:
        """The same of a published file: who asks for it again and again causes no more lines than others do."""
        self._say(log.error, "published-damaged", path, path=path, **facts)

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


@dataclass
class Limits:
    """Connections of this process.

    :param elsewhere: how many connections of a key are with the workers. :param most: of one key.
    :param messages_per_s: on one control connection.
    """

    elsewhere: Callable[[str], int]
    most: int
    messages_per_s: float
    _strangers: Counter[str] = field(default_factory=Counter)
    _idle: Counter[str] = field(default_factory=Counter)
    _known: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def stranger(self, host: str) -> Iterator[Callable[[str], None]]:
        """A connection that has not proved a key yet. What is given is called with the key, once it has.

        :raises TooMany: there are enough, of that host or in all; or of that key, which ask for nothing.
        """
        if self._strangers[host] >= MOST_STRANGERS_OF_ONE:
            raise TooMany(f"{MOST_STRANGERS_OF_ONE} connections of {host} have not said who they are")
        if sum(self._strangers.values()) >= MOST_STRANGERS:
            raise TooMany(f"{MOST_STRANGERS} connections have not said who they are")
        with contextlib.ExitStack() as counted:

            def proved(key: str) -> None:
                if self._idle[key] >= max(self.most, MOST_STRANGERS_OF_ONE):
                    raise TooMany(f"{self._idle[key]} connections of the key {key!r} ask for nothing")
                counted.close()
                counted.enter_context(_counted(self._idle, key))

            counted.enter_context(_counted(self._strangers, host))
            yield proved

    @contextlib.contextmanager
    def peer(self, key: str) -> Iterator[None]:
        """A connection that has proved a key. :raises TooMany: there are enough of it, here and with the workers."""
        if self._known[key] + self.elsewhere(key) >= self.most:
            raise TooMany(f"the key {key!r} has {self.most} connections; close some, or ask for more (STAGEOUT_ROUTER_"
                          "PEER_CONNECTIONS)")  # fmt: skip
        with _counted(self._known, key):
            yield

    @contextlib.contextmanager
    def of(self, peer: Peer) -> Iterator[None]:
        """The same for a peer. :raises Unwelcome: there are enough."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.peer(peer.key.name))
            except TooMany as reason:
                raise Unwelcome(str(reason), peer.checksum, retry_after_s=_AGAIN_S) from None
            yield

    def allowance(self) -> Allowance:
        """For a new control connection."""
        return Allowance(self.messages_per_s, self.messages_per_s)


@contextlib.contextmanager
def _counted(counter: Counter[str], name: str) -> Iterator[None]:
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]
