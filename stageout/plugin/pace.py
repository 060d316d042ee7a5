"""The rate of one file's bytes once they moved: without connecting, slow start and the checks at the end."""

from __future__ import annotations

import time

_SPACING_S = 0.1
_MOST_POINTS = 400
_SHORTEST_S = 0.3
_LINE_POINTS = 5
_LEAST = 0.25  # of the bytes: where fewer moved between the points, the rest came at one look and these are its tail
_FROM, _TO = 0.4, 0.9  # of the bytes: behind the slow start, before the first of several streams has ended


class Pace:
    """Points (when, bytes so far) of one file."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._spacing_s = _SPACING_S

    def note(self, moved_bytes: int, now_s: float | None = None) -> None:
        """Note how many bytes have been moved; a number that is not larger than the last one is ignored."""
        now_s = time.monotonic() if now_s is None else now_s
        points = self._points
        if points and (moved_bytes <= points[-1][1] or now_s - points[-1][0] < self._spacing_s):
            return
        points.append((now_s, moved_bytes))
        if len(points) > _MOST_POINTS:
            del points[1::2]
            self._spacing_s *= 2

    def bytes_per_s(self) -> float | None:
        """Compute the rate in the middle of the transfer; None when that was too short a time to tell.

        By the line through all points there: bytes of many streams come in steps, and two points may differ by one.
        """
        if len(self._points) < 2:
            return None
        all_bytes = self._points[-1][1]
        first = next(point for point in self._points if point[1] >= _FROM * all_bytes)
        most = max(point for point in self._points if point == self._points[0] or point[1] <= _TO * all_bytes)
        for last in (most, self._points[-1]):
            if last[0] - first[0] >= _SHORTEST_S and last[1] - first[1] >= _LEAST * all_bytes:
                inside = [point for point in self._points if first[1] <= point[1] <= last[1]]
                whole = last is not most or len(inside) < _LINE_POINTS
                return (last[1] - first[1]) / (last[0] - first[0]) if whole else _slope(inside)
        return None


def _slope(points: list[tuple[float, int]]) -> float:
    """Compute the slope of the line with the least sum of squares."""
    mean_s = sum(at for at, _ in points) / len(points)
    mean = sum(place for _, place in points) / len(points)
    return sum((at - mean_s) * (place - mean) for at, place in points) / sum((at - mean_s) ** 2 for at, _ in points)
