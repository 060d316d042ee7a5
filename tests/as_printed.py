"""Published algorithms for numbers of streams, exactly as printed. Tests and benchmarks compare with them.

- PROVISION, ADAPT and ADAPTTRANSFERCLIENT: A. Chervenak and others, "Adaptation and Policy-Based Resource Allocation"
  (:mod:`stageout.tuning.policies` has the whole title). Comments give the printed lines.
- Sampling and choice: E. Yildirim (:mod:`stageout.tuning.streams`).

``docs/developer/decisions/0004-printed-and-running.md`` lists their faults, and the versions that run instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Callable, TypeVar

from stageout.core.streams import Knobs
from stageout.tuning.choice import Choice
from stageout.tuning.policies import Limits
from stageout.tuning.streams import NoModelError, best_streams, fit

Job = TypeVar("Job")


def provision_as_printed(streams: int, allocated: int, limits: Limits) -> tuple[int, int]:
    """Run PROVISION, faults included.

    After a maximum was lowered, ``available`` (s_v) is negative and line 17 takes streams away, down to less than none.

    :param streams: streams[t], held by the client. :param allocated: s_a, of all clients of the pair.
    :returns: both, updated.
    """
    available = min(limits.max_client - streams, limits.max_pair - allocated)  # line 03
    if available == 0:  # lines 04-06
        return streams, allocated
    if streams == 0 and available > limits.initial:  # lines 07-10
        return limits.initial, allocated + limits.initial
    if streams > 0 and available > limits.increment:  # lines 11-14
        return streams + limits.increment, allocated + limits.increment
    return streams + available, allocated + available  # lines 15-19


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


def next_level(samples: Mapping[int, float], most: int, slow: float = 0.02) -> int | None:
    """Choose the number of streams to sample next. Return None when sampling is over.

    1, 2, 4, ... until the rate falls, or rises by less than the fraction ``slow``.

    :param samples: streams -> rate so far. :param most: never more streams than this.
    """
    if not samples:
        return 1 if most >= 1 else None
    last = max(samples)
    before = [streams for streams in samples if streams < last]
    if before and samples[last] < samples[max(before)] * (1 + slow):
        return None
    return 2 * last if 2 * last <= most else None


def choose_as_printed(samples: Mapping[int, float]) -> Choice:
    """Return the peak of the printed curve; where no curve fits, the best sample."""
    try:
        model = fit(samples)
    except NoModelError:
        best = max(samples, key=lambda streams: samples[streams])
        return Choice(best, samples[best], "samples")
    streams = best_streams(model, max(samples))
    return Choice(streams, model.rate(streams), "model")
