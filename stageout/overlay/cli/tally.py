"""Files of a directory that have ended: counted and shown, and with ``--json`` each of them told."""

from __future__ import annotations

import threading
import time
from typing import Any

from stageout.cli.bars import Line, complain, printable
from stageout.cli.results import ending, tell
from stageout.core.errors import TransferFailure
from stageout.core.units import count, rate, size

SHOW_EVERY_S = 0.2


class Tally:
    """The outcomes of the files of one directory, added by any thread.

    :param name: of the directory here. :param is_json: print JSON lines for programs, and no bar.
    :param about: what is the same for all of its files.
    :ivar failures: entries that are not where they should be.
    """

    def __init__(self, name: str, is_json: bool, **about: Any) -> None:
        self._name, self._is_json, self._about = printable(name), is_json, about
        self._files = self._bytes = self._same = self.failures = 0
        self._line, self._lock = Line(not is_json), threading.Lock()
        self._start_s, self._shown_s = time.monotonic(), 0.0

    def arrived(self, size_bytes: int, outcome: str = "", **facts: Any) -> None:
        """A file is there. :param facts: of it, for programs."""
        with self._lock:
            self._files += 1
            self._bytes += size_bytes
            if self._is_json:
                self._tell({**facts, "size_bytes": size_bytes, **ending(outcome=outcome)})
            elif time.monotonic() - self._shown_s >= SHOW_EVERY_S:
                self._shown_s = time.monotonic()
                self._line.show(f"{count(self._files, 'file')}, {size(self._bytes)} of {self._name}")

    def same(self, **facts: Any) -> None:
        """A file was there already."""
        with self._lock:
            self._same += 1
            if self._is_json:
                self._tell({**facts, **ending(outcome="unchanged")})

    def failed(self, name: str, failure: TransferFailure, **facts: Any) -> None:
        """A file will not be there. :param name: what people know it by."""
        words = str(failure)
        with self._lock:
            self.failures += 1
            self._line.clear()
            if self._is_json:
                self._tell({**facts, **ending(failure)})
            complain(words if words.startswith(name) else f"{name}: {words}")

    def clear(self) -> None:
        """For what is printed next."""
        self._line.clear()

    def end(self) -> None:
        """Say what has become of all."""
        seconds = max(1e-3, time.monotonic() - self._start_s)
        self._line.clear()
        if self._is_json:
            counts = {"files": self._files, "unchanged": self._same, "failed": self.failures, "size_bytes": self._bytes}
            tell({"kind": "total", "local": self._name, **self._about, **counts, "seconds": round(seconds, 3)})
            return
        rates = f"{self._files / seconds:.0f} files/s, {rate(self._bytes / seconds)}"
        more = f"; {self._same} were there already" if self._same else ""
        print(f"{self._name}: {count(self._files, 'file')}, {size(self._bytes)} in {seconds:.2f} s, {rates}{more}")

    def _tell(self, facts: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - self._start_s, 3)
        tell({"kind": "file", **self._about, "size_bytes": 0, **facts, "seconds": seconds})
