"""A filter for the output of code inside a plugin: HTCondor treats stdout as a sign of life, and keeps all of it."""

from __future__ import annotations

import os
import threading
from collections import deque

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_PIECE_BYTES = 4096
_PIECES_KEPT = 2
_DRAIN_S = 0.2


class Quiet:
    """Redirection of descriptors 1 and 2 into a pipe of which only the tail is kept.

    Programs that a protocol starts inherit this pipe instead of HTCondor's. If they outlive the plugin, they cannot
    keep HTCondor's pipe open.
    """

    def __init__(self) -> None:
        self._stdout = os.dup(_STDOUT)
        self._stderr = os.dup(_STDERR)
        self._tail: deque[bytes] = deque(maxlen=_PIECES_KEPT)
        reading, writing = os.pipe()
        os.dup2(writing, _STDOUT)
        os.dup2(writing, _STDERR)
        os.close(writing)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, _STDIN)
        os.close(null)
        self._drainer = threading.Thread(target=self._drain, args=(reading,), daemon=True)
        self._drainer.start()

    def _drain(self, reading: int) -> None:
        while piece := os.read(reading, _PIECE_BYTES):
            self._tail.append(piece)

    def printed(self) -> str:
        """Return the tail of the output, and end the redirection. Later output goes to HTCondor."""
        os.dup2(self._stdout, _STDOUT)
        os.dup2(self._stderr, _STDERR)
        self._drainer.join(_DRAIN_S)  # with a time limit, because a child may hold the pipe
        return b"".join(self._tail).decode("utf-8", "replace")

    def to_stdout(self, text: str) -> None:
        """Write to the real stdout (results of the single-file form)."""
        _write(self._stdout, text)

    def to_stderr(self, text: str) -> None:
        """Write to the real stderr, which becomes part of the starter's log."""
        _write(self._stderr, text)


def _write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "replace")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return  # the reader has closed the pipe
