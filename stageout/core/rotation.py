"""A file of log lines that is begun anew when it is full."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path

_MAX_BYTES = 10_000_000
_BACKUPS = 2


class RotatedFile(logging.handlers.RotatingFileHandler):
    """The same with a count of what is in the file, instead of a question to the file before each line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_MAX_BYTES, backupCount=_BACKUPS)
        self._written = path.stat().st_size

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, into a new file when this one is full."""
        try:
            line = f"{self.format(record)}\n"
            if self._written + len(line) > self.maxBytes:
                self.doRollover()
                self._written = 0
            self._written += len(line)
            stream = self.stream or self._open()
            stream.write(line)
            stream.flush()
        except Exception:
            self.handleError(record)
