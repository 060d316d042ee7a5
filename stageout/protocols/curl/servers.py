"""Knowledge of servers gained during a batch. Safe to use from several threads."""

from __future__ import annotations

import threading

Origin = tuple[str, str, int]

#: The digest for a server of which nothing is known. Grid storage keeps Adler-32; for one that keeps another
#: digest the first file is read again from the page cache.
USUAL_DIGESTS = ("adler32",)


class Servers:
    """Facts by scheme, host and port; they only save work, so forgetting them is harmless."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moving: dict[Origin, bool] = {}
        self._digests: dict[Origin, tuple[str, ...]] = {}
        self._silent: set[Origin] = set()
        self._confirmed: set[str] = set()
        self._making: dict[Origin, threading.Lock] = {}

    def moves(self, origin: Origin) -> bool | None:
        """Tell whether a WebDAV server can MOVE; None while unknown."""
        with self._lock:
            return self._moving.get(origin)

    def learn_moving(self, origin: Origin, moves: bool) -> None:
        """Remember it."""
        with self._lock:
            self._moving[origin] = moves

    def digests(self, origin: Origin) -> tuple[str, ...]:
        """Return the digests to compute while a file is read for this server."""
        with self._lock:
            return self._digests.get(origin, USUAL_DIGESTS)

    def learn_digest(self, origin: Origin, name: str) -> None:
        """The next files to this server need this digest and no other."""
        with self._lock:
            self._digests[origin] = (name,)

    def silent(self, origin: Origin) -> bool:
        """Tell whether a WebDAV server was asked for the checksums of a file and had none."""
        with self._lock:
            return origin in self._silent

    def learn_silent(self, origin: Origin) -> None:
        """Remember it."""
        with self._lock:
            self._silent.add(origin)

    def confirmed(self, collection: str) -> bool:
        """Tell whether a file was seen under its final name after a rename into this collection."""
        with self._lock:
            return collection in self._confirmed

    def confirm(self, collection: str) -> None:
        """Remember it."""
        with self._lock:
            self._confirmed.add(collection)

    def making(self, origin: Origin) -> threading.Lock:
        """Held while collections are made there: one file at a time, the others then find them."""
        with self._lock:
            return self._making.setdefault(origin, threading.Lock())
