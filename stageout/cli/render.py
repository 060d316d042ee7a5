"""Text for people: sizes, times, tables and bars. Pure."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

from stageout.cli.jobs import STATUS_WORDS
from stageout.cli.rows import Destination, Row, server_totals
from stageout.cli.verdict import UNREPORTED
from stageout.core import eta
from stageout.core.states import ENDS, State, plain_word
from stageout.core.units import MB, count, duration, rate, size
from stageout.model.job import Status
from stageout.wire.control import StreamsReport
from stageout.wire.custody import AD_LIFETIME_S, FileReport, Report
from stageout.wire.deposits import Holding


def _both(state: State) -> tuple[str, str]:
    return state.value, plain_word(state.value)


_SECOND_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]|\x1b")
#: Words for files in custody of routers, by whether the router has the only copy.
_HELD = {True: "only copy", False: "copies"}
_ENDED = frozenset(state.value for state in ENDS)
#: Words of :func:`state_word` in addition to those of the state table.
OTHER_STATES = frozenset(
    {"removed", "synchronous", UNREPORTED, "node silent", "paused", "waiting for the server"}
    | {_SECOND_WORD.sub(" ", word).lower() for word in STATUS_WORDS.values()}
)
_HOSTS_SHOWN = 3
_RED, _GREEN, _YELLOW = "31", "32", "33"
#: Colours of words in the column STATE: words for owners and words of the ledger.
_COLOURS = {
    **dict.fromkeys((*_both(State.FAILED), *_both(State.LOST), "removed"), _RED),
    **dict.fromkeys((*_both(State.RETRY_WAIT), "waiting for the server"), _YELLOW),
    **dict.fromkeys((*_both(State.DELIVERED), *_both(State.RELEASED)), _GREEN),
}
_RIGHT = frozenset(
    {
        "FILES",
        "SIZE",
        "ATTEMPT",
        "NEXT",
        "NODES",
        "AT ONCE",
        "STREAMS",
        "RATE",
        "WAITING",
        "MOVING",
        "RETRY",
        "FAILED",
        "LEFT",
        "ETA",
    }
)


def until(at: int, now: float) -> str:
    """Return the time until the next attempt: ``-`` without an attempt, ``due`` when its time has come."""
    if not at:
        return "-"
    return duration(at - now) if at > now + 0.5 else "due"


def next_word(row: Row, now: float) -> str:
    """Return the time until a job's next attempt; ``probing`` while one file tests a server that did not answer."""
    word = until(row.next_attempt_at, now)
    if word != "due":
        return word
    if row.waits_for_server:
        return "probing"
    return word if row.state == State.RETRY_WAIT else "-"


def attempt(item: Row | FileReport, limit: int) -> str:
    """Return the attempts that count against the limit: ``3 of 20``, ``3`` without a limit, ``-`` before the first."""
    if not item.attempts:
        return "-"
    counted = max(0, item.attempts - item.excused)
    return f"{counted} of {limit}" if limit else str(counted)


def clean(text: str) -> str:
    """Remove control characters from foreign text and put it into one line."""
    return " ".join(_CONTROL.sub(" ", text).split())


def server_notes(reports: Iterable[Report], now: float) -> list[str]:
    """Write a sentence for each server that managers cannot reach, by manager. :param now: wall clock, seconds."""
    return [
        f"{clean(one.server)} cannot be reached from {clean(report.manager)} for {duration(now - one.since_at)} "
        f"({one.circuit}, {_probe(one.probe_at, now)}): {clean(one.reason)}"
        for report in reports
        for one in report.servers
    ]


def awaited_managers(rows: Iterable[Row]) -> set[str]:
    """Return the managers whose reports matter now, because they hold output of a completed job."""
    waiting = (row for row in rows if row.job_status == "Completed" and row.state not in (*_ENDED, "HandedOver"))
    return {name for row in waiting for name in row.manager.split(",") if name}


def silence_note(manager: str) -> str:
    """Write the sentence about a manager without a recent report in the collector."""
    return (
        f"nothing was heard of {clean(manager)} for {duration(AD_LIFETIME_S)} or more: is its node up? Its output "
        "waits there; what stays unheard of for STAGEOUT_LEASE seconds is taken for lost, and the jobs run again ("
        "sooner if the node never returns)"
    )


def agent_note(schedd: str, silence_s: float) -> str:
    """Write the sentence about a schedd agent that is silent. :param silence_s: infinite without an ad of the agent."""
    since = "the collector knows none" if silence_s == float("inf") else f"last heard of {duration(silence_s)} ago"
    return (
        f"the schedd agent of {clean(schedd)} does not answer ({since}): nothing is confirmed, and requests wait until "
        "it is back; tell its administrator"
    )


def _probe(at: int, now: float) -> str:
    return f"next probe {'now' if at <= now else 'in ' + duration(at - now)}" if at else "being probed"


def wants_colours(stream: TextIO) -> bool:
    """Tell whether to colour text for a stream: only on terminals, and never with NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, colour: str) -> str:
    """Return text in a colour. :param colour: number of an ANSI colour; "" for none."""
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int = 0, colour: bool = False) -> list[str]:
    """Return the lines of a table. Columns that do not fit are written below each row, with their names.

    :param width: columns of the terminal; 0: no limit. :param colour: paint the column STATE.
    """
    cells = [[clean(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(_columns, column)) for column in zip(header, *cells)]
    beside = _most_beside(widths, width)
    lines = [_line(header, header, widths, beside, width, colour)]
    for row in cells:
        below = [f"{name}: {cell}" for name, cell in zip(header[beside:], row[beside:]) if cell != "-"]
        lines.append(_line(row, header, widths, beside, width, colour))
        lines += [line for text in below for line in _wrapped(text, width)]
    return lines


def _most_beside(widths: Sequence[int], width: int) -> int:
    """Return the number of table columns that fit beside each other."""
    most = len(widths)
    while width and most > 1 and sum(widths[:most]) + 2 * (most - 1) > width:
        most -= 1
    return most


def _line(
    row: Sequence[str], header: Sequence[str], widths: Sequence[int], beside: int, width: int, colour: bool
) -> str:
    parts = [_pad(cell, wide, name in _RIGHT) for cell, name, wide in zip(row[: beside - 1], header, widths)]
    last = row[beside - 1]
    if beside < len(row) and header[beside - 1] in _RIGHT:
        last = _pad(last, widths[beside - 1], True)
    text = "  ".join([*parts, last])
    text = text if not width or _columns(text) <= width else _cut(text, width)
    return _paint_state(text, row, header, parts) if colour and "STATE" in header[:beside] else text


def _wrapped(text: str, width: int) -> list[str]:
    """Return indented lines of text. A longer word, such as a URL, is not cut, so that users can copy it."""
    lines, line = [], "    "
    for word in text.split():
        if line.strip() and _columns(line) + 1 + _columns(word) > width:
            lines.append(line)
            line = "    "
        line += f" {word}" if line.strip() else word
    return [*lines, line]


def _paint_state(text: str, row: Sequence[str], header: Sequence[str], parts: Sequence[str]) -> str:
    at = list(header).index("STATE")
    start, word = sum(len(part) + 2 for part in parts[:at]), row[at]
    end = start + len(word)
    return text[:start] + painted(word, _COLOURS.get(word, "")) + text[end:] if len(text) > end else text


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _pad(text: str, wide: int, right: bool) -> str:
    space = " " * (wide - _columns(text))
    return space + text if right else text + space


def _cut(text: str, width: int) -> str:
    while text and _columns(text) > width - 1:
        text = text[:-1]
    return text + "…"


def state_word(row: Row, ledger: bool = False) -> str:
    """Return the word for the state. For a job without a state, or a removed one, return the status of the job itself.

    :param ledger: use the ledger's words, for administrators; otherwise those for job owners.
    """
    if row.job_status == "Removed" and row.state != "Delivered" and not row.has_left:
        return "removed"
    if row.state != "None":
        return row.state if ledger else _owners_word(row)
    if row.synchronous:
        return "synchronous"
    return UNREPORTED if row.job_status == "Completed" else _SECOND_WORD.sub(" ", row.job_status).lower()


def _owners_word(row: Row) -> str:
    if row.silent_s:
        return "node silent"
    if row.paused:
        return "paused"
    return "waiting for the server" if row.waits_for_server else plain_word(row.state)


def reason(row: Row, now: float) -> str:
    """Return the reason for the state: the start of a transfer, or the time when a delivered job leaves the queue.

    :param now: wall clock, seconds.
    """
    leaves = "leaves the queue within a minute" if row.leaves_queue else ""
    told = "; ".join(filter(None, (leaves, _gone(row, now), _sending(row, now), clean(row.reason))))
    if row.silent_s:
        return f"as of {duration(row.silent_s)} ago: {told or plain_word(row.state)}"
    return told


def _gone(row: Row, now: float) -> str:
    """Describe how and when a job that has left the queue ended."""
    if not row.has_left:
        return ""
    since = f" {duration(now - row.ended_at)} ago" if row.ended_at else ""
    return f"its job has left the queue ({row.job_status.lower()}{since})"


def _sending(row: Row, now: float) -> str:
    """Describe since when plugins send files, and how many are confirmed; "" when nothing is being sent."""
    moving = [file for file in row.files if file.state == State.MOVING and file.began_at]
    if row.state != State.MOVING or not moving:
        return ""
    now -= row.silent_s
    hosts = sorted({file.url.partition("://")[2].partition("/")[0] or "this node" for file in moving})
    named = clean(", ".join(hosts[:_HOSTS_SHOWN])) + (", ..." if len(hosts) > _HOSTS_SHOWN else "")
    done = row.files_total - row.files_left
    confirmed = f"{done} of {count(row.files_total, 'file')} confirmed" if done else "nothing confirmed yet"
    return f"sending to {named} for {duration(now - min(file.began_at for file in moving))}, {confirmed}"


def jobs_table(
    rows: Sequence[Row], now: float, width: int = 0, ledger: bool = False, colour: bool = False
) -> list[str]:
    """Write the overview: one line per job, and a line with the sums. :param ledger: see :func:`state_word`."""
    header = ("JOB", "OWNER", "STATE", "FILES", "SIZE", "ATTEMPT", "NEXT", "ETA", "REASON")
    cells = [
        (
            row.job,
            row.owner,
            state_word(row, ledger),
            f"{row.files_left}/{row.files_total}",
            f"{size(row.bytes_left)}/{size(row.bytes_total)}",
            attempt(row, row.attempts_limit),
            next_word(row, now),
            eta.words(row.eta_low_s, row.eta_high_s),
            reason(row, now),
        )
        for row in rows
    ]
    return [*table(header, cells, width, colour), "", total_line(rows)]


def total_line(rows: Sequence[Row]) -> str:
    """Return the amount that is left, in one line."""
    files, left = sum(row.files_left for row in rows), sum(row.bytes_left for row in rows)
    return f"{count(len(rows), 'job')}; {count(files, 'file')}, {size(left)} still to deliver"


def job_details(row: Row, now: float, width: int = 0, ledger: bool = False, colour: bool = False) -> list[str]:
    """Write one job, then its files one by one. :param ledger: see :func:`state_word`."""
    word = state_word(row, ledger)
    lines = [f"Job {row.job} of {clean(row.owner)}: {painted(word, _COLOURS.get(word, '') * colour)}"]
    lines += [f"  {name:<10}{text}" for name, text in facts(row, now) if text]
    if row.files:
        lines += ["", *files_table(row.files, row.attempts_limit, now, width, ledger, colour)]
    hidden = row.files_total - len(row.files)
    if hidden > 0 and not row.files_left:
        lines.append(f"('stageout history {row.job}' shows its {count(row.files_total, 'file')})")
    elif hidden > 0 and row.state != "None":
        lines.append(f"({count(hidden, 'file')} not shown here: the manager reports those in trouble first)")
    return lines


def facts(row: Row, now: float) -> list[tuple[str, str]]:
    """Return names and texts of the facts about one job; "" for those that do not apply."""
    done = row.files_total - row.files_left
    counts = f"{done} of {row.files_total} files, {size(row.bytes_total - row.bytes_left)} of {size(row.bytes_total)}"
    handed_off = row.files_total > 0
    return [
        ("reason", reason(row, now)),
        ("code", clean(row.synchronous_code)),
        ("delivered", counts if handed_off else ""),
        ("output", _synchronous(row)),
        *((_HELD[one.is_single], held(one, now)) for one in row.custody),
        ("attempt", _attempts(row)),
        ("next", f"in {until(row.next_attempt_at, now)}" if row.next_attempt_at > now else ""),
        ("expected", eta.phrase(row.eta_low_s, row.eta_high_s)),
        ("fallback", _fallback(row)),
        ("manager", clean(row.manager)),
        ("run", f"{row.run}" + (f", run again {row.reruns} times because output was lost" if row.reruns else "")),
        ("as of", f"{duration(now - row.reported_at)} ago" if row.reported_at else ""),
    ]


def _synchronous(row: Row) -> str:
    if row.synchronous:
        return "transferred before the job ended; nothing was handed off"
    is_being_sent = row.job_status == STATUS_WORDS[Status.TRANSFERRING] and row.synchronous_code
    return "being transferred while the job holds its slot; nothing was handed off" if is_being_sent else ""


def _attempts(row: Row) -> str:
    more = "; {} more did not count, because a server, a credential or the node failed"
    return (attempt(row, row.attempts_limit) + (more.format(row.excused) if row.excused else "")) * bool(row.attempts)


def _fallback(row: Row) -> str:
    url, note = clean(row.fallback), clean(row.fallback_note)
    if not url:
        return f"ignored: {note}" if note else ""
    return f"{url}, used because the destination failed: {note}" if note else f"{url}, if delivery fails"


def held(one: Holding, now: float) -> str:
    """Describe the parts of a job's output that routers hold."""
    text = f"{count(one.files, 'file')}, {size(one.size_bytes)} at {clean(one.custodians)}"
    return f"{text} for {duration(now - one.since)}"


def files_table(
    files: Sequence[FileReport], limit: int, now: float, width: int = 0, ledger: bool = False, colour: bool = False
) -> list[str]:
    """Write one line per file: its destination, plugin and progress, and its last error."""
    header = ("FILE", "SIZE", "STATE", "PLUGIN", "ATTEMPT", "NEXT", "VERIFIED", "TO", "LAST ERROR")
    cells = [
        (
            item.name,
            size(item.size_bytes),
            item.state if ledger else plain_word(item.state),
            item.plugin,
            attempt(item, limit),
            until(item.next_attempt_at, now),
            item.verified,
            item.url,
            item.error and f"{item.error} (error {item.error_code})",
        )
        for item in files
    ]
    return table(header, cells, width, colour)


def streams_table(
    streams: Iterable[StreamsReport], destinations: Iterable[Destination] = (), width: int = 0
) -> list[str]:  # fmt: skip
    """Write one line per server: its transfers, the waiting output, when that should have arrived, and the reasons."""
    header = ("SERVER", "AT ONCE", "STREAMS", "RATE", "WAITING", "ETA", "WHY")
    places = {one.server: one for one in destinations}
    cells = [
        (
            item.server,
            f"{item.files_in_flight}/{item.files_at_once}",
            f"{item.streams_in_use}/{item.streams}",
            rate(item.rate_mb_s * MB) if item.rate_mb_s else "",
            size(place.bytes_waiting) if (place := places.get(item.server)) else "",
            eta.words(place.eta_low_s, place.eta_high_s) if place else "",
            f"{item.reason} {item.grant}",
        )
        for item in streams
    ]
    return table(header, cells, width)


def servers_table(places: Iterable[Destination], width: int = 0) -> list[str]:
    """Write one line per server: the output of all nodes for it, and when that should have arrived."""
    header = ("SERVER", "NODES", "FILES", "SIZE", "RATE", "ETA")
    cells = [
        (
            total.server,
            str(total.nodes),
            str(total.files_left),
            size(total.bytes_left),
            rate(total.rate_bytes_per_s) if total.rate_bytes_per_s else "",
            eta.words(total.eta_low_s, total.eta_high_s),
        )
        for total in server_totals(places)
    ]
    return table(header, cells, width)


def bar(done: int, total: int, columns: int) -> str:
    """Draw a progress bar of this many columns. It is full only when everything is done."""
    if total <= 0:
        return "." * columns
    full = columns if done >= total else min(columns - 1, columns * max(done, 0) // total)
    return "#" * full + "." * (columns - full)


def progress_lines(rows: Sequence[Row], now: float, width: int) -> list[str]:
    """Draw a bar per job for ``--watch`` on a terminal, with the reason below it if it does not fit beside it."""
    columns = max(10, min(40, width - 90))
    lines = [total_line(rows)]
    for row in rows:
        done = row.bytes_total - row.bytes_left
        share = 100 * done // row.bytes_total if row.bytes_total else 0
        text = (
            f"{row.job:>8} {state_word(row):<23} [{bar(done, row.bytes_total, columns)}] {share:3d}% "
            f"{size(done)}/{size(row.bytes_total)} {row.files_total - row.files_left}/{row.files_total} files"
        )
        more = ""
        if row.next_attempt_at > now:
            more = f"next try in {until(row.next_attempt_at, now)}"
        elif row.eta_low_s is not None:
            more = f"expected {eta.phrase(row.eta_low_s, row.eta_high_s)}"
        more = "  ".join(filter(None, (more, reason(row, now))))
        if _columns(text) + 2 + _columns(more) <= width:
            lines.append(f"{text}  {more}".rstrip())
        else:
            lines += [text, *(_wrapped(more, width) if more else ())]
    return lines


def fit(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """Cut the lines to a terminal's size, so that they can be overwritten, and count those that do not fit."""
    room = max(rows - 1, 2)
    kept = list(lines) if len(lines) <= room else [*lines[: room - 1], f"... and {len(lines) - room + 1} more lines"]
    return [line if _columns(line) <= columns else _cut(line, columns) for line in kept]
