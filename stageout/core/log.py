"""Log of the daemons: one event per line, ``time level event key=value ...``, in a file that rotates by size."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageout.core.config import Settings

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


def open_log(path: Path | None, debug: bool = False) -> None:
    """Send the log to ``path`` (rotated at 10 MB, two old files kept), or to stderr when it is None."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        from stageout.core.rotation import RotatedFile  # for daemons: a command is done before it is loaded

        handler = RotatedFile(path)
    handler.setFormatter(_Line())
    root = logging.getLogger("stageout")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    root.propagate = False


def open_daemon_log(settings: Settings, knob: str, name: str, terminal: bool = False) -> None:
    """Send the log of a daemon to the file of HTCondor's ``knob``, or to ``name`` in ``$(LOG)``.

    :param terminal: to stderr; so too where neither is set. :raises ConfigError: that is no file to write.
    """
    from stageout.core.config import ConfigError, checked_path

    directory = settings.condor("LOG")
    path = "" if terminal else settings.condor(knob) or (f"{directory}/{name}" if directory else "")
    if path:
        checked_path(knob, path)
    try:
        open_log(Path(path) if path else None, settings.flag("STAGEOUT_DEBUG"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as problem:
        why = f"{problem.strerror}; name a file that this daemon's user may write"
        raise ConfigError(f"{knob}: the log {path}: {why}") from None


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
