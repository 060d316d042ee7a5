"""Knowledge of servers gained during a batch. Safe to use from several threads."""

from __future__ import annotations

import enum
import threading

Origin = tuple[str, str, int]

#: The digest for a server of which nothing is known. Grid storage keeps Adler-32; for one that keeps another
#: digest the first file is read again from the page cache.
USUAL_DIGESTS = ("adler32",)


class Habit(enum.Enum):
    """A thing about a server that spares the next file of the batch a request."""

    STATES_NO_DIGESTS = "it was asked for digests, and refused or had none"
    ANSWERS_NO_QUESTIONS = "it did not answer a question about a file in time"
    REFUSES_EXPECT = "it refuses requests that ask before they send"
    SHOWS_COLLECTIONS = "it answers PROPFIND of a collection, so a file that it does not find is not there"


class Servers:
    """Facts by scheme, host and port; they only save work, so forgetting them is harmless."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._habits: dict[tuple[Origin, Habit], bool] = {}
        self._digests: dict[Origin, tuple[str, ...]] = {}
        self._making: dict[Origin, threading.Lock] = {}

    def has(self, origin: Origin, habit: Habit) -> bool | None:
        """Tell whether a server has a habit; None while unknown."""
        with self._lock:
            return self._habits.get((origin, habit))

    def learn(self, origin: Origin, habit: Habit, is_so: bool = True) -> None:
        """Remember it."""
        with self._lock:
            self._habits[origin, habit] = is_so

    def digests(self, origin: Origin) -> tuple[str, ...]:
        """Return the digests to compute while a file is read for this server."""
        with self._lock:
            return self._digests.get(origin, USUAL_DIGESTS)

    def learn_digest(self, origin: Origin, name: str) -> None:
        """Remember that the next files to this server need this digest and no other."""
        with self._lock:
            self._digests[origin] = (name,)

    def making(self, origin: Origin) -> threading.Lock:
        """Return the lock under which one file at a time makes collections there; the others then find them."""
        with self._lock:
            return self._making.setdefault(origin, threading.Lock())
