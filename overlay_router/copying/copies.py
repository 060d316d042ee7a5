"""Copies that somebody has commanded: files of this router's tree that it brings to other routers.

The way of a copy, top to bottom: :meth:`Copies.take` makes it the duty of this router; :meth:`Copies.due` says which
are to be carried out; :meth:`Copies.settle` records what the other router answered. Its bytes stay where they are: a
copy whose file was replaced or removed before all of it has left fails. No sockets and no threads: a call returns the
messages to be sent.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from overlay_router.custodians.said import ASKS_S, asked_until, is_overdue
from overlay_router.local.replies import Reply
from overlay_router.local.staging import as_result, recorded
from overlay_router.local.store import SCHEMA, Store
from overlay_router.rules.states import Outcome, Result
from stageout.core import log
from stageout.core.clock import Clock
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Copy, Copying, Operation

LATE = "not copied in time"
_UNKNOWN = f"{LATE}, and whether it is there is not known: the other router was asked, and did not answer"
#: Copies that are not carried out yet: each takes some kB of memory.
MOST_COPIES = 10_000

Key = tuple[str, int]


@dataclass
class Commanded:
    """A copy that is this router's duty. :param sender: who commanded it. :param moved_bytes: of it have left.

    :param reached: the other router may have heard of it. :param problem: why it stands still, with its class.
    :param given_up: how it has failed for good, unless it was made: that is asked. :param until_s: so long, on the
        monotonic clock.
    """

    copy: Copy
    sender: str
    reached: bool = False
    moved_bytes: int = 0
    problem: str = ""
    code: int = 0
    given_up: tuple[str, int] | None = None
    until_s: float = 0.0

    @property
    def key(self) -> Key:
        """Its origin and number."""
        return self.copy.origin, self.copy.seq


class CopyStore(Store):
    """The open database of copies. Each method is one transaction and durable when it returns."""

    table = "copies"
    if_damaged = "It is damaged, and may be removed: whoever commanded a copy commands it again"
    schema = (
        SCHEMA
        + """CREATE TABLE copies (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, copy TEXT NOT NULL, sender TEXT NOT NULL, PRIMARY KEY (origin, seq))
    WITHOUT ROWID;
"""
    )

    def commanded(self) -> list[Commanded]:
        """Those without a result."""
        rows = self._connection.execute("SELECT copy, sender FROM copies").fetchall()
        return [Commanded(Copy(**json.loads(text)), sender, reached=True) for text, sender in rows]

    def take(self, commanded: Commanded) -> None:
        """CUSTODY: durable before it is said."""
        copy = commanded.copy
        with self._transaction("copy-take"):
            self._keep_origin(copy.origin, copy.expires)
            self._connection.execute(
                "INSERT OR REPLACE INTO copies VALUES (?, ?, ?, ?)",
                (*commanded.key, json.dumps(asdict(copy)), commanded.sender),
            )

    def conclude(self, commanded: Commanded, result: Result) -> None:
        """The final result and the end of the duty, in one."""
        copy = commanded.copy
        operation = Operation(copy.origin, copy.seq, "publish", copy.path, copy.expires)
        with self._transaction("copy-settle"):
            self._keep_result(operation, result)
            self._connection.execute("DELETE FROM copies WHERE origin = ? AND seq = ?", commanded.key)
        self.record(copy.origin).results[copy.seq] = result


class Copies:
    """All that were commanded. :param name: of this router, for CUSTODY."""

    def __init__(self, store: CopyStore, name: str, clock: Clock) -> None:
        self._store, self._name, self._clock = store, name, clock
        self._commanded = {one.key: one for one in store.commanded()}
        self.cancelled = {key for key in self._commanded if key[1] in store.record(key[0]).cancelled}

    def take(self, copy: Copy, peer: str) -> list[Reply]:
        """Make it the duty of this router: CUSTODY, or the RESULT that is final."""
        key = (copy.origin, copy.seq)
        if self.knows(*key):
            return self.status(messages.Status(*key), peer)
        if self._clock.wall_s() > copy.expires:
            return [Reply(peer, as_result(*key, Result(Outcome.EXPIRED)))]
        if len(self._commanded) >= MOST_COPIES:
            reason = f"{MOST_COPIES} copies wait here already: ask again later"
            return [Reply(peer, as_result(*key, Result(Outcome.FAILED, reason)))]
        commanded = Commanded(copy, peer)
        self._store.take(commanded)
        self._commanded[key] = commanded
        log.event("copy-accepted", origin=key[0], seq=key[1], source=copy.source, terminal=copy.terminal,
                  path=copy.path, bytes=copy.size_bytes)  # fmt: skip
        return [Reply(peer, messages.Custody(*key, self._name))]

    def knows(self, origin: str, seq: int) -> bool:
        """Tell whether it is, or was, commanded here."""
        return (origin, seq) in self._commanded or recorded(self._store, origin, seq) is not None

    def has(self, commanded: Commanded) -> bool:
        """Tell whether it is still to be carried out."""
        return self._commanded.get(commanded.key) is commanded

    def status(self, ask: messages.Status, peer: str) -> list[Reply]:
        """RESULT; or CUSTODY, and COPYING behind it."""
        final = recorded(self._store, ask.origin, ask.seq)
        if final is not None:
            return [Reply(peer, final)]
        one = self._commanded.get((ask.origin, ask.seq))
        if one is None:
            return [Reply(peer, messages.Result(ask.origin, ask.seq, "unknown"))]
        return [Reply(peer, messages.Custody(*one.key, self._name)), Reply(peer, _copying(one))]

    def cancel(self, ask: messages.Cancel, peer: str) -> list[Reply]:
        """Remember the wish of who commanded it; where the other router may know of it, that is told first."""
        key = (ask.origin, ask.seq)
        one = self._commanded.get(key)
        if one is None or one.sender.partition("/")[0] != peer.partition("/")[0]:
            return self.status(messages.Status(*key), peer)
        self._store.cancel(*key)
        self.cancelled.add(key)
        return []

    def low(self, ask: messages.Low) -> None:
        """Results up to that number may be forgotten; what goes on stays."""
        if not any(origin == ask.origin and seq <= ask.seq for origin, seq in self._commanded):
            self._store.raise_low(ask.origin, ask.seq)

    def due(self) -> list[Commanded]:
        """The copies to carry out, oldest first."""
        return list(self._commanded.values())

    def moved(self, key: Key, moved_bytes: int) -> list[Reply]:
        """So many of its bytes have left; with none of them the other router was reached."""
        one = self._commanded.get(key)
        if one is None:
            return []
        one.reached = True
        one.moved_bytes, one.problem, one.code = moved_bytes, "", 0
        return [Reply(one.sender, _copying(one))]

    def stands(self, key: Key, problem: str, code: int) -> list[Reply]:
        """It stands still and will be tried again. :param code: class of the failure."""
        one = self._commanded.get(key)
        if one is None:
            return []
        one.problem, one.code = problem, code
        log.warn("copy-failed", origin=key[0], seq=key[1], terminal=one.copy.terminal, problem=problem)
        return [Reply(one.sender, _copying(one))]

    def give_up(self, commanded: Commanded, problem: str, code: int) -> None:
        """It has failed for good, as far as is known here; the other router, which may have made it, is asked."""
        if commanded.given_up is None:
            commanded.given_up = problem, code
            commanded.until_s = self._clock.monotonic_s() + ASKS_S

    def is_unanswered(self, commanded: Commanded) -> bool:
        """Tell whether one that was given up was asked about for long enough."""
        return commanded.given_up is not None and self._clock.monotonic_s() > commanded.until_s

    def settle(self, key: Key, result: Result) -> list[Reply]:
        """Record the end, and say it."""
        one = self._commanded.get(key)
        if one is None:
            return []
        self._store.conclude(one, result)
        del self._commanded[key]
        self.cancelled.discard(key)
        say = log.event if result.outcome in (Outcome.DONE, Outcome.CANCELLED) else log.error
        say("copy-ended", origin=key[0], seq=key[1], source=one.copy.source, terminal=one.copy.terminal,
            outcome=result.outcome.value, reason=result.reason)  # fmt: skip
        return [Reply(one.sender, as_result(*key, result))]

    def expire(self, busy: Collection[Key]) -> list[Reply]:
        """End what is beyond its time, not ``busy`` (carried out now) and not asked about.

        Where the other router has heard of a copy, it is asked first whether that was made, for so long. One whose
        clock is wrong may never answer: who carries it out is not waited for without end.
        """
        now = int(self._clock.wall_s())
        late = [
            one
            for key, one in self._commanded.items()
            if self.is_late(one) and (key not in busy or is_overdue(one.copy.expires, "", now))
        ]
        ended = [one for one in late if not one.reached or now > asked_until(one.copy.expires, "")]
        replies = [
            reply
            for one in ended
            for reply in self.settle(one.key, Result(Outcome.EXPIRED, _UNKNOWN if one.reached else LATE))
        ]
        self._store.forget(now)
        return replies

    def is_late(self, commanded: Commanded) -> bool:
        """Tell whether it is beyond its time."""
        return commanded.copy.expires < int(self._clock.wall_s())


def _copying(one: Commanded) -> Copying:
    return Copying(*one.key, one.moved_bytes, one.copy.size_bytes, one.problem[:1000], one.code)
