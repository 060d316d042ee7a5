"""The recent use of each owner, so that the owner with the least goes first. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

#: A file costs about as much as so many bytes: a request, an answer and a look at what arrived.
FILE_BYTES = 1024 * 1024
#: After so long (s) half of what was given is forgotten.
HALF_LIFE_S = 600.0


def cost_bytes(files: int, size_bytes: int) -> int:
    """Return the cost of so many files of this size together, in bytes."""
    return size_bytes + files * FILE_BYTES


@dataclass
class Shares:
    """Bytes and files delivered by owner, fading with :data:`HALF_LIFE_S`. Times are monotonic; kept in memory only."""

    _given: dict[str, tuple[float, float]] = field(default_factory=dict)

    def give(self, owner: str, files: int, size_bytes: int, now_s: float) -> None:
        """So much was delivered for an owner."""
        self._given[owner] = (self.of(owner, now_s) + cost_bytes(files, size_bytes), now_s)

    def of(self, owner: str, now_s: float) -> float:
        """Return an owner's use, as far as it still counts, in bytes."""
        given, at_s = self._given.get(owner, (0.0, now_s))
        return float(given * 2.0 ** (-(now_s - at_s) / HALF_LIFE_S))

    def fade(self, now_s: float) -> None:
        """Forget the owners whose share is less than a file."""
        self._given = {
            owner: (self.of(owner, now_s), now_s) for owner in self._given if self.of(owner, now_s) >= FILE_BYTES
        }
