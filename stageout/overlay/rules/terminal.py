"""The terminal's rule for an operation, cancel, epochs and recovery: verdicts on what the terminal has stored."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stageout.overlay.rules.operations import (
    KEPT_S,
    LONGEST_S,
    Fields,
    Hop,
    Identity,
    Kind,
    Row,
    differs,
    is_at_or_below,
)
from stageout.overlay.rules.states import RESULTS, SETTLED, State

#: After an epoch begins, operations that were made up to so many seconds later count as older: clocks differ.
EPOCH_MARGIN_S = 600
OUTCOME_UNKNOWN = "outcome-unknown"
OVERTAKEN = "overtaken"

#: The durable steps of an operation at its terminal, in their order. ``answer`` is the only one that others see.
PUBLISH_STEPS = ("sync", "row", "intent", "high-water", "change", "fsync", "done", "answer")


class Step(enum.Enum):
    """The terminal's next step with an operation."""

    ANSWER = "answer"
    RECORD = "record"
    HOLD = "hold"
    RECEIVE = "receive"
    REFUSE = "refuse"
    ASK_FIRST = "ask-first"
    SETTLED = "settled"
    EXECUTE = "execute"


class Verdict(NamedTuple):
    """A step. RECORD has the end that is made durable before the answer; REFUSE stores nothing."""

    step: Step
    state: State = State.RECEIVING
    reason: str = ""


#: 410. A custodian does not learn which end it was, so it keeps the bytes of a file until ``expires``.
SETTLED_BELOW = Verdict(Step.SETTLED, State.EXPIRED_UNKNOWN, "settled")


@dataclass(frozen=True)
class Known:
    """The terminal's records about an operation's origin and names.

    :param rows: of this owner and origin, by number. :param low: results below it were forgotten. :param marks: rows
        of any owner that changed the same names, and others that ``operations.touches`` names. :param epoch: when the
        terminal's epoch began.
    """

    rows: Mapping[int, Row] = field(default_factory=dict)
    low: int = 0
    marks: tuple[Row, ...] = ()
    epoch: int = 0


class Seen(NamedTuple):
    """State of the tree and of the rights at this moment.

    :param is_whole: all bytes are here, and equal the signed digests. :param denied: why the operation cannot begin now
        (right, space, parent, file in the way); "" if it can. :param holds: the precondition. :param is_foreign: the
        file under the name is not the one that the database knows.
    """

    is_whole: bool = True
    denied: str = ""
    holds: bool = True
    is_foreign: bool = False


def is_older(fields: Fields, epoch: int) -> bool:
    """Tell whether an operation may have run before the terminal's epoch, whose database does not know it."""
    return epoch > 0 and fields.made < epoch + EPOCH_MARGIN_S


def has_result(known: Known, seq: int) -> bool:
    """Tell whether an operation has its own end."""
    row = known.rows.get(seq)
    return row is not None and row.state in RESULTS


def passes_on(row: Row) -> bool:
    """Tell whether dependents wait for the operations for which this one waited."""
    return row.state is State.CANCELLED


def has_ended(known: Known, seq: int) -> bool:
    """Tell whether dependents of an operation may go on.

    A cancelled one passes on its own edges: else its dependents would overtake the operations for which it waited.
    """
    return _all_ended(known, (seq,), 0)


def edges_ended(known: Known, fields: Fields) -> bool:
    """Tell whether all operations have ended for which one waits."""
    return _all_ended(known, fields.after, fields.all_below)


def _all_ended(known: Known, after: Iterable[int], all_below: int) -> bool:
    """Look at each number once: cancelled operations may wait for each other in more ways than there are numbers."""
    looked, low = set[int](), max(known.low, 1)
    below = max(low, all_below)
    waiting = [iter(after), iter(range(low, below))]
    while waiting:
        seq = next(waiting[-1], None)
        if seq is None:
            waiting.pop()
            continue
        if seq < known.low or seq in looked:
            continue
        looked.add(seq)
        if not has_result(known, seq):
            return False
        row = known.rows.get(seq)
        if row is not None and passes_on(row):
            waiting.append(iter(row.fields.after))
            if row.fields.all_below > below:
                waiting.append(iter(range(below, row.fields.all_below)))
                below = row.fields.all_below
    return True


def dependency_failed(known: Known, fields: Fields) -> bool:
    """Tell whether an operation in ``after`` has ended without its effect. ``all_below`` asks for ends only."""
    rows = [known.rows[seq] for seq in fields.after if seq >= known.low and seq in known.rows]
    return any(row.state not in SETTLED for row in rows)


def is_superseded(identity: Identity, hop: Hop, marks: Iterable[Row]) -> bool:
    """Tell whether a later operation of the same origin, or of the same custodian, has changed one of the names."""
    return bool(_later(identity, hop, marks))


def _later(identity: Identity, hop: Hop, marks: Iterable[Row]) -> list[Row]:
    return [
        row
        for row in marks
        if row.state is State.DONE
        and (
            (row.identity[:2] == identity[:2] and row.identity.seq > identity.seq)
            or (hop.custodian != "" and row.hop.custodian == hop.custodian and row.hop[1:3] > hop[1:3])
        )
    ]


def is_overtaken(identity: Identity, fields: Fields, hop: Hop, marks: Iterable[Row]) -> bool:
    """Tell whether a later rename of the file's name, or of a directory above it, came first.

    The file would be under the new name now, and nothing replaced it: it fails, so that its bytes stay.
    """
    return fields.kind is Kind.FILE and any(
        row.fields.kind is Kind.RENAME and is_at_or_below(fields.path, row.fields.path)
        for row in _later(identity, hop, marks)
    )


def judge(identity: Identity, fields: Fields, hop: Hop, known: Known, seen: Seen, now: int) -> Verdict:
    """Apply the terminal rule in its order. Rights of the asker to the row were checked before.

    :raises Differs: the same operation has other fields here.
    """
    row = known.rows.get(fields.seq)
    if row is not None:
        differs(row, fields)
        # Before expiry: the owner of a delivered file would otherwise get "expired".
        if row.state in RESULTS or row.state is State.EXPIRED_UNKNOWN:
            return Verdict(Step.ANSWER, row.state, row.reason)
    if fields.seq < known.low:
        return SETTLED_BELOW
    if now > fields.expires:
        return Verdict(Step.RECORD, State.EXPIRED_UNKNOWN if is_older(fields, known.epoch) else State.EXPIRED)
    if is_older(fields, known.epoch) and hop.known_epoch != known.epoch:
        return Verdict(Step.ASK_FIRST)
    if not edges_ended(known, fields):
        return Verdict(Step.HOLD)
    if dependency_failed(known, fields):
        return Verdict(Step.RECORD, State.FAILED, "dependency")
    if seen.denied:
        return Verdict(Step.REFUSE, State.REFUSED, seen.denied)
    if is_overtaken(identity, fields, hop, known.marks):
        return Verdict(Step.RECORD, State.FAILED, OVERTAKEN)
    if is_superseded(identity, hop, known.marks):
        return Verdict(Step.RECORD, State.SUPERSEDED)
    if seen.is_foreign and is_older(fields, known.epoch):
        return Verdict(Step.RECORD, State.FAILED, OUTCOME_UNKNOWN)
    if not seen.holds:
        return Verdict(Step.RECORD, State.FAILED, "precondition")
    return Verdict(Step.EXECUTE if seen.is_whole else Step.RECEIVE)


def cancel(fields: Fields, known: Known, now: int) -> Verdict:
    """Decide on ``DELETE O`` of the owner or its issuer; it carries the fields, so that edges are passed on.

    An operation that was never seen is recorded too: a late copy finds the record.
    """
    row = known.rows.get(fields.seq)
    if row is not None and (row.state in RESULTS or row.state is State.EXPIRED_UNKNOWN):
        return Verdict(Step.ANSWER, row.state, row.reason)
    if fields.seq < known.low:
        return SETTLED_BELOW
    if is_older(fields, known.epoch):
        # It may have run before the backup was put back.
        return Verdict(Step.RECORD, State.EXPIRED_UNKNOWN, OUTCOME_UNKNOWN)
    return Verdict(Step.RECORD, State.CANCELLED)


def may_forget(row: Row, low: int, now: int) -> bool:
    """Tell whether the terminal may drop a row. Rows that changed a name are marks against older operations.

    Such an older one was made before this one ended, so it has expired after the longest life of an operation.
    """
    if row.state not in RESULTS and row.state is not State.EXPIRED_UNKNOWN:
        return False
    if row.state is State.DONE and (row.hop.custodian or row.identity.seq >= low):
        return now > row.ended + LONGEST_S + KEPT_S
    return row.identity.seq < low or now > row.fields.expires + KEPT_S


def needs_new_epoch(stored_number: int, high_water: int, stored_epoch: int = 0, high_epoch: int = 0) -> bool:
    """Tell whether the database is an old copy: the tree has seen a later epoch, or a higher number in this one.

    :param high_epoch: beside ``high_water``, written before a new epoch serves: the same old copy may come back twice.
    """
    return (stored_epoch, stored_number) < (high_epoch, high_water)


def new_epoch(now: int, older: int) -> int:
    """Return an epoch that is later than an older one, whatever the clock shows."""
    return max(now, older + 1)


def etag(epoch: int, number: int) -> str:
    """Return the ETag of the version that a change published."""
    return f'"{epoch:x}-{number:x}"'


class Found(NamedTuple):
    """Inodes that recovery finds; 0 for no file."""

    staged: int = 0
    path: int = 0
    second: int = 0
    trash: int = 0


def recovered(row: Row, found: Found) -> State:
    """Decide by inode whether an INTENT happened before a death. COMPLETE: it did not, so judge again."""
    moved_to = {Kind.RENAME: found.second, Kind.DELETE: found.trash}.get(row.fields.kind, found.path)
    left_at = found.staged if row.fields.kind in (Kind.FILE, Kind.MKDIR) else found.path
    return State.DONE if moved_to == row.inode or left_at != row.inode else State.COMPLETE
