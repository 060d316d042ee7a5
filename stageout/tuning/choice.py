"""Which number of streams to sample next, and which one to take: as printed, and the version that runs.

As printed (:mod:`stageout.tuning.streams`): powers of two until the rate falls or hardly rises, then the peak of the
curve through the best three samples. The curve is smooth where links are not: at the point where a link is full it
bends too slowly, and its peak lies where nothing is gained any more. The running version trusts the samples: the fewest
streams that were seen within a few percent of the best rate; between the last number that was too few and the first
that was enough it samples once more, where the answer could otherwise be half again too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stageout.tuning.streams import NoModelError, best_streams, fit, next_level

WITHIN = 0.035
_FAR = 1.5


@dataclass(frozen=True)
class Choice:
    """What to use.

    :param streams: how many. :param rate: predicted with them, in the unit of the samples.
    :param by: "model" (as printed) or "samples".
    """

    streams: int
    rate: float
    by: str


def next_sample(samples: Mapping[int, float], most: int, within: float = WITHIN) -> int | None:
    """Number of streams to sample next; None when the samples decide.

    :param samples: streams -> rate. :param most: never more streams than this.
    """
    level = _next_power(samples, most)
    if level is not None or not samples:
        return level
    enough, too_few = _bracket(samples, within)
    if enough > _FAR * (too_few + 1):
        return (enough + too_few) // 2
    return None


def _next_power(samples: Mapping[int, float], most: int) -> int | None:
    """The printed rule, over the powers of two alone; the limit itself is sampled when the rate still rises there."""
    powers = {streams: rate for streams, rate in samples.items() if streams & (streams - 1) == 0 or streams == most}
    level = next_level(powers, most)
    last = max(powers, default=0)
    if level is None and powers and last < most < 2 * last and next_level(powers, 2 * last) is not None:
        return most
    return level


def _bracket(samples: Mapping[int, float], within: float) -> tuple[int, int]:
    """Fewest streams that were enough, and the most below them that were not (0 for none)."""
    good = max(samples.values()) * (1 - within)
    enough = min(streams for streams, rate in samples.items() if rate >= good)
    return enough, max((streams for streams in samples if streams < enough), default=0)


def choose(samples: Mapping[int, float], within: float = WITHIN) -> Choice:
    """Fewest streams within a fraction of the best rate that was seen.

    :param samples: at least one.
    """
    enough, _ = _bracket(samples, within)
    return Choice(enough, samples[enough], "samples")


def choose_as_printed(samples: Mapping[int, float]) -> Choice:
    """The peak of the fitted curve; where no curve fits, the best sample."""
    try:
        model = fit(samples)
    except NoModelError:
        best = max(samples, key=lambda streams: samples[streams])
        return Choice(best, samples[best], "samples")
    streams = best_streams(model, max(samples))
    return Choice(streams, model.rate(streams), "model")
