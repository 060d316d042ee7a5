"""How fast the bytes of one file moved, once they moved: without connecting, slow start and the checks at the end."""

from __future__ import annotations

import time

_SPACING_S = 0.1
_MOST_POINTS = 400
_SHORTEST_S = 0.3


class Pace:
    """Points (when, bytes so far) of one file."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._spacing_s = _SPACING_S

    def note(self, moved_bytes: int, now_s: float | None = None) -> None:
        """So many bytes so far; kept only when there are more than before."""
        now_s = time.monotonic() if now_s is None else now_s
        points = self._points
        if points and (moved_bytes <= points[-1][1] or now_s - points[-1][0] < self._spacing_s):
            return
        points.append((now_s, moved_bytes))
        if len(points) > _MOST_POINTS:
            del points[1::2]
            self._spacing_s *= 2

    def bytes_per_s(self) -> float | None:
        """Rate over the second half of the bytes; None when that was too short a time to tell."""
        if len(self._points) < 2:
            return None
        end_s, all_bytes = self._points[-1]
        half = next(point for point in self._points if point[1] * 2 >= all_bytes)
        if end_s - half[0] < _SHORTEST_S:
            return None
        return (all_bytes - half[1]) / (end_s - half[0])
