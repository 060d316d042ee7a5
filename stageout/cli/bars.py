"""Progress bars on a terminal. If standard error is no terminal, only the final lines are printed."""

from __future__ import annotations

import os
import sys
import threading
import time
import unicodedata

from stageout.core.errors import TransferFailure
from stageout.core.units import duration, size
from stageout.core.units import rate as rate_text

_BAR = 30
_LEAST_BAR = 5
_SHOW_EVERY_S = 0.2
#: The progress line mentions a silence of more than this many seconds.
_IDLE_S = 3.0


def printable(text: str) -> str:
    """Escape control characters in a name, and bytes that are no text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cut(text: str, columns: int) -> str:
    """Cut a text to a number of terminal columns. Wide characters take two."""
    used = 0
    for at, char in enumerate(text):
        used += 2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char)
        if used > columns:
            return text[:at]
    return text


def drawn(name: str, moved_bytes: int, size_bytes: int, elapsed_s: float, idle_s: float, columns: int) -> str:
    """Draw the progress line of one file in fewer than ``columns``. :param idle_s: seconds since the last bytes
    moved.
    """
    if not moved_bytes:
        return cut(f"{name}: waiting for the first byte, {duration(elapsed_s)}", columns - 1)
    rate = moved_bytes / max(1e-3, elapsed_s)
    share = min(1.0, moved_bytes / size_bytes) if size_bytes else 0.0
    if idle_s >= _IDLE_S:
        state = f"{'waiting for confirmation' if share == 1 else 'nothing moves'}, {duration(idle_s)}"
    else:
        state = f"{rate_text(rate)}, {duration(max(0, size_bytes - moved_bytes) / rate)} left"
    words = f" {share:.0%} of {size(size_bytes)}, {state}"
    shown = cut(name, max(8, columns - len(words) - _LEAST_BAR - 4))
    room = min(_BAR, columns - len(words) - len(shown) - 4)
    bar = f" [{'#' * int(share * room):<{room}}]" if room >= _LEAST_BAR else ""
    return cut(f"{shown}{bar}{words}", columns - 1)


class Line:
    """The last line of the terminal, which is overwritten at each update; silent if standard error is no terminal.

    :param is_wanted: False suppresses the line.
    """

    def __init__(self, is_wanted: bool = True) -> None:
        is_open = sys.stderr is not None  # None if the process was started without standard error
        self.is_visible = is_wanted and is_open and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._is_empty = True

    @property
    def columns(self) -> int:
        """Return the current number of the terminal's columns."""
        import shutil

        return shutil.get_terminal_size().columns

    def show(self, text: str) -> None:
        """Replace the line."""
        if self.is_visible:
            self._is_empty = False
            print(f"\r{cut(text, self.columns - 1)}\033[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line to make room for other output."""
        if not self._is_empty:
            self._is_empty = True
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Bar:
    """Progress bar of one file, drawn until the context ends, both while bytes move and while none do.

    :param is_wanted: False suppresses the bar and the final line.
    """

    def __init__(self, name: str, size_bytes: int, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted
        self._name, self._size_bytes, self._moved_bytes = printable(name), size_bytes, 0
        self._start_s = self._shown_s = self._moved_s = time.monotonic()
        self._line, self._lock, self._ended = Line(is_wanted), threading.Lock(), threading.Event()

    def __enter__(self) -> Bar:
        if self._line.is_visible:
            threading.Thread(target=self._tick, name="bar", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._ended.set()
            self._line.clear()

    def sized(self, size_bytes: int) -> None:
        """Record the size as soon as it is known."""
        self._size_bytes = size_bytes

    def __call__(self, moved_bytes: int) -> None:
        """Add transferred bytes."""
        now_s = time.monotonic()
        if moved_bytes != self._moved_bytes:
            self._moved_bytes, self._moved_s = moved_bytes, now_s
        if self._line.is_visible and now_s - self._shown_s >= _SHOW_EVERY_S:
            self._show(now_s)

    def _tick(self) -> None:
        while not self._ended.wait(1.0):
            self._show(time.monotonic())

    def _show(self, now_s: float) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._shown_s = now_s
                elapsed_s, idle_s = now_s - self._start_s, now_s - self._moved_s
                columns = self._line.columns
                self._line.show(drawn(self._name, self._moved_bytes, self._size_bytes, elapsed_s, idle_s, columns))

    def end(self, size_bytes: int) -> None:
        """Show that the file has arrived."""
        self.__exit__()
        seconds = max(1e-3, time.monotonic() - self._start_s)
        if self._is_wanted:
            print(f"{self._name}: {size(size_bytes)} in {seconds:.2f} s, {rate_text(size_bytes / seconds)}")


def complain(failure: TransferFailure | str) -> None:
    """Print an error on standard error, with control characters escaped."""
    if sys.stderr is not None:  # print(file=None) writes to standard output
        print(f"stageout: {printable(str(failure))}", file=sys.stderr)
