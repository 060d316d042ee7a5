"""The adaptive client of the ADAPT project: as printed, and the version that runs.

``client_as_printed`` and ``adapt_as_printed`` are the procedures ADAPTTRANSFERCLIENT (lines 01-16) and ADAPT (lines
20-31) of Chervenak et al. (see :mod:`stageout.tuning.policies`). They are a reference for tests and benchmarks: they
can come to concurrency 0 and stay there for ever, and they do not say what the first measurement is compared with.
:func:`adapt` is ADAPT without these faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Callable, TypeVar

Job = TypeVar("Job")


@dataclass(frozen=True)
class Knobs:
    """Parameters of an adaptive client.

    :param initial: C_i, transfers at the start. :param maximum: C_max, most transfers at once.
    :param parallelism: p, streams per transfer. :param delay: d, finished transfers between two steps.
    :param increment: Delta, transfers per step.
    :param threshold: T, change of the rate that counts, in the unit of the rates.
    """

    initial: int
    maximum: int
    parallelism: int
    delay: int
    increment: int
    threshold: float


@dataclass(frozen=True)
class Step:
    """A controller's decision.

    :param concurrency: transfers at once from now on. :param parallelism: streams of each.
    :param reason: one sentence, for the log and for ``status``.
    """

    concurrency: int
    parallelism: int
    reason: str


def adapt_as_printed(concurrency: int, allocated: int, rate: float, last_rate: float, knobs: Knobs) -> int:
    """Run ADAPT, lines 20-31. :param allocated: c_alloc, the grant in transfers. :returns: c."""
    difference = rate - last_rate  # line 23
    if abs(difference) > knobs.threshold:  # line 24
        if difference < 0:  # lines 25-26
            return max(0, concurrency - knobs.increment)
        return min(concurrency + knobs.increment, allocated, knobs.maximum)  # lines 27-28
    return concurrency  # line 31


def client_as_printed(
    jobs: Sequence[Job], provision: Callable[[], int], knobs: Knobs, last_rate: float
) -> Generator[list[Job], float, None]:
    """Run ADAPTTRANSFERCLIENT, lines 01-16. Yields each F to transfer; send it the rate that was seen.

    At concurrency 0 it yields empty lists for ever.

    :param provision: asks the policy service; returns streams[t].
    :param last_rate: what the first measurement is compared with (not said in print).
    """
    queue = deque(jobs)
    allocated = provision() // knobs.parallelism  # lines 01-03
    concurrency = min(knobs.initial, allocated)  # line 04
    counter = knobs.delay  # line 05
    rate = last_rate
    while queue:  # line 06
        if counter <= 0:  # line 07
            counter = knobs.delay  # line 08
            allocated = provision() // knobs.parallelism  # lines 09-10
            concurrency = adapt_as_printed(concurrency, allocated, rate, last_rate, knobs)  # line 11
            last_rate = rate
        batch = [queue.popleft() for _ in range(min(concurrency, len(queue)))]  # line 13
        rate = yield batch  # line 14
        counter -= concurrency  # line 15


@dataclass(frozen=True)
class Adaptive:
    """State of :func:`adapt`. :param last_rate: None before the first measurement."""

    concurrency: int
    last_rate: float | None = None


def within_grant(concurrency: int, streams: int, knobs: Knobs) -> tuple[int, int]:
    """Choose transfers and streams of each that fit into a grant.

    At least one transfer while there is a stream at all, with fewer streams than ``parallelism`` if need be.

    :param streams: granted.
    """
    if streams <= 0:
        return 0, knobs.parallelism
    parallelism = min(knobs.parallelism, streams)
    return max(1, min(concurrency, streams // parallelism, knobs.maximum)), parallelism


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
