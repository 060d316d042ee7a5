"""The origin's dependency graph: which earlier operations must be final before one may execute (rule 6).

Everything is a pure function of the operations that are not settled yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stageout.overlay.wire.fields import MAX_AFTER

# MKDIR too: an operation that fails for want of a directory must not succeed because a later MKDIR overtook it.
SUBTREE = ("rename", "delete", "mkdir")


class Step(Protocol):
    """The graph's input about an operation, as an origin or a terminal has it."""

    @property
    def kind(self) -> str:
        """As it travels: "publish", "rename", ..."""

    @property
    def path(self) -> str:
        """The name that it changes."""

    @property
    def target(self) -> str:
        """A RENAME's other name."""

    @property
    def after(self) -> tuple[int, ...]:
        """Numbers that must be final before."""


def touched(op: Step) -> tuple[str, ...]:
    """Names that the operation reads or changes."""
    return (op.path, op.target) if op.kind == "rename" else (op.path,)


def below(path: str, directory: str) -> bool:
    """Tell whether ``path`` lies strictly below ``directory``."""
    return path.startswith(directory + "/")


class _Reach:
    """Names of an operation, with what is above and below them."""

    def __init__(self, op: Step) -> None:
        self._names = touched(op)
        self._above = {path[:at] for path in self._names for at, char in enumerate(path) if char == "/"}
        self._below = tuple(f"{path}/" for path in self._names)
        self._is_tree = op.kind in SUBTREE

    def meets(self, earlier: Step) -> bool:
        """Rule 6: same path; a MKDIR, RENAME or DELETE of a directory, and everything below it, in either order."""
        for path in touched(earlier):
            if path in self._names or (path in self._above and earlier.kind in SUBTREE):
                return True
            if self._is_tree and path.startswith(self._below):
                return True
        return False


def edges(op: Step, unsettled: Mapping[int, Step]) -> tuple[int, ...]:
    """The ``after`` of a new operation: conflicting unsettled ones that no other edge implies (rule 6).

    More than ``MAX_AFTER`` edges do not fit into an operation: see :func:`must_wait`.
    """
    reach = _Reach(op)
    kept: list[int] = []
    implied: set[int] = set()
    for seq in sorted(unsettled, reverse=True):
        earlier = unsettled[seq]
        if seq in implied:
            implied.update(earlier.after)
        elif reach.meets(earlier):
            kept.append(seq)
            implied.update(earlier.after)
    return tuple(reversed(kept))


def must_wait(after: tuple[int, ...]) -> bool:
    """Tell whether the operation has to wait at its origin because its edges do not fit (rule 6)."""
    return len(after) > MAX_AFTER


def low_water(low: int, outcomes: Mapping[int, str], unsettled: Mapping[int, Step]) -> int:
    """The highest LOW that the origin may raise to (terminal rule, last sentence).

    Never past a number that is not settled, nor past a FAILED one with unsettled dependents.
    """
    needed = {seq for op in unsettled.values() for seq in op.after}
    while low + 1 in outcomes:
        if outcomes[low + 1] == "failed" and low + 1 in needed:
            break
        low += 1
    return low
