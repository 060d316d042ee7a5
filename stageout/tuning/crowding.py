"""A controller that looks at what a transfer gets, not only at whether the rate rose or fell.

The printed client (:mod:`stageout.tuning.adaptive`) cannot tell the effect of its own step from anything else: after a
step down the rate falls, so it steps down again, and on a link that is full it stays wherever it was when the rate
stopped changing. This one knows what one transfer reached when it was not in the way of others. ``rate / best`` is the
number of transfers that would carry the present rate on an empty link; the transfers beyond that only wait for each
other. It keeps this excess small: none means that there is room, many mean that the link, the disks or the CPUs are
full, with anybody's transfers. Clients that share a link so come to similar numbers without knowing of each other.

The rate of one transfer is measured at the start, and again from time to time with half of the transfers, and half
again while that makes them faster: a link that became slower for good is not taken for a crowded one. Against noise it
takes the mean of several measurements at one level (more when they differ more), and the more they differ the wider is
the band of no step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stageout.core.streams import Knobs
from stageout.tuning.steps import Step, within_grant

_ROOM = 0.4
_FULL = 1.0
_OLD = 16
_BETTER = 0.1
_WIDEST = 0.15
_MOST_SAMPLES = 4
_QUIET = 0.04


@dataclass(frozen=True)
class Crowding:
    """State of :func:`control`.

    :param best: rate of one transfer that is not in the way of others; 0 before the first measurement.
    :param age: measurements since then. :param testing: ``best`` is being measured anew, with ever fewer transfers
        until that makes no difference. :param before: rate of one transfer at the level before, while testing.
    :param back: level to go back to when the first test makes no difference; 0 for none. :param seen: rate of all
        transfers when the tests began: what the way carries, full or not.
    :param mean: of the rates at this level. :param samples: how many of them.
    :param last: the last of them. :param noise: mean difference of two in succession, as a fraction.
    :param starting: doubling until the link is first seen full.
    """

    concurrency: int = 0
    best: float = 0.0
    age: int = 0
    testing: bool = True
    before: float = 0.0
    back: int = 0
    seen: float = 0.0
    mean: float = 0.0
    samples: int = 0
    last: float = 0.0
    noise: float = 0.0
    starting: bool = True


def begin(concurrency: int) -> Crowding:
    """Make the state to begin with at some number of transfers, such as one that was good before.

    The first measurements are taken there and with half of it, then it goes back if that makes no difference.
    """
    return Crowding(1) if concurrency <= 1 else Crowding(concurrency, age=_OLD, testing=False)


def control(state: Crowding, rate: float, streams: int, knobs: Knobs) -> tuple[Crowding, Step]:
    """Make one step, after every ``knobs.delay`` finished transfers.

    Starts with one transfer: ``knobs.initial`` and ``knobs.threshold`` are the printed client's.

    :param rate: seen since the last step, in any unit; without meaning while nothing is granted.
    :param streams: granted now.
    """
    if streams <= 0:
        return Crowding(), Step(0, knobs.parallelism, "Nothing is granted, so nothing is sent.")
    if state.concurrency == 0:
        _, parallelism = within_grant(1, streams, knobs)
        return Crowding(1), Step(1, parallelism, "Start with 1 to learn what one transfer reaches.")
    state = _measured(state, rate)
    state, wish, reason = _decide(state, knobs)
    concurrency, parallelism = within_grant(wish, streams, knobs)
    if concurrency != wish:
        reason += f" {concurrency} is what the grant of {streams} streams and the limits allow."
    if concurrency != state.concurrency:
        state = replace(state, mean=0.0, samples=0, concurrency=concurrency)
    return state, Step(concurrency, parallelism, reason)


def _measured(state: Crowding, rate: float) -> Crowding:
    noise = state.noise
    if state.samples and state.mean > 0:
        # From one to the next: a level that has changed for good then counts as noise only once.
        noise += (min(1.0, abs(rate - state.last) / state.mean) - noise) / 4
    samples = min(state.samples + 1, _MOST_SAMPLES)
    mean = state.mean + (rate - state.mean) / samples
    return replace(state, mean=mean, samples=samples, last=rate, noise=noise, age=state.age + 1)


def _decide(state: Crowding, knobs: Knobs) -> tuple[Crowding, int, str]:
    here = state.concurrency
    if state.samples < min(_MOST_SAMPLES, 1 + int(state.noise / _QUIET)):
        return state, here, f"Measurements differ by {state.noise:.0%}: one more at {here} before a step."
    each = state.mean / here
    better = each > state.before * (1 + _BETTER + state.noise)
    if here > 1 and (better if state.testing else state.age >= _OLD):
        lower = (here + 1) // 2
        back, seen = (0, state.seen) if state.testing else (here, state.mean)
        state = replace(state, testing=True, before=each, back=back, seen=seen, samples=0)
        return state, lower, f"{here} to {lower} to see what one transfer reaches now."
    back, seen = 0, 0.0
    if state.testing or each > state.best or state.age >= _OLD:
        best = max(each, state.before) if state.testing else each
        back, seen = state.back, state.seen
        state = replace(state, best=best, before=0.0, back=0, seen=0.0, age=0, testing=False)
    if state.best <= 0:
        return state, here, "Nothing has arrived yet: no step."
    if back:
        return state, back, f"One transfer reaches no more among {here} than among {back}: {here} back to {back}."
    carried = seen / state.best
    if carried + _ROOM > here:
        higher = min(knobs.maximum, math.ceil(carried + _ROOM))
        text = f"The way carried what {carried:.1f} transfers would alone: {here} to {higher}."
        return replace(state, starting=False), higher, text
    return _compared(state, knobs)


def _compared(state: Crowding, knobs: Knobs) -> tuple[Crowding, int, str]:
    here, alone = state.concurrency, state.mean / state.best
    band = here * min(_WIDEST, state.noise / math.sqrt(state.samples))
    seen = f"{here} transfers carry what {alone:.1f} would alone"
    if here - alone > _FULL + band:
        lower = max(1, min(here - knobs.increment, math.ceil(alone + _ROOM)))
        return replace(state, starting=False), lower, f"{seen}: the way is full, {here} to {lower}."
    if here - alone < _ROOM + band:
        higher = here + (max(knobs.increment, here) if state.starting else knobs.increment)
        return state, higher, f"{seen}: there is room, {here} to {higher}."
    return replace(state, starting=False), here, f"{seen}: no step."
