"""Chunked bodies: sizes are hexadecimal digits and nothing else, and what follows the last chunk is dropped."""

from __future__ import annotations

import re
from collections.abc import Callable

from stageout.overlay.http.heads import Refused

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_MOST_TRAILERS = 32


class Chunks:
    """Reads the lines between the bytes of a body.

    :param line: reads one line without its CR LF; raises Refused for one that is too long.
    """

    def __init__(self, line: Callable[[], bytes]) -> None:
        self._line, self._left, self._begun = line, 0, False
        self.ended = False

    def due(self) -> int:
        """Return how many bytes of the body come next, 0 at its end. :raises Refused: it is malformed."""
        if self.ended or self._left:
            return self._left
        if self._begun and self._line():
            raise Refused(400, "a chunk is longer than it says")
        size = self._line()
        if not _SIZE.fullmatch(size):
            raise Refused(400, "the size of a chunk is hexadecimal digits")
        self._left, self._begun = int(size, 16), True
        if not self._left:
            self._trailers()
        return self._left

    def took(self, count: int) -> None:
        """So many bytes were read."""
        self._left -= count

    def _trailers(self) -> None:
        for _ in range(_MOST_TRAILERS):
            if not self._line():
                self.ended = True
                return
        raise Refused(400, f"a body has at most {_MOST_TRAILERS} trailers")
