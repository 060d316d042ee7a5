"""The number of streams to sample next, and the one to take.

The published rule: powers of two until the rate falls or hardly rises, then the peak of the curve through the best
three samples (:mod:`stageout.tuning.streams`). On real links a sample of a few seconds is wrong by a tenth or more. So
the first fall is often none, and a peak may be luck. And the printed curve bends slowly where a link is full, so its
peak lies where nothing is gained any more.

This one goes one level further before it believes a fall. It draws a curve through all samples that rises
with the number of streams and then is full, sharply or softly. It takes the fewest streams that the curve has within a
few percent of its end, and three tenths more where that is at least one. One too many costs little; one too few costs
its part of the rate. Where samples of the same number differ from each other, what they cannot tell apart counts as
equal, and of equals the fewest are taken. The remaining bytes of the budget then go where they decide most: to that
number, to its neighbours and to where the link is full, each time where least has been seen, and to a sample that is
odd; and the curve is drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

WITHIN = 0.03
_MARGIN = 1.3
_DOUBT, _MOST_DOUBT = 0.5, 0.03
_RISE = 0.02
_FALLEN = 0.1
_FULL = 0.03
_NEIGHBOUR = 1.3
_ODD = 0.1
_MOST_CHECKS = 2
_SHARPNESS = (1.0, 1.4, 2.0, 3.0, 5.0, 9.0, 40.0)
_GRID, _ROUNDS = 16, 3


@dataclass(frozen=True)
class Choice:
    """The chosen number of streams.

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
        """Predict the rate."""
        return float(self.full * _shape(streams, self.bend, self.sharpness))


def _shape(streams: float, bend: float, sharpness: float) -> float:
    ratio = bend / streams
    if ratio > 1:  # the same, without overflow
        return math.exp(-math.log1p(ratio**-sharpness) / sharpness) / ratio
    return math.exp(-math.log1p(ratio**sharpness) / sharpness)


def fit_filling(samples: Mapping[int, float], weights: Mapping[int, float] | None = None) -> Filling:
    """Fit the curve with the least sum of squares of relative differences.

    :param samples: streams -> rate above 0; at least one. :param weights: streams -> how much the sample counts, such
        as the bytes that were moved for it; None: all the same.
    """
    parts = {streams: (rate, weights[streams] if weights else 1.0) for streams, rate in samples.items()}
    best: tuple[float, Filling] | None = None
    for sharpness in _SHARPNESS:
        low, high = math.log(0.05), math.log(4.0 * max(samples))
        for _ in range(_ROUNDS):
            found = min(
                _fitted(parts, math.exp(low + (high - low) * step / _GRID), sharpness) for step in range(_GRID + 1)
            )
            middle, width = math.log(found[1]), (high - low) / _GRID
            low, high = middle - width, middle + width
        if best is None or found[0] < best[0] * 0.999:
            best = found[0], Filling(found[2], found[1], sharpness)
    assert best is not None
    return best[1]


def _fitted(samples: Mapping[int, tuple[float, float]], bend: float, sharpness: float) -> tuple[float, float, float]:
    """Sum of squares, bend, and the best height for it, which is a linear problem."""
    parts = [(_shape(streams, bend, sharpness) / rate, weight) for streams, (rate, weight) in samples.items()]
    full = sum(part * weight for part, weight in parts) / sum(part * part * weight for part, weight in parts)
    return sum(weight * (1 - full * part) ** 2 for part, weight in parts), bend, full


def next_sample(samples: Mapping[int, float], most: int, within: float = WITHIN) -> int | None:
    """Choose the number of streams to sample next. Return None when the samples decide.

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
    """Tell whether neither of the last two levels brought more than all before them."""
    levels = sorted(powers)
    if len(levels) < 3:
        return False
    best = max(powers[streams] for streams in levels[:-2])
    return all(powers[streams] < best * (1 + _RISE) for streams in levels[-2:])


def sample_again(samples: Mapping[int, float], weights: Mapping[int, float], spread: float = 0.0) -> int:
    """Choose the number of streams to sample once more, after :func:`next_sample` has said None and bytes are left.

    :param samples: streams -> rate, at least one. :param weights: streams -> bytes moved for it.
    :param spread: as for :func:`choose`.
    """
    answer = choose(samples, weights=weights, spread=spread).streams
    odd = _odd(samples, weights, answer)
    if odd is not None:
        return odd
    good = max(samples.values()) * (1 - _FULL)
    full = max(streams for streams, rate in samples.items() if rate >= good)
    below, above = max(1, int(answer / _NEIGHBOUR)), min(max(samples), math.ceil(answer * _NEIGHBOUR))
    return min((answer, full, below, above), key=lambda streams: weights.get(streams, 0.0))


def _odd(samples: Mapping[int, float], weights: Mapping[int, float], answer: int) -> int | None:
    """Find the sample near the answer or beyond it that the curve explains least, while little was moved for it."""
    curve = fit_filling(samples, weights)
    usual = 1.5 * sorted(weights.values())[len(weights) // 2]
    near = [streams for streams in samples if 2 * streams >= answer and weights[streams] < usual]
    off = {streams: abs(1 - curve.rate(streams) / samples[streams]) for streams in near}
    worst = max(near, key=lambda streams: off[streams], default=None)
    return worst if worst is not None and off[worst] > _ODD else None


def choose(
    samples: Mapping[int, float],
    within: float = WITHIN,
    weights: Mapping[int, float] | None = None,
    margin: float = _MARGIN,
    spread: float = 0.0,
) -> Choice:
    """Choose the fewest streams within a fraction of what a full link brings, by the curve, and add a margin.

    :param samples: streams -> rate; at least one. Points beyond the best one and far below it are left out of the
        curve, which cannot fall. :param weights: as for :func:`fit_filling`. :param margin: factor on the number.
    :param spread: see :func:`spread_of`; 0 where it is not known.
    """
    best = max(samples, key=lambda streams: samples[streams])
    rising = {n: rate for n, rate in samples.items() if n <= best or rate >= (1 - _FALLEN) * samples[best]}
    if len(rising) < 3:
        good = samples[best] * (1 - within)
        enough = min(streams for streams, rate in rising.items() if rate >= good)
        return Choice(enough, samples[enough], "samples")
    curve = fit_filling(rising, weights)
    most = max(rising)
    good = curve.rate(most) * (1 - within - _doubt(rising, weights, spread))
    enough = next(streams for streams in range(1, most + 1) if curve.rate(streams) >= good)
    streams = min(most, int(enough * margin))
    return Choice(streams, curve.rate(streams), "model")


def spread_of(runs: Iterable[tuple[int, float, float]]) -> float:
    """Return the relative variance of the rate between samples of the same number of streams, at weight 1.

    :param runs: streams, rate and weight of each. :returns: 0 where no number was sampled twice.
    """
    by_streams: dict[int, list[tuple[float, float]]] = {}
    for streams, rate, weight in runs:
        by_streams.setdefault(streams, []).append((rate, weight))
    squares, free = 0.0, 0
    for found in by_streams.values():
        mean = sum(rate * weight for rate, weight in found) / sum(weight for _, weight in found)
        squares += sum(weight * (rate / mean - 1) ** 2 for rate, weight in found)
        free += len(found) - 1
    return squares / free if free else 0.0


def _doubt(samples: Mapping[int, float], weights: Mapping[int, float] | None, spread: float) -> float:
    """Estimate how uncertain the difference between the fewest good streams and the others is, as a fraction."""
    good = max(samples.values()) * (1 - _FALLEN)
    near_best = sorted(streams for streams, rate in samples.items() if rate >= good)
    if weights is None or len(near_best) < 2:
        return 0.0
    fewest, others = weights[near_best[0]], sum(weights[streams] for streams in near_best[1:])
    return min(_MOST_DOUBT, _DOUBT * math.sqrt(spread * (1 / fewest + 1 / others)))
