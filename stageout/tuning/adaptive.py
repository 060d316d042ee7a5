"""The adaptive client of the ADAPT project.

:func:`adapt` is the procedure ADAPT of Chervenak et al. (see :mod:`stageout.tuning.policies`) without its faults: as
printed it can come to concurrency 0 and stay there for ever, and it does not say what the first measurement is compared
with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stageout.core.streams import Knobs
from stageout.tuning.steps import Step, within_grant


@dataclass(frozen=True)
class Adaptive:
    """State of :func:`adapt`. :param last_rate: None before the first measurement."""

    concurrency: int
    last_rate: float | None = None


def adapt(state: Adaptive, rate: float, streams: int, knobs: Knobs) -> tuple[Adaptive, Step]:
    """Make one step of the running version, after every ``knobs.delay`` finished transfers.

    :param rate: seen since the last step. :param streams: granted now. With none, nothing may run and nothing is
        learnt: the next measurement is a first one again.
    """
    if streams <= 0:
        return Adaptive(0), Step(0, knobs.parallelism, "Nothing is granted, so nothing is sent.")
    if state.concurrency == 0:
        concurrency, parallelism = within_grant(knobs.initial, streams, knobs)
        return Adaptive(concurrency), Step(concurrency, parallelism, f"Start with {concurrency} as granted.")
    wish, reason = _wish(state, rate, knobs)
    concurrency, parallelism = within_grant(wish, streams, knobs)
    if concurrency != wish:
        reason += f" {concurrency} is what the grant of {streams} streams and the limits allow."
    return replace(state, concurrency=concurrency, last_rate=rate), Step(concurrency, parallelism, reason)


def _wish(state: Adaptive, rate: float, knobs: Knobs) -> tuple[int, str]:
    if state.last_rate is None:
        return state.concurrency, f"First measurement ({rate:g}): nothing to compare it with yet."
    change = f"{state.last_rate:g} to {rate:g}"
    if abs(rate - state.last_rate) <= knobs.threshold:
        return state.concurrency, f"The rate went from {change}, less than {knobs.threshold:g}: no step."
    if rate < state.last_rate:
        lower = max(1, state.concurrency - knobs.increment)
        return lower, f"The rate fell from {change}: {state.concurrency} to {lower}."
    higher = state.concurrency + knobs.increment
    return higher, f"The rate rose from {change}: {state.concurrency} to {higher}."
