"""Exit statuses of the command, and errors and signals that end it with one of them."""

from __future__ import annotations

import contextlib
import enum
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from stageout.core.errors import ErrorClass, StageoutError


class Exit(enum.IntEnum):
    """The exit statuses; documented in ``docs/reference/stageout.md``."""

    OK = 0
    FAILED = 1
    TIMED_OUT = 2
    UNKNOWN_JOB = 3
    USAGE = 64
    UNAVAILABLE = 69


class CommandError(StageoutError):
    """Failure of a command, or of a function of :mod:`stageout.jobs`.

    :param text: sentence for people, with the next step. :param kind: class of the error, for programs.
    """

    status = Exit.FAILED
    kind = ErrorClass.UNKNOWN

    def __init__(self, text: str, kind: ErrorClass | None = None) -> None:
        super().__init__(text)
        self.kind = kind or self.kind


class UsageError(CommandError):
    """Command line or argument that is invalid."""

    status = Exit.USAGE
    kind = ErrorClass.BAD_REQUEST


class UnknownJob(CommandError):
    """Job that is neither in the queue nor in the history."""

    status = Exit.UNKNOWN_JOB
    kind = ErrorClass.NOT_FOUND


class Unavailable(CommandError):
    """Daemon that does not answer. The same command or call may succeed later."""

    status = Exit.UNAVAILABLE
    kind = ErrorClass.CONNECT_FAILED


@contextlib.contextmanager
def signals_end_it() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a command as Ctrl-C does, so that it cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    mine = [number for number, handler in before.items() if handler is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in mine:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal does not wait for the cleanup of the first
    raise SystemExit(128 + number)
