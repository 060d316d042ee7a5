"""Text for people: sizes, times, tables and bars. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from stageout.cli.rows import Row
from stageout.core.states import ENDS
from stageout.wire.control import StreamsReport
from stageout.wire.custody import AD_LIFETIME_S, FileReport, Report
from stageout.wire.deposits import Holding

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]|\x1b")
#: What is said of files in custody of routers, by whether it is their only copy.
_HELD = {True: "only copy", False: "copies"}
_ENDED = frozenset(state.value for state in ENDS)
_RIGHT = frozenset({"FILES", "SIZE", "ATTEMPT", "NEXT", "AT ONCE", "STREAMS", "RATE"})


def size(count_bytes: int) -> str:
    """A size as people read it, powers of 1024: ``0 B``, ``1.0 MB``, ``312 GB``."""
    value = float(count_bytes)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """A duration in at most two units: ``0s``, ``45s``, ``3m20s``, ``2h05m``, ``4d03h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def until(at: int, now: float) -> str:
    """Return the time until the next attempt: ``-`` without one, ``now`` when it is due."""
    if not at:
        return "-"
    return duration(at - now) if at > now + 0.5 else "now"


def attempt(number: int, limit: int) -> str:
    """``3 of 20``, ``3`` without a limit, ``-`` before the first."""
    if not number:
        return "-"
    return f"{number} of {limit}" if limit else str(number)


def clean(text: str) -> str:
    """Text from elsewhere without anything that could move a terminal's cursor, in one line."""
    return " ".join(_CONTROL.sub(" ", text).split())


def server_notes(reports: Iterable[Report], now: float) -> list[str]:
    """A sentence for each server that cannot be reached, by manager. :param now: wall clock, seconds."""
    return [
        f"{clean(one.server)} cannot be reached from {clean(report.manager)} for {duration(now - one.since_at)} "
        f"({one.circuit}, {_probe(one.probe_at, now)}): {clean(one.reason)}"
        for report in reports
        for one in report.servers
    ]


def awaited_managers(rows: Iterable[Row]) -> set[str]:
    """Managers that should be heard of: output of a completed job waits with them."""
    waiting = (row for row in rows if row.job_status == "Completed" and row.state not in (*_ENDED, "HandedOver"))
    return {name for row in waiting for name in row.manager.split(",") if name}


def silence_note(manager: str) -> str:
    """A sentence about one of them of which the collector has no report that is news."""
    return (
        f"nothing was heard of {clean(manager)} for {duration(AD_LIFETIME_S)} or more: is its node up? Its output "
        "waits there; what stays unheard of for STAGEOUT_LEASE seconds is taken for lost, and the jobs run again"
    )


def _probe(at: int, now: float) -> str:
    return f"next probe {'now' if at <= now else 'in ' + duration(at - now)}" if at else "being probed"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int = 0) -> list[str]:
    """Lines of a table whose last column is cut to ``width`` characters in all (0: never cut)."""
    cells = [[clean(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(_columns, column)) for column in zip(header, *cells)]
    return [_line(row, header, widths, width) for row in [list(header), *cells]]


def _line(row: Sequence[str], header: Sequence[str], widths: Sequence[int], width: int) -> str:
    parts = [_pad(cell, wide, name in _RIGHT) for cell, name, wide in zip(row[:-1], header, widths)]
    text = "  ".join([*parts, row[-1]])
    return text if not width or _columns(text) <= width else _cut(text, width)


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _pad(text: str, wide: int, right: bool) -> str:
    space = " " * (wide - _columns(text))
    return space + text if right else text + space


def _cut(text: str, width: int) -> str:
    while text and _columns(text) > width - 1:
        text = text[:-1]
    return text + "…"


def state_word(row: Row) -> str:
    """The state, and for jobs without one, or that were removed, what the job itself does."""
    if row.job_status == "Removed" and row.state != "Delivered":
        return "Removed"
    if row.state != "None":
        return row.state
    if row.synchronous:
        return "Synchronous"
    return "HandedOff" if row.job_status == "Completed" else row.job_status


def jobs_table(rows: Sequence[Row], now: float, width: int = 0) -> list[str]:
    """The overview: one line per job, and a line with the sums."""
    header = ("JOB", "OWNER", "STATE", "FILES", "SIZE", "ATTEMPT", "NEXT", "REASON")
    cells = [
        (
            row.job,
            row.owner,
            state_word(row),
            f"{row.files_left}/{row.files_total}",
            f"{size(row.bytes_left)}/{size(row.bytes_total)}",
            attempt(row.attempts, row.attempts_limit),
            until(row.next_attempt_at, now),
            row.reason,
        )
        for row in rows
    ]
    return [*table(header, cells, width), "", total_line(rows)]


def total_line(rows: Sequence[Row]) -> str:
    """Return the amount that is left, in one line."""
    files, left = sum(row.files_left for row in rows), sum(row.bytes_left for row in rows)
    return f"{count(len(rows), 'job')}; {count(files, 'file')}, {size(left)} still to deliver"


def count(number: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def job_details(row: Row, now: float, width: int = 0) -> list[str]:
    """One job, then its files one by one."""
    lines = [f"Job {row.job} of {clean(row.owner)}: {state_word(row)}"]
    lines += [f"  {name:<10}{text}" for name, text in _facts(row, now) if text]
    if row.files:
        lines += ["", *files_table(row.files, row.attempts_limit, now, width)]
    hidden = row.files_total - len(row.files)
    if hidden > 0 and not row.files_left:
        lines.append(f"('stageout history {row.job}' shows its {count(row.files_total, 'file')})")
    elif hidden > 0 and row.state != "None":
        lines.append(f"({count(hidden, 'file')} not shown here: the manager reports those in trouble first)")
    return lines


def _facts(row: Row, now: float) -> list[tuple[str, str]]:
    done = row.files_total - row.files_left
    counts = f"{done} of {row.files_total} files, {size(row.bytes_total - row.bytes_left)} of {size(row.bytes_total)}"
    handed_off = row.files_total > 0
    return [
        ("reason", clean(row.reason)),
        ("code", clean(row.synchronous_code)),
        ("delivered", counts if handed_off else ""),
        ("output", "transferred before the job ended; nothing was handed off" if row.synchronous else ""),
        *((_HELD[one.is_single], held(one, now)) for one in row.custody),
        ("attempt", attempt(row.attempts, row.attempts_limit) if row.attempts else ""),
        ("next", f"in {until(row.next_attempt_at, now)}" if row.next_attempt_at > now else ""),
        ("custodian", clean(row.manager)),
        ("run", f"{row.run}" + (f", run again {row.reruns} times because output was lost" if row.reruns else "")),
        ("as of", f"{duration(now - row.reported_at)} ago" if row.reported_at else ""),
    ]


def held(one: Holding, now: float) -> str:
    """Return the parts of a job's output that routers hold."""
    text = f"{count(one.files, 'file')}, {size(one.size_bytes)} at {clean(one.custodians)}"
    return f"{text} for {duration(now - one.since)}"


def files_table(files: Sequence[FileReport], limit: int, now: float, width: int = 0) -> list[str]:
    """One line per file: where it goes, by which plugin, how far it is and what went wrong last."""
    header = ("FILE", "SIZE", "STATE", "PLUGIN", "ATTEMPT", "NEXT", "VERIFIED", "TO", "LAST ERROR")
    cells = [
        (
            item.name,
            size(item.size_bytes),
            item.state,
            item.plugin,
            attempt(item.attempts, limit),
            until(item.next_attempt_at, now),
            item.verified,
            item.url,
            item.error and f"{item.error} (error {item.error_code})",
        )
        for item in files
    ]
    return table(header, cells, width)


def streams_table(streams: Iterable[StreamsReport], width: int = 0) -> list[str]:
    """One line per server: what goes there at once, and the sentences that say why."""
    header = ("SERVER", "AT ONCE", "STREAMS", "RATE", "WHY")
    cells = [
        (
            item.server,
            f"{item.files_in_flight}/{item.files_at_once}",
            f"{item.streams_in_use}/{item.streams}",
            f"{item.rate_mb_s:.3g} MB/s" if item.rate_mb_s else "",
            f"{item.reason} {item.grant}",
        )
        for item in streams
    ]
    return table(header, cells, width)


def bar(done: int, total: int, columns: int) -> str:
    """A progress bar of so many columns: full only when all is done."""
    if total <= 0:
        return "." * columns
    full = columns if done >= total else min(columns - 1, columns * max(done, 0) // total)
    return "#" * full + "." * (columns - full)


def progress_lines(rows: Sequence[Row], now: float, width: int) -> list[str]:
    """For ``--watch`` on a terminal: a bar per job."""
    columns = max(10, min(40, width - 60))
    lines = [total_line(rows)]
    for row in rows:
        done = row.bytes_total - row.bytes_left
        share = 100 * done // row.bytes_total if row.bytes_total else 0
        text = (
            f"{row.job:>10} {state_word(row):<11} [{bar(done, row.bytes_total, columns)}] {share:3d}% "
            f"{size(done)}/{size(row.bytes_total)} {row.files_total - row.files_left}/{row.files_total} files"
        )
        if row.next_attempt_at > now:
            text += f"  next try in {until(row.next_attempt_at, now)}"
        text += f"  {clean(row.reason)}" if row.reason else ""
        lines.append(text)
    return lines


def fit(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """The lines cut to a terminal's size, so that they can be drawn over: what has no room is counted."""
    room = max(rows - 1, 2)
    kept = list(lines) if len(lines) <= room else [*lines[: room - 1], f"... and {len(lines) - room + 1} more lines"]
    return [line if _columns(line) <= columns else _cut(line, columns) for line in kept]
