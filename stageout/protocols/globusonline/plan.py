"""Convert the files of a call to documents for tasks. Pure: no clock, no network, no files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageout.plugin.api import Transfer
from stageout.protocols.globusonline.address import Address

Pair = tuple[str, str]
_LABEL_CHARS = 128
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9 _-]+")  # a comma would end a value of a filter
_SYNC_LEVELS = {"exists": 0, "size": 1, "mtime": 2, "checksum": 3}
_LEAST_S = 900.0
_MARGIN = 4.0
_FILES_PER_S = 20.0


@dataclass(frozen=True)
class Move:
    """One file, or one directory, of a call that a task moves.

    :param here: path on this node; for a download the temporary path.
    :param pair: source and destination path in their collections. :param size_bytes: 0 while unknown.
    """

    transfer: Transfer
    address: Address
    here: Path
    pair: Pair
    size_bytes: int

    @property
    def destination_folder(self) -> str:
        """Return the destination directory."""
        return self.pair[1].rstrip("/").rpartition("/")[0] + "/"


def split(moves: Sequence[Move], most_files: int) -> list[list[Move]]:
    """Split the files into parts of limited length, in their order."""
    return [list(moves[start : start + most_files]) for start in range(0, len(moves), most_files)]


def by_folder(moves: Iterable[Move]) -> list[list[Move]]:
    """Split the files into parts with one destination directory each."""
    parts: dict[str, list[Move]] = {}
    for move in moves:
        parts.setdefault(move.destination_folder, []).append(move)
    return list(parts.values())


def document(moves: Sequence[Move], between: Pair, label: str, sync: str) -> dict[str, Any]:
    """Return the document to submit, without submission id and deadline.

    Source errors are skipped, because the service then lists each file and its error at the end of the task. Otherwise
    one missing file would keep the task running until its deadline.

    :param between: source and destination collection.
    """
    return {
        "DATA_TYPE": "transfer",
        "source_endpoint": between[0],
        "destination_endpoint": between[1],
        "label": label,
        "sync_level": _SYNC_LEVELS[sync],
        "verify_checksum": True,
        "preserve_timestamp": False,
        "skip_source_errors": True,
        "fail_on_quota_errors": True,
        "notify_on_succeeded": False,
        "notify_on_failed": False,
        "notify_on_inactive": False,
        "DATA": [_item(move) for move in moves],
    }


def _item(move: Move) -> dict[str, Any]:
    source, destination = move.pair
    item = {"DATA_TYPE": "transfer_item", "source_path": source, "destination_path": destination}
    return {**item, "recursive": True} if move.address.is_folder else item


def label_of(jobs: str, upload: bool, pairs: Iterable[Pair]) -> str:
    """Make a label for people. Two tasks have the same label only if they move the same files.

    :param jobs: the jobs of the files.
    """
    mark = hashlib.sha256(repr(sorted(pairs)).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    direction = "output" if upload else "input"
    words = _NOT_IN_LABELS.sub("-", f"HTCondor {direction} of {jobs or 'a job'}").strip("- ")
    return f"{words[: _LABEL_CHARS - len(mark) - 1].rstrip()} {mark}"


def allowed_s(size_bytes: float, files: int, rate_bytes_s: float) -> float:
    """Return the time limit of a task, without its time in the queue."""
    return _LEAST_S + _MARGIN * (size_bytes / rate_bytes_s + files / _FILES_PER_S)


def belongs(found: Pair, pair: Pair) -> bool:
    """Tell whether a file of a task's result is the source of ``pair``, or lies below it."""
    source, destination = (path.rstrip("/") for path in pair)
    return found == pair or (found[0].startswith(source + "/") and found[1].startswith(destination + "/"))
