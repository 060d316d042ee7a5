"""Log of the daemons: one event per line, ``time level event key=value ...``, in a file that rotates by size."""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import sys
import time
from pathlib import Path

_MAX_BYTES = 10_000_000
_BACKUPS = 2
_PLAIN = re.compile(r'[^\s"=]+')


class _RotatedFile(logging.handlers.RotatingFileHandler):
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


class _Line(logging.Formatter):
    """Time to the millisecond, level, event. The text of a second is made once."""

    _second = -1
    _stamp = ""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        second = int(record.created)
        if second != self._second:
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
            self._second = second
        return f"{self._stamp}.{int(record.msecs):03d} {record.levelname} {record.getMessage()}"


def open_log(path: Path | None, debug: bool = False) -> None:
    """Send the log to ``path`` (rotated at 10 MB, two old files kept), or to stderr when it is None."""
    handler = logging.StreamHandler(sys.stderr) if path is None else _RotatedFile(path)
    handler.setFormatter(_Line())
    root = logging.getLogger("stageout")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    root.propagate = False


def event(name: str, level: int = logging.INFO, **facts: object) -> None:
    """Write one event. ``name`` is the step's label where the event is a durable step."""
    logger = logging.getLogger("stageout")
    if logger.isEnabledFor(level):
        text = " ".join([name, *(f"{key}={_value(value)}" for key, value in facts.items())])
        # Not by logger.log(), which walks the stack for the name of a source file that nobody asked for.
        logger.handle(logging.LogRecord(logger.name, level, "", 0, text, None, None))


def warn(name: str, **facts: object) -> None:
    """Write one event that a person may have to act on."""
    event(name, logging.WARNING, **facts)


def error(name: str, **facts: object) -> None:
    """Write one event that a person must act on."""
    event(name, logging.ERROR, **facts)


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)
