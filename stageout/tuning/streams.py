"""The stream model: how the rate of one transfer depends on its number of parallel streams.

After E. Yildirim, "End-to-end Data-flow Parallelism for GridFTP Throughput Optimization": Th(n) = n / sqrt(a n^c + b),
the three unknowns solved by Newton's iteration from three samples. The model
uses the triple of samples whose curve is nearest to all samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from stageout.core.errors import StageoutError

_NEWTON_STEPS = 60
_C_MOST = 60.0


class NoModelError(StageoutError):
    """The samples do not determine a curve; the text says what to do."""


@dataclass(frozen=True)
class StreamModel:
    """Th(n) = n / sqrt(a n^c + b).

    :param points: the three numbers of streams that it was solved from.
    """

    a: float
    b: float
    c: float
    points: tuple[int, int, int] = (0, 0, 0)

    def rate(self, streams: float) -> float:
        """Predict the rate, in the unit of the samples; infinite where the curve has no value."""
        square = self.a * streams**self.c + self.b
        return streams / math.sqrt(square) if square > 0 else math.inf


def solve(samples: Mapping[int, float]) -> StreamModel:
    """Compute the curve through exactly three samples.

    :raises NoModelError: no curve of this form goes through them.
    """
    (n1, n2, n3) = points = tuple(sorted(samples))
    if n1 < 1 or min(samples.values()) <= 0:
        raise NoModelError("a sample needs at least one stream and a rate above 0: sample again")
    y1, y2, y3 = ((n / samples[n]) ** 2 for n in points)
    if y2 <= y1 or y3 <= y2:
        raise NoModelError(f"no curve through the samples at {points}: sample more levels, or longer")
    c = _exponent(n1, n2, n3, (y3 - y1) / (y2 - y1))
    a = (y2 - y1) / (n2**c - n1**c)
    return StreamModel(a, y1 - a * n1**c, c, (n1, n2, n3))


def _exponent(n1: int, n2: int, n3: int, ratio: float) -> float:
    """Solve (n3^c - n1^c) / (n2^c - n1^c) = ratio for c: Newton's iteration, within a bracket that always holds it."""
    p, q = math.log(n2 / n1), math.log(n3 / n1)

    def wrong_by(c: float) -> float:
        if abs(c) < 1e-9:
            return math.log(q / p) - math.log(ratio)
        return math.log(math.expm1(q * c) / math.expm1(p * c)) - math.log(ratio)

    low, high = -_C_MOST / q, _C_MOST / q
    if wrong_by(low) > 0 or wrong_by(high) < 0:
        raise NoModelError("the rates change too abruptly for a curve: sample again, for longer")
    c = 2.0 if low < 2.0 < high else 0.5 * (low + high)
    for _ in range(_NEWTON_STEPS):
        error = wrong_by(c)
        if abs(error) < 1e-13:
            break
        low, high = (low, c) if error > 0 else (c, high)
        slope = (wrong_by(c + 1e-6) - error) / 1e-6
        guess = c - error / slope if slope > 0 else low
        c = guess if low < guess < high else 0.5 * (low + high)
    return c


def fit(samples: Mapping[int, float]) -> StreamModel:
    """Fit the curve of that triple of samples which is nearest to all samples (least sum of absolute differences).

    :param samples: streams -> rate; at least three.
    :raises NoModelError: there are fewer, or no triple gives a curve.
    """
    found: tuple[float, StreamModel] | None = None
    for points in itertools.combinations(sorted(samples), 3):
        try:
            model = solve({n: samples[n] for n in points})
        except NoModelError:
            continue
        distance = sum(abs(model.rate(n) - rate) for n, rate in samples.items())
        if found is None or distance < found[0]:
            found = distance, model
    if found is None:
        raise NoModelError(f"no curve fits the {len(samples)} samples: sample at least three levels, each for longer")
    return found[1]


def best_streams(model: StreamModel, most: int, within: float = 0.0) -> int:
    """Choose the fewest streams whose predicted rate is at most the fraction ``within`` below the best one.

    :param most: maximum number; use no more than the largest sample, beyond which the curve proves nothing.
    """
    rates = [model.rate(n) for n in range(1, most + 1)]
    good = max(rates) * (1 - within)
    return next(n for n, rate in enumerate(rates, 1) if rate >= good)
