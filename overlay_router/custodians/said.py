"""The statements of a custodian onward, and their meaning when an operation expires.

1. An operation in custody is said to a next hop only when the records that this one has (their epoch) are recorded
   here as those that it may have been said to.
2. So whoever finds a next hop with other records, before or after a restart, looks what is there before saying it.
3. An operation that may have been said, by this custodian or by the other one of two, is not EXPIRED before its next
   hop was asked whether it has happened, for :data:`ASKS_S` on each hop that is left.
4. An end after that says that nobody knows.
5. So it is with an operation whose data were damaged here, and whose sender has freed them: it is LOST at once only
   when it was never said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from overlay_router.custodians.spool import CustodyStore, Held, Key
from overlay_router.rules.states import Release

#: Behind its expiry an operation is asked about for so long. Terminals keep results an hour.
ASKS_S = 900
_MOST_S = 2400
_PROBLEM_CHARS = 300
#: No reasons: nobody knows what is in the way.
NO_PROBLEMS: Mapping[str, str] = MappingProxyType({})
#: Advice about an only copy that its terminal has refused.
KEPT = "it stays here until it expires: fetch it (stageout get --stale-ok), or free the space (stageout ask --cancel)"
LATE = "the custodian could not deliver it in time"
DAMAGED = "the copy in the custodian's spool was damaged"
_UNANSWERED = "and whether it has arrived is not known: its next hop was asked, and did not answer"
UNKNOWN, DAMAGED_UNKNOWN = f"{LATE}, {_UNANSWERED}", f"{DAMAGED}, {_UNANSWERED}"


class Said:
    """By operation, which records of its next hop it may have been said to."""

    def __init__(self, store: CustodyStore) -> None:
        self._store, self._stores = store, store.said()
        #: Since when, on the monotonic clock, what was damaged here is asked about.
        self._damaged_s: dict[Key, float] = {}

    def to(self, key: Key) -> str | None:
        """The epoch of those records, "" where they have none; None: it was never said."""
        return self._stores.get(key)

    def say(self, key: Key, store: str) -> None:
        """It is about to be said to these: durable on return."""
        if self._stores.get(key) != store:
            self._store.say(key, store)
            self._stores[key] = store

    def unsay(self, key: Key) -> None:
        """It was not said after all: durable on return."""
        if key in self._stores:
            self._store.unsay(key)
            self.forget(key)

    def forget(self, key: Key) -> None:
        """It has its end, with which that is recorded."""
        self._stores.pop(key, None)
        self._damaged_s.pop(key, None)

    def is_only_asked(self, held: Held) -> bool:
        """Tell whether its data were damaged here, and nobody has others: what became of it at its next hop counts."""
        return held.damaged and held.release is Release.CUSTODY

    def unanswered(self, held: Iterable[Held], now_s: float) -> list[Key]:
        """Of those, what was asked about for long enough. Where another custodian has it, too, it is until it expires.

        :param now_s: monotonic.
        """
        asked = [one for one in held if self.is_only_asked(one) and one.operation.copies < 2]
        return [one.key for one in asked if now_s - self._damaged_s.setdefault(one.key, now_s) > ASKS_S]

    def may_be_done(self, held: Held) -> bool:
        """Tell whether its terminal may have executed it."""
        return held.key in self._stores or held.operation.copies > 1

    def is_asked_about(self, held: Held, now: float) -> bool:
        """Tell whether it has expired, and is not EXPIRED before it was asked about.

        :param now: Unix time in seconds.
        """
        expires = held.operation.expires
        return expires < now <= asked_until(expires, held.operation.terminal) and self.may_be_done(held)

    def is_over(self, held: Held, now: float, is_busy: bool) -> bool:
        """Tell whether it has expired, and is not asked about.

        :param is_busy: it is being delivered, or asked about.
        """
        expires, terminal = held.operation.expires, held.operation.terminal
        if is_busy:
            return is_overdue(expires, terminal, now)
        return expires < now and not self.is_asked_about(held, now)

    def why_late(self, held: Held, problem: str) -> str:
        """The message for its owner when it expires without an answer. :param problem: why it was not delivered."""
        return because(UNKNOWN if self.may_be_done(held) else LATE, problem)


def because(reason: str, problem: str) -> str:
    """A reason with what was last in the way, where that is known."""
    return f"{reason}: {problem[:_PROBLEM_CHARS]}" if problem else reason


def is_overdue(expires: int, terminal: str, now: float) -> bool:
    """Tell whether nobody waits any longer for who delivers, or asks: a router whose clock is wrong may never
    answer."""
    return now > asked_until(expires, terminal) + ASKS_S


def asked_until(expires: int, terminal: str) -> int:
    """Return how long what expires is asked about; each custodian on the way asks longer than the one behind it."""
    return expires + min(_MOST_S, ASKS_S * (1 + terminal.count(",")))
