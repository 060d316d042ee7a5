"""Log of the daemons: one event per line, ``time level event key=value ...``."""

from __future__ import annotations

import json
import logging
import re
import sys
import time

_PLAIN = re.compile(r'[^\s"=]+')


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


def open_log(handler: logging.Handler | None = None, debug: bool = False) -> None:
    """Send the log to ``handler`` from now on, to stderr without one. The handler before is closed.

    :param debug: write events of the level DEBUG, too.
    """
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    logger = logging.getLogger("stageout")
    before, logger.handlers[:] = logger.handlers[:], [handler]
    for old in before:
        old.close()
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False


def is_debug() -> bool:
    """Return True when events of the level DEBUG are written."""
    return logging.getLogger("stageout").isEnabledFor(logging.DEBUG)


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
