"""Log of the daemons: one event per line, ``time level event key=value ...`` or a JSON object."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time

#: Environment variable that says to the processes of a daemon which form its log has.
_CHILDREN = "_STAGEOUT_LOG_FORMAT"
_PLAIN = re.compile(r'[^\s"=]+')


class _Line(logging.Formatter):
    """Time to the millisecond with its zone, level, event. The text of a second is made once."""

    _second = -1
    _stamp = _zone = ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return f"{self._time(record)} {record.levelname} {record.getMessage()}"

    def _time(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            local = time.localtime(second)
            self._stamp, zone = time.strftime("%Y-%m-%dT%H:%M:%S", local), time.strftime("%z", local)
            self._zone, self._second = f"{zone[:3]}:{zone[3:5]}", second
        return f"{self._stamp}.{int(record.msecs):03d}{self._zone}"


class _Json(_Line):
    """An object with time, level, event and its facts. Values that are no numbers or truth values are texts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        head = {"time": self._time(record), "level": record.levelname}
        facts = getattr(record, "facts", {})
        return json.dumps({**facts, **head, "event": getattr(record, "event", record.getMessage())}, default=str)


def open_log(handler: logging.Handler | None = None, debug: bool = False, is_json: bool = False) -> None:
    """Send the log to ``handler`` from now on, to stderr without one. The handler before is closed.

    :param debug: write events of the level DEBUG, too. :param is_json: write each event as a JSON object.
    """
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if is_json else _Line())
    logger = logging.getLogger("stageout")
    before, logger.handlers[:] = logger.handlers[:], [handler]
    for old in before:
        old.close()
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    os.environ[_CHILDREN] = "json" if is_json else ""


def open_child_log() -> None:
    """Send the warnings of a process that a daemon has started to stderr, in the form of the daemon's log."""
    open_log(is_json=os.environ.get(_CHILDREN) == "json")
    logging.getLogger("stageout").setLevel(logging.WARNING)


def is_debug() -> bool:
    """Return True when events of the level DEBUG are written."""
    return logging.getLogger("stageout").isEnabledFor(logging.DEBUG)


def event(name: str, level: int = logging.INFO, **facts: object) -> None:
    """Write one event. ``name`` is the step's label where the event is a durable step."""
    logger = logging.getLogger("stageout")
    if logger.isEnabledFor(level):
        text = " ".join([name, *(f"{key}={_value(value)}" for key, value in facts.items())])
        # Not by logger.log(), which walks the stack for the name of a source file that nobody asked for.
        record = logging.LogRecord(logger.name, level, "", 0, text, None, None)
        record.event, record.facts = name, facts
        logger.handle(record)


def warn(name: str, **facts: object) -> None:
    """Write one event that a person may have to act on."""
    event(name, logging.WARNING, **facts)


def error(name: str, **facts: object) -> None:
    """Write one event that a person must act on."""
    event(name, logging.ERROR, **facts)


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)
