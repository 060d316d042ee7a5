"""Records of files as CSV, newest first, a piece at a time."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from stageout.core.history import ended_at, newest_first, took_s
from stageout_web.format import machine_time
from stageout_web.model import server_of
from stageout_web.records import record_of

#: Columns and their attributes. :func:`_value` makes those without one.
COLUMNS = {
    "ended": "", "accepted": "StageOutAcceptedAt", "job": "GlobalJobId", "run": "NumShadowStarts", "owner": "Owner",
    "accounting_group": "AcctGroup", "node": "", "plugin": "StageOutPlugin", "destination": "",
    "state": "StageOutState", "files": "StageOutFiles", "bytes": "TransferFileBytes", "seconds": "",
    "bytes_per_second": "StageOutBytesPerSecond", "attempts": "StageOutAttempts", "error_class": "StageOutErrorClass",
}  # fmt: skip
#: Columns that only readers with a token get.
SECRET_COLUMNS = {
    "name": "TransferFileName", "url": "TransferUrl", "error": "TransferError", "reason": "StageOutReason",
}  # fmt: skip
_AT_ONCE = 500
#: A spreadsheet takes a cell that begins with one of these for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%", "\uff1d", "\uff0b", "\uff0d", "\uff20")


async def export(path: Path, first: str, last: str, sees_names: bool, most_rows: int) -> AsyncIterator[bytes]:
    """Yield a CSV file with the records of these days. A thread reads them.

    :param first, last: YYYY-MM-DD. :raises OSError: the history cannot be read.
    """
    columns = {**COLUMNS, **(SECRET_COLUMNS if sees_names else {})}
    rows = islice(_rows(path, first, last, columns), most_rows)
    yield _text([list(columns)])
    while True:
        piece = await asyncio.get_running_loop().run_in_executor(None, lambda: list(islice(rows, _AT_ONCE)))
        if not piece:
            return
        yield _text(piece)


def _rows(path: Path, first: str, last: str, columns: Mapping[str, str]) -> Iterator[list[str]]:
    for entry in newest_first(path):
        ad = entry.attributes()
        try:
            day, written_at = record_of(ad).day, ad.get("RecordWriteDate", 0)
            is_older = bool(written_at) and record_of({"RecordWriteDate": written_at}).day < first
            row = [safe_cell(str(_value(ad, name, source))) for name, source in columns.items()]
        except (ValueError, TypeError, OverflowError):  # not a record of the agent
            continue
        if is_older:
            return
        if first <= day <= last:
            yield row


def _value(ad: Mapping[str, Any], column: str, source: str) -> object:
    if column == "ended":
        return machine_time(ended_at(ad))
    if column == "accepted":
        return machine_time(ad[source]) if ad.get(source) else ""
    if column == "node":
        return str(ad.get("StageOutManager", "")).rpartition("@")[2]
    if column == "destination":
        return server_of(str(ad.get("TransferUrl", "")))
    if column == "seconds":
        took = took_s(ad)
        return "" if took is None else took
    return ad.get(source, "")


def safe_cell(text: str) -> str:
    """Return text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _text(rows: list[list[str]]) -> bytes:
    target = io.StringIO()
    csv.writer(target, quoting=csv.QUOTE_ALL).writerows(rows)
    return target.getvalue().encode("utf-8", "replace")
