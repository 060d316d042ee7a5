"""Time that deliveries probably still need, from rates with a spread, and its words. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

#: Cost of a file beside its bytes.
FILE_BYTES = 1_000_000
#: A rate is between its usual value times and divided by exp(this many mean deviations) in about nine of ten cases.
_DEVIATIONS = 2.0
#: Rates are never known better than this.
_LEAST_SPREAD = 0.05
#: A transfer that takes longer than was expected may still take this part of the time that has passed.
_OVERDUE = 0.25
#: Longer estimates say nothing.
MOST_S = 1e8


class Eta(NamedTuple):
    """Seconds until a delivery is probably complete.

    :param high_s: None if something must happen first whose time is not known, such as a server that answers again.
    """

    low_s: float
    high_s: float | None


def work_bytes(files: float, size_bytes: float) -> float:
    """Return the work of some files with some bytes in all, including the cost of each file."""
    return size_bytes + files * FILE_BYTES


def estimate(
    low_bytes: float,
    high_bytes: float,
    rate_bytes_per_s: float,
    spread: float,
    *,
    starts_in_s: float = 0.0,
    passed_s: float = 0.0,
    is_blocked: bool = False,
) -> Eta | None:
    """Return the time until so much work is done; None if no rate is known.

    :param low_bytes: work that is left at least; :param high_bytes: at most. :param spread: mean deviation of the
        natural logarithm of the rate. :param starts_in_s: nothing is sent before. :param passed_s: seconds for which
        the work was already under way, or since it was counted. :param is_blocked: nobody knows when it can go on.
    """
    if rate_bytes_per_s <= 0:
        return None
    factor = math.exp(min(20.0, _DEVIATIONS * max(_LEAST_SPREAD, spread)))
    wait_s, passed_s = max(0.0, starts_in_s), max(0.0, passed_s)
    low_s = wait_s + max(0.0, low_bytes / rate_bytes_per_s / factor - passed_s)
    if is_blocked:
        return Eta(min(MOST_S, low_s), None)
    high_s = wait_s + max(high_bytes / rate_bytes_per_s * factor - passed_s, _OVERDUE * passed_s)
    return Eta(min(MOST_S, low_s), min(MOST_S, max(low_s, high_s)))


def latest(parts: list[Eta | None]) -> Eta | None:
    """Return the time until all parts are done; None if it is not known for one of them, or without parts."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    ends = [part.high_s for part in known]
    high_s = None if None in ends else max(end for end in ends if end is not None)
    return Eta(max(part.low_s for part in known), high_s)


def at_least(parts: Iterable[Eta | None]) -> Eta | None:
    """Return the time until all parts are done. A part whose time is not known leaves no upper limit."""
    every = list(parts)
    found = latest([part for part in every if part is not None])
    return found if found is None or None not in every else Eta(found.low_s, None)


def limits_s(eta: Eta | None) -> tuple[int | None, int | None]:
    """Return the limits in whole seconds; None where they are not known."""
    if eta is None:
        return None, None
    return int(eta.low_s), None if eta.high_s is None else math.ceil(eta.high_s)


def words(low_s: int | None, high_s: int | None) -> str:
    """Return the time until a delivery: ``4-9 min``, ``> 5 min`` without an upper limit, ``-`` when it is not known."""
    if low_s is None or low_s >= MOST_S:
        return "-"
    if high_s is None or high_s >= MOST_S:
        name, unit_s = _time_unit(max(low_s, 100))
        return f"> {max(1, low_s // unit_s)} {name}"
    name, unit_s = _time_unit(high_s)
    low = low_s // unit_s
    high = max(1, -(-high_s // unit_s))
    return f"{low}-{high} {name}" if low < high else f"{high} {name}"


def phrase(low_s: int | None, high_s: int | None) -> str:
    """Return the same in a sentence: ``in 4-9 min``, ``in more than 5 min``, "" when it is not known."""
    text = words(low_s, high_s)
    return "" if text == "-" else f"in {text.replace('> ', 'more than ')}"


def _time_unit(seconds: int) -> tuple[str, int]:
    """Return a unit of time that gives at most three digits for less than a year."""
    units = (("s", 1), ("min", 60), ("h", 3600))
    return next((unit for unit in units if seconds < 100 * unit[1]), ("d", 86400))
