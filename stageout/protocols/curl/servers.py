"""Cache of facts about servers during a batch. Thread-safe."""

from __future__ import annotations

import enum
import threading

Origin = tuple[str, str, int]

#: The digest for an unknown server. Grid storage keeps Adler-32. For a server with another digest, the first file is
#: read again from the page cache.
USUAL_DIGESTS = ("adler32",)


class Habit(enum.Enum):
    """A fact about a server that saves a request for the next file of the batch."""

    STATES_NO_DIGESTS = "it was asked for digests, and refused or had none"
    ANSWERS_NO_QUESTIONS = "it did not answer a question about a file in time"
    REFUSES_EXPECT = "it refuses requests that ask before they send"
    SHOWS_COLLECTIONS = "it answers PROPFIND of a collection, so a file that it does not find is not there"


class Servers:
    """Facts by scheme, host and port. They only save work, so that losing them is harmless."""

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
        """Store a fact."""
        with self._lock:
            self._habits[origin, habit] = is_so

    def digests(self, origin: Origin) -> tuple[str, ...]:
        """Return the digests to compute while reading a file for this server."""
        with self._lock:
            return self._digests.get(origin, USUAL_DIGESTS)

    def learn_digest(self, origin: Origin, name: str) -> None:
        """Record that the next files for this server need only this digest."""
        with self._lock:
            self._digests[origin] = (name,)

    def making(self, origin: Origin) -> threading.Lock:
        """Return the lock that lets one file at a time create collections, so that the others find them."""
        with self._lock:
            return self._making.setdefault(origin, threading.Lock())
