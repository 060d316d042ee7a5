"""The sender's rules: when bytes may go, how far ``low`` may rise, and what follows ``ask-first``."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from stageout.overlay.rules.operations import Fields, Kind, Row
from stageout.overlay.rules.states import ENDS, SETTLED, State


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
        if same and row.state is State.DONE and not set(row.fields.names).isdisjoint(fields.names):
            return AfterAsking.SUPERSEDED
    if fields.kind is Kind.FILE:
        return AfterAsking.DONE if shown == digest else AfterAsking.REPEAT
    if fields.kind is Kind.MKDIR:
        return AfterAsking.DONE if shown is not None else AfterAsking.REPEAT
    is_gone = shown is None and (fields.kind is Kind.DELETE or shown_second is not None)
    return AfterAsking.DONE if is_gone else AfterAsking.UNKNOWN


def reached(rows: Mapping[int, State], first: int, last: int) -> tuple[bool, list[int]]:
    """Answer a wait from ``first`` to ``last``: whether all are done, and the numbers that this router never saw."""
    unknown = [number for number in range(first, last + 1) if number not in rows]
    return not unknown and all(rows[number] in SETTLED for number in range(first, last + 1)), unknown
