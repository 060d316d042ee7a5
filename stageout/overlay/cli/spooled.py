"""Rows in the order in which they came: in memory while they are few, then in a file without a name."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_MEMORY_BYTES = 4 << 20


class Spooled:
    """First in, first out. However many there are, a few MB of memory.

    :param place: a directory, on whose disk they are kept when they are many. Its methods raise OSError.
    """

    def __init__(self, place: Path) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, dir=str(place))  # noqa: SIM115
        self._read_bytes = self._left = 0

    def __enter__(self) -> Spooled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._left

    def add(self, row: Sequence[Any]) -> None:
        """Behind all others. :param row: texts and numbers."""
        self._file.seek(0, 2)
        self._file.write(json.dumps(row).encode() + b"\n")
        self._left += 1

    def pop(self) -> Any:
        """The first of them."""
        self._file.seek(self._read_bytes)
        line = self._file.readline()
        self._read_bytes += len(line)
        self._left -= 1
        return json.loads(line)

    def end(self) -> tuple[int, int]:
        """Return the position of the next row."""
        return self._file.seek(0, 2), self._left

    def cut(self, end: tuple[int, int]) -> None:
        """Forget the rows that were added since. None was taken since. :param end: as of :meth:`end`."""
        place_bytes, self._left = end
        self._file.seek(place_bytes)
        self._file.truncate()

    def clear(self) -> None:
        """Forget all rows."""
        self.cut((0, 0))
        self._read_bytes = 0
