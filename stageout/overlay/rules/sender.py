"""The sender's rules: when bytes may go, how far ``low`` may rise, and what follows ``ask-first``."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stageout.overlay.rules.operations import Fields, Kind, Row, is_at_or_below, touches
from stageout.overlay.rules.states import DUTY, ENDS, SETTLED, State


class AfterAsking(enum.Enum):
    """The next step after the terminal answered ``ask-first`` and the names were looked at."""

    DONE = "done"
    SUPERSEDED = "superseded"
    REPEAT = "repeat"
    UNKNOWN = "outcome-unknown"


def may_free(release: str, copies: int, state: State | None, custodians: int) -> bool:
    """Tell whether a sender may delete its bytes. :param custodians: number of those that answered ``custody``."""
    return state in SETTLED or (release == "custody" and custodians >= copies)


def low(rows: Mapping[int, Row]) -> int:
    """Return the number below which results may be forgotten: all have ended, and no waiting operation needs one."""
    waiting = {number for row in rows.values() if row.state not in ENDS for number in row.fields.after}
    number = 1
    while number in rows and rows[number].state in ENDS and number not in waiting:
        number += 1
    return number


def after_asking(
    fields: Fields, digest: str, shown: str | None, shown_second: str | None, rows: Iterable[Row]
) -> AfterAsking:
    """Decide what the names show. :param shown: digest under the path, None for no file. :param rows: of the party that
    asks: a later one that is done and has one of the names tells that this one is older.
    """
    for row in rows:
        same = row.fields.origin == fields.origin and row.fields.seq > fields.seq
        if same and row.state is State.DONE and touches(row.fields, fields):
            moved_on = row.fields.kind is Kind.RENAME and is_at_or_below(fields.path, row.fields.path)
            return AfterAsking.UNKNOWN if fields.kind is Kind.FILE and moved_on else AfterAsking.SUPERSEDED
    if fields.kind is Kind.FILE:
        return AfterAsking.DONE if shown == digest else AfterAsking.REPEAT
    if fields.kind is Kind.MKDIR:
        return AfterAsking.DONE if shown is not None else AfterAsking.REPEAT
    is_gone = shown is None and (fields.kind is Kind.DELETE or shown_second is not None)
    return AfterAsking.DONE if is_gone else AfterAsking.UNKNOWN


def reached(rows: Mapping[int, State], first: int, last: int, until: str = "done") -> tuple[bool, list[int]]:
    """Answer a wait from ``first`` to ``last``: whether all are done, and the numbers that this router never saw.

    :param until: "done" (push), or "custody" (commit): durable at this router is enough.
    """
    unknown = [number for number in range(first, last + 1) if number not in rows]
    enough = SETTLED | (DUTY - {State.CANCELLING}) if until == "custody" else SETTLED
    return not unknown and all(rows[number] in enough for number in range(first, last + 1)), unknown


class OtherRouter(Exception):
    """Another router answers for a NAME: two hosts share it, or somebody poses as it."""


class Router(NamedTuple):
    """A router, as its client knows it. :param key: that the client pinned, "" if a CA vouches for it."""

    key: str
    epoch: int = 0


def check_router(known: Router, seen: Router) -> Router:
    """Return what the client remembers after an answer. One router's epochs only grow. :raises OtherRouter: stop."""
    if known.key and seen.key != known.key:
        raise OtherRouter("another key answers for the name of this router")
    if seen.epoch < known.epoch:
        raise OtherRouter(
            "an older database answers for the name of this router: two hosts have it, or one was restored"
        )
    return Router(known.key, seen.epoch)
