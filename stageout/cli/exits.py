"""Exit statuses of the command, and errors that end it with one of them."""

from __future__ import annotations

import enum

from stageout.core.errors import StageoutError


class Exit(enum.IntEnum):
    """What the exit status says; documented in ``docs/COMMANDS.md``."""

    OK = 0
    FAILED = 1
    TIMED_OUT = 2
    UNKNOWN_JOB = 3
    USAGE = 64
    UNAVAILABLE = 69


class CommandError(StageoutError):
    """Ends the command; the text is all that a person gets to see."""

    status = Exit.FAILED


class UsageError(CommandError):
    """What was typed cannot be understood."""

    status = Exit.USAGE


class UnknownJob(CommandError):
    """Neither the queue nor the history has the job."""

    status = Exit.UNKNOWN_JOB


class Unavailable(CommandError):
    """A daemon that is needed does not answer; the same command may work later."""

    status = Exit.UNAVAILABLE
