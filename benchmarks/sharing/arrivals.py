"""The arrived bytes, as the far end's filesystem tells: nothing that the product says about itself."""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path
from types import TracebackType

from stageout.core.errors import StageoutError

_LOOK_S = 0.05
_FROM, _TO = 0.3, 0.85
_LEAST_POINTS = 5
_BLOCK_BYTES = 512


class Arrivals:
    """Looks at the files below a directory while a transfer writes there.

    >>> with Arrivals(folder) as arrivals:                                    # doctest: +SKIP
    ...     transfer()
    >>> arrivals.rate()                                                       # doctest: +SKIP
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._points: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def rate(self) -> float:
        """Bytes per second while the second third of the bytes and some more arrived, by a line through all points.

        Behind connecting and slow start, before the first of several streams has ended. Servers write large blocks of
        each stream, so that what is there rises in steps: two points alone would differ by a step.

        :raises StageoutError: too little was seen.
        """
        points = max(_rises(self._points), key=lambda rise: rise[-1][1] - rise[0][1], default=[(0.0, 0)])
        base, all_bytes = points[0][1], points[-1][1] - points[0][1]
        inside = [(at, size) for at, size in points if _FROM * all_bytes <= size - base <= _TO * all_bytes]
        if len(inside) < _LEAST_POINTS:
            raise StageoutError("the transfer was too short to be seen: raise its size")
        return _slope(inside)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            # os.walk does not mind that directories go away meanwhile
            paths = [Path(place, name) for place, _, names in os.walk(self._folder) for name in names]
            self._points.append((time.monotonic(), sum(map(_filled_bytes, paths))))


def _slope(points: list[tuple[float, int]]) -> float:
    """Of the line with the least sum of squares."""
    at, size = (statistics.fmean(values) for values in zip(*points))
    return sum((x - at) * (y - size) for x, y in points) / sum((x - at) ** 2 for x, _ in points)


def _rises(points: list[tuple[float, int]]) -> list[list[tuple[float, int]]]:
    """Pieces without a fall: an older file is emptied before a transfer, a sample removed after it."""
    rises: list[list[tuple[float, int]]] = []
    for point in points:
        if not rises or point[1] < rises[-1][-1][1]:
            rises.append([])
        rises[-1].append(point)
    return rises


def _filled_bytes(path: Path) -> int:
    """The bytes there of a file that is written in several places at once."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return min(status.st_size, status.st_blocks * _BLOCK_BYTES)
