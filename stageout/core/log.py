"""Log of the daemons: one event per line, ``time level event key=value ...``, in a file that rotates by size."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from pathlib import Path

_MAX_BYTES = 10_000_000
_BACKUPS = 2


def open_log(path: Path | None, debug: bool = False) -> None:
    """Send the log to ``path`` (rotated at 10 MB, two old files kept), or to stderr when it is None."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_BACKUPS)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger("stageout")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    root.propagate = False


def event(name: str, level: int = logging.INFO, **facts: object) -> None:
    """Write one event. ``name`` is the step's label where the event is a durable step."""
    logger = logging.getLogger("stageout")
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([name, *(f"{key}={_value(value)}" for key, value in facts.items())]))


def warn(name: str, **facts: object) -> None:
    """Write one event that a person may have to act on."""
    event(name, logging.WARNING, **facts)


def error(name: str, **facts: object) -> None:
    """Write one event that a person must act on."""
    event(name, logging.ERROR, **facts)


def _value(value: object) -> str:
    text = str(value)
    plain = text and not any(char.isspace() or char in '"=' or not char.isprintable() for char in text)
    return text if plain else json.dumps(text)
