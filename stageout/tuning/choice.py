"""Which number of streams to sample next, and which one to take: as printed, and the version that runs.

As printed (:mod:`stageout.tuning.streams`): powers of two until the rate falls or hardly rises, then the peak of the
curve through the best three samples. On real links a sample of a few seconds is wrong by a tenth or more, so that the
first fall is often none, and a peak is where luck was. And the printed curve bends slowly where a link is full, so its
peak lies where nothing is gained any more.

The running version goes one level further before it believes a fall, draws through all samples a curve that rises with
the number of streams and then is full, sharply or softly, whatever fits, and takes the fewest streams that the curve
has within a few percent of its end. That number is sampled too, and the curve drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stageout.tuning.streams import NoModelError, best_streams, fit

WITHIN = 0.035
_RISE = 0.02
_MOST_CHECKS = 2
_SHARPNESS = (1.0, 1.5, 2.5, 5.0, 40.0)
_GRID, _ROUNDS = 16, 3


@dataclass(frozen=True)
class Choice:
    """What to use.

    :param streams: how many. :param rate: predicted with them, in the unit of the samples.
    :param by: "model" or "samples" (there were too few for a curve).
    """

    streams: int
    rate: float
    by: str


@dataclass(frozen=True)
class Filling:
    """Th(n) = C (1 + (n0 / n)^k)^(-1/k): each stream adds C / n0 until C is reached; the larger k, the sharper.

    With k = 1 it is a link that is shared with n0 flows of others.
    """

    full: float
    bend: float
    sharpness: float

    def rate(self, streams: float) -> float:
        """Predicted rate."""
        return float(self.full * _shape(streams, self.bend, self.sharpness))


def _shape(streams: float, bend: float, sharpness: float) -> float:
    ratio = bend / streams
    if ratio > 1:  # the same, without overflow
        return math.exp(-math.log1p(ratio**-sharpness) / sharpness) / ratio
    return math.exp(-math.log1p(ratio**sharpness) / sharpness)


def fit_filling(samples: Mapping[int, float]) -> Filling:
    """The curve with the least sum of squares of relative differences.

    :param samples: streams -> rate above 0; at least one.
    """
    best: tuple[float, Filling] | None = None
    for sharpness in _SHARPNESS:
        low, high = math.log(0.05), math.log(4.0 * max(samples))
        for _ in range(_ROUNDS):
            found = min(
                _fitted(samples, math.exp(low + (high - low) * step / _GRID), sharpness) for step in range(_GRID + 1)
            )
            middle, width = math.log(found[1]), (high - low) / _GRID
            low, high = middle - width, middle + width
        if best is None or found[0] < best[0] * 0.999:
            best = found[0], Filling(found[2], found[1], sharpness)
    assert best is not None
    return best[1]


def _fitted(samples: Mapping[int, float], bend: float, sharpness: float) -> tuple[float, float, float]:
    """Sum of squares, bend, and the best height for it, which is a linear problem."""
    parts = [_shape(streams, bend, sharpness) / rate for streams, rate in samples.items()]
    full = sum(parts) / sum(part * part for part in parts)
    return sum((1 - full * part) ** 2 for part in parts), bend, full


def next_sample(samples: Mapping[int, float], most: int, within: float = WITHIN) -> int | None:
    """Number of streams to sample next; None when the samples decide.

    :param samples: streams -> rate. :param most: never more streams than this.
    """
    powers = [streams for streams in samples if streams & (streams - 1) == 0 or streams == most]
    if not powers:
        return 1 if most >= 1 else None
    last = max(powers)
    if last < most and not _flat({streams: samples[streams] for streams in powers}):
        return min(2 * last, most)
    answer = choose(samples, within).streams
    checks = len(samples) - len(powers)
    return answer if answer not in samples and checks < _MOST_CHECKS else None


def _flat(powers: Mapping[int, float]) -> bool:
    """Neither of the last two levels brought more than all before them."""
    levels = sorted(powers)
    if len(levels) < 3:
        return False
    best = max(powers[streams] for streams in levels[:-2])
    return all(powers[streams] < best * (1 + _RISE) for streams in levels[-2:])


def choose(samples: Mapping[int, float], within: float = WITHIN) -> Choice:
    """Fewest streams within a fraction of what the most that were sampled bring, by the curve.

    :param samples: at least one.
    """
    if len(samples) < 3:
        good = max(samples.values()) * (1 - within)
        enough = min(streams for streams, rate in samples.items() if rate >= good)
        return Choice(enough, samples[enough], "samples")
    curve = fit_filling(samples)
    good = curve.rate(max(samples)) * (1 - within)
    enough = next(streams for streams in range(1, max(samples) + 1) if curve.rate(streams) >= good)
    return Choice(enough, curve.rate(enough), "model")


def choose_as_printed(samples: Mapping[int, float]) -> Choice:
    """The peak of the printed curve; where no curve fits, the best sample."""
    try:
        model = fit(samples)
    except NoModelError:
        best = max(samples, key=lambda streams: samples[streams])
        return Choice(best, samples[best], "samples")
    streams = best_streams(model, max(samples))
    return Choice(streams, model.rate(streams), "model")
