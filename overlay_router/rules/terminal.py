"""The terminal's rule for an operation, as a pure decision on what it has stored (section 2, "Terminal rule")."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from overlay_router.rules.states import Op, Outcome, Result

HELD_OPS_LIMIT = 65_536
LATER = "it waits for an operation with a later number: only earlier ones can be waited for"


class Step(enum.Enum):
    """The terminal's next step with an operation."""

    ANSWER = "answer"
    RECORD = "record"
    HOLD = "hold"
    EXECUTE = "execute"
    BUSY = "busy"
    STALE = "stale"


class Verdict(NamedTuple):
    """A step and, for ANSWER (stored already) and RECORD (to be made durable first), the result."""

    step: Step
    result: Result | None = None


@dataclass
class OriginRecord:
    """Durable, per origin: results above the low-water mark and numbers whose cancellation was asked for."""

    low: int = 0
    results: dict[int, Result] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)


def is_final(record: OriginRecord, seq: int) -> bool:
    """Tell whether an operation has its result; at or below the low-water mark it counts as done."""
    return seq <= record.low or seq in record.results


def waits_for_later(seq: int, after: Iterable[int]) -> bool:
    """Tell whether an operation waits for itself or for a later one: two could wait for each other until they
    expire."""
    return any(number >= seq for number in after)


def dependency_failed(record: OriginRecord, op: Op) -> bool:
    """Tell whether one of ``after`` FAILED."""
    return any(seq > record.low and record.results[seq].outcome is Outcome.FAILED for seq in op.after)


def are_new(record: OriginRecord, seqs: Sequence[int], expires: int, now: int) -> bool:
    """Tell whether :func:`judge` would say EXECUTE for all of these (ascending, none waits for another one)."""
    known = record.low >= seqs[0] or not record.results.keys().isdisjoint(seqs)
    return not known and record.cancelled.isdisjoint(seqs) and now <= expires


def judge(record: OriginRecord, op: Op, now: int, held_ops: int = 0) -> Verdict:
    """The terminal rule in its order; names are not looked at before it says EXECUTE.

    Two refinements of the text: an expired operation that has a result is answered with it (else the owner of
    a delivered file would be told EXPIRED), and a cancelled one gets its result only after its own ``after``
    (else an operation behind it would overtake those in front of it).
    """
    stored = record.results.get(op.seq)
    if now > op.expires and stored is None and op.seq > record.low:
        return Verdict(Step.RECORD, Result(Outcome.EXPIRED))
    if op.seq <= record.low:
        return Verdict(Step.STALE)
    if stored is not None:
        return Verdict(Step.ANSWER, stored)
    if waits_for_later(op.seq, op.after):
        return Verdict(Step.RECORD, Result(Outcome.FAILED, LATER))
    if not all(is_final(record, seq) for seq in op.after):
        return Verdict(Step.BUSY if held_ops >= HELD_OPS_LIMIT else Step.HOLD)
    if op.seq in record.cancelled:
        return Verdict(Step.RECORD, Result(Outcome.CANCELLED))
    if dependency_failed(record, op):
        return Verdict(Step.RECORD, Result(Outcome.FAILED, "dependency"))
    return Verdict(Step.EXECUTE)


def raise_low(record: OriginRecord, low: int) -> None:
    """LOW(origin, n): forget results up to n. A late, smaller LOW changes nothing."""
    if low > record.low:
        record.low = low
        record.results = {seq: result for seq, result in record.results.items() if seq > low}
        record.cancelled = {seq for seq in record.cancelled if seq > low}
