"""The journal of submissions, durable before each submission, so that a restart does not start a second task.

One file per submission, ``SUBMISSION_ID.json``. Below a sandbox manager the directory outlives plugin and manager.
Otherwise it is in the job's scratch directory and has the same lifetime.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageout.core import durable
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.globusonline.plan import Pair

_STATE_DIRECTORY = "STAGEOUT_STATE_DIR"
_NAME = "globusonline"
_RATES = "rates.json"
_FORGOTTEN_S = 30 * 86400.0  # for as long as the service keeps the details of a task


@dataclass
class Entry:
    """One submission.

    :param task: its id, "" until the service returns it. :param document: the submitted document.
    :param settled: its files whose result a call has recorded; a later call fetches the results of the others.
    """

    submission: str
    task: str
    document: dict[str, Any]
    settled: frozenset[Pair] = frozenset()

    @property
    def between(self) -> tuple[str, str]:
        """Source and destination collection."""
        return self.document["source_endpoint"], self.document["destination_endpoint"]

    @property
    def pairs(self) -> set[Pair]:
        """Return the pairs of paths without a recorded result."""
        moved = {(item["source_path"], item["destination_path"]) for item in self.document["DATA"]}
        return moved - self.settled


class Journal:
    """The directory. The first submission creates it."""

    def __init__(self) -> None:
        given = os.environ.get(_STATE_DIRECTORY)
        #: The next call of the plugin opens it again.
        self.is_lasting = bool(given)
        if given and not given.startswith("/"):
            text = f"{_STATE_DIRECTORY} = {given}: write an absolute path"
            raise TransferFailure(ErrorClass.PLUGIN_BROKEN, text)
        self.folder = Path(given) / _NAME if given else Path.cwd() / f".{_NAME}_plugin"

    def entries(self) -> Iterator[Entry]:
        """Return the submissions that may still run. Remove those that are too old."""
        for path in sorted(self.folder.glob("*-*.json")):
            try:
                if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                    path.unlink()
                    continue
                yield self._read(path)
            except (OSError, ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)  # not written by this plugin: its own files are complete or absent

    def begin(self, submission: str, document: dict[str, Any]) -> Entry:
        """Record a submission before it is made. On return the record is durable.

        :raises TransferFailure: the record cannot be written; then nothing may be submitted.
        """
        entry = Entry(submission, "", document)
        self._make()
        self._write("globus-submission", entry)
        return entry

    def submitted(self, entry: Entry, task: str) -> None:
        """Record the task's id. On return it is durable."""
        entry.task = task
        self._write("globus-task", entry)

    def settle(self, entry: Entry, pairs: Iterable[Pair]) -> None:
        """Record that the task is over, and that this call has recorded its result for these files.

        The record stays until this is true for all files: a call after a crash may ask for some of them, and the next
        one for the rest.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # another call has closed it
            entry.settled = self._read(self._path(entry)).settled.union(pairs)
            if entry.pairs:
                self._write("globus-settled", entry)
                return
        self.close(entry)

    def close(self, entry: Entry) -> None:
        """Remove the record of a task whose results are recorded, or that is about to be cancelled."""
        durable.unlink("globus-over", self._path(entry))

    def is_open(self, entry: Entry) -> bool:
        """Tell whether the record is open, because another call of the plugin may watch the same task."""
        return self._path(entry).exists()

    def finish(self) -> None:
        """Remove the journal from a job's scratch directory."""
        if not self.is_lasting:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, entry: Entry) -> Path:
        return self.folder / f"{entry.submission}.json"

    def _make(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as problem:
            raise _unwritable(problem) from None

    @staticmethod
    def _read(path: Path) -> Entry:
        found = json.loads(path.read_bytes())
        settled = frozenset((source, destination) for source, destination in found["settled"])
        return Entry(path.stem, str(found["task"]), dict(found["document"]), settled)

    def _write(self, label: str, entry: Entry) -> None:
        settled = sorted(entry.settled)
        data = json.dumps({"task": entry.task, "document": entry.document, "settled": settled}).encode()
        try:
            durable.write_file(label, self._path(entry), data)
        except OSError as problem:
            raise _unwritable(problem) from None

    # ---- rates: only hints, so they are not synced
    # ---------------------------------------------------------------------------

    def rate_bytes_s(self, between: tuple[str, str]) -> float | None:
        """Return the rate of the last task between two collections; None when unknown."""
        found = self._rates().get(" ".join(between))
        return float(found) if isinstance(found, (int, float)) and found > 0 else None

    def learn_rate(self, between: tuple[str, str], rate_bytes_s: float) -> None:
        """Store the rate of a task."""
        try:
            temporary = self.folder / f".{_RATES}.{os.getpid()}"
            temporary.write_text(json.dumps({**self._rates(), " ".join(between): round(rate_bytes_s)}))
            temporary.replace(self.folder / _RATES)
        except OSError:
            return

    def _rates(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / _RATES).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _unwritable(problem: OSError) -> TransferFailure:
    text = f"the submission cannot be recorded ({problem.strerror}), so it is not made: check the disk of the node"
    return TransferFailure(ErrorClass.NO_SPACE_LOCAL, text)
