"""Files on this machine that a command line names."""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def given(file: str) -> Iterator[Path]:
    """Give the path of a file; for ``-`` that of a temporary copy of standard input, since its size must be known."""
    if file != "-":
        yield Path(file)
        return
    import shutil
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="stageout-") as gathered:
        try:
            shutil.copyfileobj(sys.stdin.buffer, gathered)
            gathered.flush()
        except OSError as problem:
            place = f"{tempfile.gettempdir()} (TMPDIR names another place)"
            words = f"standard input is gathered in {place}: {problem.strerror}"
            raise CommandError(words, ErrorClass.LOCAL_FILE) from None
        yield Path(gathered.name)
