"""Records of delivered files for ``stageout history -files``: select, print and sum up."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stageout.cli import render
from stageout.cli.condor import load_bindings
from stageout.cli.exits import CommandError, UsageError
from stageout.cli.jobs import JobId, parse_job_ids
from stageout.cli.rows import SCHEMA
from stageout.cli.status import terminal_width, whose_jobs
from stageout.condor.ads import Expression
from stageout.condor.bindings import CondorError
from stageout.condor.configuration import condor_settings
from stageout.core.history import FILE_NAME, HistoryEntry, ended_at, newest_first, took_s
from stageout.core.states import plain_word
from stageout.core.units import count, duration, size

Ad = Mapping[str, Any]

_NOT_LISTED = "(not listed)"
_DELIVERED = "Delivered"


def run(options: argparse.Namespace) -> None:
    """Print the selected records or totals.

    :raises UsageError: an expression or option cannot be used here. :raises CommandError: no records can be read.
    """
    if options.name or options.pool:
        raise UsageError("records of files are on the access point only: run this there, without --name and --pool")
    found = select(_path(), options)
    if options.totals is not None:
        _print_totals(totals(map(HistoryEntry.attributes, found), options.totals), options)
    elif options.autoformat is not None:
        _print_values(found, options)
    elif options.json:
        files = [entry.attributes() for entry in found]
        print(json.dumps({"schema": SCHEMA, "files": files}, indent=2))
    else:
        print("\n".join(overview(map(HistoryEntry.attributes, found), terminal_width())))


def _path() -> Path:
    """Return the history of files. :raises CommandError: this machine has no SPOOL."""
    spool = condor_settings().condor("SPOOL")
    if not spool:
        raise CommandError("SPOOL is not set here: records of files are on the access point, so run this there")
    return Path(spool) / FILE_NAME


# ---- selection -------------------------------------------------------------------------------------------------------


def select(path: Path, options: argparse.Namespace) -> Iterator[HistoryEntry]:
    """Yield the records that the options select, newest first.

    :raises UsageError: the constraint is invalid. :raises OSError: the history cannot be read.
    """
    wanted = parse_job_ids(options.jobs)
    owner = None if wanted or options.all_users else whose_jobs()
    tests = [*_plain_tests(wanted, owner, options.since)]
    if options.constraint is not None:
        wanted_by = _expression(options.constraint)
        tests.append(lambda entry: wanted_by.holds(_text(entry)))
    found = (entry for entry in _written_since(path, options.since) if all(test(entry) for test in tests))
    return islice(found, options.limit)


def _written_since(path: Path, since: float | None) -> Iterator[HistoryEntry]:
    for entry in newest_first(path):
        if since is not None and entry.attributes().get("RecordWriteDate", since) < since:
            return
        yield entry


def _expression(text: str) -> Expression:
    """Parse an expression of the command line. :raises UsageError: the text is no expression."""
    load_bindings()
    try:
        return Expression(text)
    except CondorError:
        raise UsageError(f"'{text}' is not a ClassAd expression") from None


def _text(entry: HistoryEntry) -> str:
    return entry.text.decode("utf-8", "replace")


def _plain_tests(
    wanted: Sequence[JobId], owner: str | None, since: float | None
) -> Iterator[Callable[[HistoryEntry], bool]]:
    if owner is not None:
        line = f'Owner = "{owner}"\n'.encode()
        yield lambda entry: line in entry.text
    if wanted:
        yield lambda entry: _is_of(entry.attributes(), wanted)
    if since is not None:
        least = since
        yield lambda entry: ended_at(entry.attributes()) >= least


def _is_of(ad: Ad, wanted: Sequence[JobId]) -> bool:
    return any(one.covers(JobId(ad.get("ClusterId", 0), ad.get("ProcId", 0))) for one in wanted)


# ---- single records
# ------------------------------------------------------------------------------------------------------


def overview(ads: Iterable[Ad], width: int) -> list[str]:
    """Write one line for each record."""
    header = ("JOB", "OWNER", "STATE", "SIZE", "TOOK", "ENDED", "FILE", "TO", "ERROR")
    rows = [
        (
            f"{ad.get('ClusterId')}.{ad.get('ProcId')}",
            str(ad.get("Owner", "")),
            plain_word(str(ad.get("StageOutState", ""))),
            size(ad.get("TransferFileBytes", 0)),
            _duration(took_s(ad)),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(ended_at(ad))),
            ad.get("TransferFileName") or f"({count(ad.get('StageOutFiles', 1), 'file')} not listed)",
            str(ad.get("TransferUrl", "")),
            str(ad.get("TransferError") or ad.get("StageOutReason", "")),
        )
        for ad in ads
    ]
    if not rows:
        return ["No record of a file matches. The agent writes one when the delivery of a job's output has ended."]
    return render.table(header, rows, width)


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _print_values(found: Iterable[HistoryEntry], options: argparse.Namespace) -> None:
    """Print attributes, or expressions, as ``condor_history -af`` does."""
    columns = {text: _expression(text) for text in options.autoformat}
    if options.json:
        files = [{text: column.value(_text(entry)) for text, column in columns.items()} for entry in found]
        print(json.dumps({"schema": SCHEMA, "files": files}, indent=2))
        return
    for entry in found:
        print(" ".join(render.clean(column.text(_text(entry))) for column in columns.values()))


# ---- totals ----------------------------------------------------------------------------------------------------------


@dataclass
class Total:
    """Sums of some records.

    :param undelivered: files that did not arrive. :param took: duration -> number of delivered files with that
        duration.
    """

    files: int = 0
    size_bytes: int = 0
    undelivered: int = 0
    took: dict[int, int] = field(default_factory=dict)

    def add(self, ad: Ad) -> None:
        """Add a record."""
        files = ad.get("StageOutFiles", 1)
        if ad.get("StageOutState") != _DELIVERED:
            self.undelivered += files
            return
        self.files += files
        self.size_bytes += ad.get("TransferFileBytes", 0)
        seconds = took_s(ad)
        if seconds is not None:
            self.took[seconds] = self.took.get(seconds, 0) + files

    def percentile_s(self, share: float) -> int | None:
        """Return the duration that this share of the delivered files did not exceed; None when no duration is known."""
        left = share * sum(self.took.values())
        for seconds, files in sorted(self.took.items()):
            left -= files
            if left <= 0:
                return seconds
        return None


def _day(ad: Ad) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(ended_at(ad)))


#: Argument of ``-totals`` -> function that returns the key of a record.
TOTALS: dict[str, Callable[[Ad], str]] = {
    "owner": lambda ad: str(ad.get("Owner", "")),
    "destination": lambda ad: str(ad.get("TransferHostName", _NOT_LISTED)),
    "plugin": lambda ad: str(ad.get("StageOutPlugin", _NOT_LISTED)),
    "day": _day,
}


def totals(ads: Iterable[Ad], word: str) -> dict[str, Total]:
    """Sum up records by owner, destination, plugin or day, in the order of the keys."""
    found: dict[str, Total] = {}
    for ad in ads:
        found.setdefault(TOTALS[word](ad), Total()).add(ad)
    return dict(sorted(found.items()))


def _print_totals(found: Mapping[str, Total], options: argparse.Namespace) -> None:
    if options.json:
        rows = [_total_row(options.totals, key, total) for key, total in found.items()]
        print(json.dumps({"schema": SCHEMA, "totals": rows}, indent=2))
    elif not found:
        print("\n".join(overview((), 0)))
    else:
        header = ("DELIVERED", "SIZE", "UNDELIVERED", "MEDIAN", "95%", options.totals.upper())
        print("\n".join(render.table(header, [_total_cells(key, total) for key, total in found.items()])))


def _total_cells(key: str, total: Total) -> tuple[str, ...]:
    durations = (_duration(total.percentile_s(share)) for share in (0.5, 0.95))
    return str(total.files), size(total.size_bytes), str(total.undelivered), *durations, key


def _total_row(word: str, key: str, total: Total) -> dict[str, Any]:
    return {
        word: key, "files": total.files, "size_bytes": total.size_bytes, "undelivered_files": total.undelivered,
        "median_s": total.percentile_s(0.5), "percentile_95_s": total.percentile_s(0.95),
    }  # fmt: skip
