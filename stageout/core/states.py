"""States of a sandbox in custody, and of each of its files: two tables of states and legal moves. Imports no I/O.

The words are used everywhere: in the ledger, in log events, in the job's ad (StageOutState) and by
``stageout status --node`` and ``--json``. Tables for job owners use :data:`PLAIN` instead.
``docs/explanation/states.svg`` draws the same moves.
"""

from __future__ import annotations

import enum


class State(str, enum.Enum):
    """The state of a sandbox (the handed-off output of one run of a job)."""

    OFFERED = "Offered"
    ACCEPTED = "Accepted"
    CONFIRMED = "Confirmed"
    LEASED = "Leased"
    MOVING = "Moving"
    RETRY_WAIT = "RetryWait"
    HANDED_OVER = "HandedOver"
    DELIVERED = "Delivered"
    RELEASED = "Released"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    SUPERSEDED = "Superseded"
    LOST = "Lost"

    def __str__(self) -> str:
        return self.value


#: The words for job owners.
PLAIN = {
    State.OFFERED: "being handed off",
    State.ACCEPTED: "waiting for confirmation",
    State.CONFIRMED: "waiting for a data slot",
    State.LEASED: "starting to send",
    State.MOVING: "sending",
    State.RETRY_WAIT: "waiting to retry",
    State.HANDED_OVER: "at a router",
    State.DELIVERED: "delivered",
    State.RELEASED: "delivered",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.SUPERSEDED: "replaced by a newer run",
    State.LOST: "lost",
}

_STOPS = frozenset({State.CANCELLED, State.SUPERSEDED, State.LOST})

MOVES: dict[State, frozenset[State]] = {
    State.OFFERED: frozenset({State.ACCEPTED, State.CANCELLED}),
    State.ACCEPTED: frozenset({State.CONFIRMED, State.FAILED}) | _STOPS,
    State.CONFIRMED: frozenset({State.LEASED, State.FAILED}) | _STOPS,
    State.LEASED: frozenset({State.MOVING, State.CONFIRMED, State.FAILED}) | _STOPS,
    State.MOVING: frozenset({State.DELIVERED, State.RETRY_WAIT, State.CONFIRMED, State.HANDED_OVER, State.FAILED})
    | _STOPS,
    State.RETRY_WAIT: frozenset({State.LEASED, State.FAILED}) | _STOPS,
    State.HANDED_OVER: frozenset({State.DELIVERED, State.LEASED, State.FAILED}) | _STOPS,
    State.DELIVERED: frozenset({State.RELEASED}),
    State.RELEASED: frozenset(),
    State.FAILED: frozenset({State.CONFIRMED}) | _STOPS,
    State.CANCELLED: frozenset(),
    State.SUPERSEDED: frozenset(),
    State.LOST: frozenset({State.SUPERSEDED, State.CANCELLED}),
}

#: Nothing more is sent from these; FAILED keeps its bytes until the owner or the retention time lets go of them.
ENDS = frozenset({State.DELIVERED, State.RELEASED, State.FAILED, State.CANCELLED, State.SUPERSEDED, State.LOST})

#: Ends whose bytes are freed at once.
FREED = frozenset({State.DELIVERED, State.RELEASED, State.CANCELLED, State.SUPERSEDED, State.LOST})


class FileState(enum.IntEnum):
    """The state of one file (numbers are stored in the ledger)."""

    WAITING = 0
    MOVING = 1
    DELIVERED = 2
    FAILED = 3
    DROPPED = 4
    HANDED_OVER = 5


#: A new file is WAITING. One that is delivered, dropped or in custody elsewhere stays so.
FILE_MOVES: dict[FileState, frozenset[FileState]] = {
    FileState.WAITING: frozenset({FileState.MOVING, FileState.FAILED, FileState.DROPPED}),
    FileState.MOVING: frozenset(FileState) - {FileState.MOVING},
    FileState.FAILED: frozenset({FileState.WAITING, FileState.DROPPED}),
    FileState.DELIVERED: frozenset(),
    FileState.HANDED_OVER: frozenset(),
    FileState.DROPPED: frozenset(),
}

#: Files that this node still has to deliver. Their bytes are needed.
LEFT_FILES = frozenset({FileState.WAITING, FileState.MOVING, FileState.FAILED})

#: Of these, files that no plugin sends now: they may get another URL, or fresh attempts.
STILL_FILES = frozenset({FileState.WAITING, FileState.FAILED})

#: Files that are where they belong, or with another custodian.
AWAY_FILES = frozenset({FileState.DELIVERED, FileState.HANDED_OVER})


class IllegalMove(Exception):
    """A move that is not in the table: a fault in the program, never of the input."""

    def __init__(self, what: str, old: object, new: object) -> None:
        super().__init__(f"a {what} cannot go from {old} to {new}")


def move(old: State, new: State) -> State:
    """Return ``new`` if the table allows the move from ``old``.

    :raises IllegalMove: otherwise.
    """
    if new not in MOVES[old]:
        raise IllegalMove("sandbox", old, new)
    return new


def move_file(old: FileState, new: FileState) -> FileState:
    """Return ``new`` if the table allows the move of a file from ``old``.

    :raises IllegalMove: otherwise.
    """
    if new not in FILE_MOVES[old]:
        raise IllegalMove("file", old.name, new.name)
    return new


def plain_word(state: str) -> str:
    """Return the word for job owners; a state that is not in the table as it is."""
    return PLAIN[State(state)] if state in PLAIN else state
