"""The transfer rate of one file, without connection time, slow start and final verification."""

from __future__ import annotations

import time

_SPACING_S = 0.1
_MOST_POINTS = 400
_SHORTEST_S = 0.3
_LINE_POINTS = 5
# share of the bytes: if fewer moved between the points, most came at one point and these are the last ones
_LEAST = 0.25
_FROM, _TO = 0.4, 0.9  # shares of the bytes: after the slow start, and before the first of several streams has ended


class Pace:
    """Points (time, bytes so far) of one file."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._spacing_s = _SPACING_S

    def note(self, moved_bytes: int, now_s: float | None = None) -> None:
        """Record the number of moved bytes. Ignore a number that is not larger than the last one."""
        now_s = time.monotonic() if now_s is None else now_s
        points = self._points
        if points and (moved_bytes <= points[-1][1] or now_s - points[-1][0] < self._spacing_s):
            return
        points.append((now_s, moved_bytes))
        if len(points) > _MOST_POINTS:
            del points[1::2]
            self._spacing_s *= 2

    def bytes_per_s(self) -> float | None:
        """Compute the rate in the middle of the transfer; None if it was too short.

        Fit a line through all points, because several streams report in steps, and two points may differ by one step.
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
