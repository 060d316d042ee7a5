"""States of an operation's row, and the moves between them that a custodian and a terminal may make."""

from __future__ import annotations

import enum
from typing import Mapping  # noqa: UP035  (tables of states import no more than this)


class State(enum.Enum):
    """State of a row in the one table of operations."""

    RECEIVING = "receiving"
    COMPLETE = "complete"
    HELD = "held"
    PUBLISHING = "publishing"
    CUSTODY = "custody"
    DELIVERING = "delivering"
    REFUSED = "refused"
    CANCELLING = "cancelling"
    DONE = "done"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    EXPIRED_UNKNOWN = "expired, outcome unknown"
    LOST = "lost"


class Role(enum.Enum):
    """The part of a router in an operation."""

    CUSTODIAN = "custodian"
    TERMINAL = "terminal"


class IllegalMove(Exception):
    """A row cannot go from its state to another one."""


_S = State
#: Ends that a terminal decides. Nothing follows these.
RESULTS = frozenset({_S.DONE, _S.SUPERSEDED, _S.FAILED, _S.CANCELLED, _S.EXPIRED})
ENDS = RESULTS | {_S.EXPIRED_UNKNOWN, _S.LOST}
#: Dependents of an operation with one of these ends execute; those of the other ends fail.
SETTLED = frozenset({_S.DONE, _S.SUPERSEDED, _S.CANCELLED})
#: A custodian in one of these states has the duty to deliver.
DUTY = frozenset({_S.CUSTODY, _S.DELIVERING, _S.REFUSED, _S.CANCELLING})

MOVES: Mapping[Role, Mapping[State, frozenset[State]]] = {
    Role.TERMINAL: {
        _S.RECEIVING: frozenset({_S.COMPLETE, _S.CANCELLED, _S.EXPIRED, _S.FAILED}),
        _S.COMPLETE: frozenset(
            {_S.RECEIVING, _S.HELD, _S.PUBLISHING, _S.SUPERSEDED, _S.FAILED, _S.CANCELLED, _S.EXPIRED}
        ),
        _S.HELD: frozenset({_S.COMPLETE, _S.PUBLISHING, _S.SUPERSEDED, _S.FAILED, _S.CANCELLED, _S.EXPIRED}),
        # back to complete: death before the system call, or an I/O error that changed nothing
        _S.PUBLISHING: frozenset({_S.DONE, _S.FAILED, _S.COMPLETE}),
    },
    Role.CUSTODIAN: {
        # Without the duty the sender keeps its bytes, and the terminal may get them by another way.
        _S.RECEIVING: frozenset({_S.CUSTODY, _S.CANCELLING, _S.EXPIRED_UNKNOWN, *RESULTS}),
        # Results: a late answer, or another route was first.
        _S.CUSTODY: frozenset({_S.DELIVERING, _S.CANCELLING, _S.EXPIRED_UNKNOWN, _S.LOST, *RESULTS}),
        _S.DELIVERING: frozenset({_S.CUSTODY, _S.REFUSED, _S.CANCELLING, _S.LOST, _S.EXPIRED_UNKNOWN, *RESULTS}),
        _S.REFUSED: frozenset({_S.DELIVERING, _S.CANCELLING, _S.LOST, _S.EXPIRED_UNKNOWN, *RESULTS}),
        _S.CANCELLING: frozenset({_S.EXPIRED_UNKNOWN, *RESULTS}),
        # The owner may cancel a failed file to have its bytes dropped, or send a block again that rotted.
        _S.LOST: frozenset({_S.CUSTODY}),
    },
}


def check_move(role: Role, old: State, new: State) -> None:
    """Check that a row may go from one state to another. :raises IllegalMove: it may not."""
    if old is not new and new not in MOVES[role].get(old, frozenset()):
        raise IllegalMove(f"{role.value}: {old.value} -> {new.value}")
