"""Arguments that several commands share, and parsers of their values."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import datetime

from stageout.core.units import read_size

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
JOB = "a cluster (1234) or a job of it (1234.0)"


def add_json(command: argparse.ArgumentParser, *more: str) -> None:
    """Add ``--json``. :param more: further names of the option."""
    command.add_argument("--json", *more, action="store_true", help="print JSON (its fields: docs/reference/json.md)")


def add_schedd(command: argparse.ArgumentParser) -> None:
    """Add the option that selects a schedd."""
    command.add_argument("-n", "-name", "--name", metavar="SCHEDD", help="ask this schedd instead of the local one")
    command.add_argument("-pool", "--pool", metavar="HOST", help="collector of the pool of that schedd")


def add_measuring(command: argparse.ArgumentParser) -> None:
    """Add the measurement plugins and the directory for their results."""
    command.add_argument(
        "--profiles", metavar="DIR", help="directory of stored profiles (default: the knob STAGEOUT_PROFILES)"
    )
    command.add_argument(
        "--plugin", metavar="PATH", action="append", default=[],
        help="transfer plugin to use (default: the plugins of HTCondor's configuration, else those of stageout)",
    )  # fmt: skip


def seconds(text: str) -> float:
    """Parse a number of seconds, 0 or more. :raises ValueError: the text is no such number."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


seconds.__name__ = "number of seconds"


def time_ago(text: str) -> float:
    """Parse a time in the past: an age such as 12h, a date, or seconds since 1970. Return wall clock time in seconds.

    :raises argparse.ArgumentTypeError: the text is no such time.
    """
    try:
        if text[-1:] in _AGES and text[:-1].isdecimal():
            return time.time() - int(text[:-1]) * _AGES[text[-1]]
        return float(text) if text.isdecimal() else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give one such as 12h, 7d or 2026-11-22") from None


def whole(name: str, least: int, most: int = sys.maxsize) -> Callable[[str], int]:
    """Return a parser of whole numbers. :param name: name of the argument in error messages."""

    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    read.__name__ = name
    return read


streams = whole("number of streams (1 to 64)", 1, 64)


def size(text: str) -> int:
    """Parse a size in bytes, such as 500M. :raises ValueError: the text is no size."""
    value = read_size(text)
    if value <= 0:
        raise ValueError
    return value


size.__name__ = "size such as 500M"
