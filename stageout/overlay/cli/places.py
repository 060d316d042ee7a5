"""Files on this machine that a command line names."""

from __future__ import annotations

import stat
from pathlib import Path

from stageout.cli.exits import CommandError, UsageError
from stageout.core.errors import ErrorClass


def place_here(path: str, file: str | None) -> Path:
    """Return the target path of a file. :param file: its name here, or a directory: one that exists, or ends with /."""
    name = Path(path).name
    if not name:
        raise UsageError("the URL names no file; get -r fetches a directory")
    place = Path(file or name)
    if file and (file.endswith("/") or stat.S_ISDIR(mode_here(place))):
        place = place / name
    if mode_here(place) and not stat.S_ISREG(mode_here(place)):  # a device, above all: its name would be a file's
        raise CommandError(f"{place} is no file that could be replaced", ErrorClass.LOCAL_FILE)
    return place


def mode_here(place: Path) -> int:
    """Kind and permissions of what has a name here; 0 where nothing has, or one may not look."""
    try:
        return place.stat().st_mode
    except OSError:
        return 0
