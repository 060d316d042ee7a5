"""Copies what a reader wants to see of a pool after its end."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

_WANTED = (
    "*/log/**/*",
    "*/config.d/*",
    "*/master.out",
    "*/boot.log",
    "*/spool/history",
    "*/spool/epoch_history",
    "helper.log",
    "jobs/*/*/*.log",
    "jobs/*/*/*.out",
    "jobs/*/*/*.err",
    "jobs/*/*/*.sub",
)


def collect(directory: Path, dest: Path) -> Path:
    """Copy logs, settings, histories and users' small job files of a pool's directory to `dest`, in the same tree."""
    for pattern in _WANTED:
        for source in directory.glob(pattern):
            target = dest / source.relative_to(directory)
            # A log may be rotated away, and a user's "file" may be a pipe.
            with contextlib.suppress(OSError):
                if source.is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
    return dest
