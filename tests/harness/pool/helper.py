"""Runs inside the access point and answers questions about the pool: one JSON line in, one JSON line out.

Starting a tool costs a tenth of a second each time, and tests ask often; this process keeps the bindings loaded.
It is copied into the node as one file, so it imports nothing of the product.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

import classad2
import htcondor2


def plain(value: Any) -> Any:
    """JSON form of a ClassAd value: expressions as their text, undefined as None."""
    # Undefined and Error are integers too: they come first.
    if isinstance(value, classad2.Value):
        return None if value == classad2.Value.Undefined else "error"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "items"):
        return {name: plain(item) for name, item in value.items()}
    return str(value)


def query_jobs(constraint: str, projection: list[str]) -> Any:
    """Jobs in the queue."""
    return [plain(ad) for ad in htcondor2.Schedd().query(constraint=constraint, projection=projection)]


def query_collector(kind: str, constraint: str, projection: list[str]) -> Any:
    """Ads of a type ("Startd", "Schedd", "Generic", ...) in the collector."""
    ads = htcondor2.Collector().query(getattr(htcondor2.AdType, kind), constraint=constraint, projection=projection)
    return [plain(ad) for ad in ads]


def act(action: str, job: str, reason: str) -> Any:
    """Hold, Release, Remove, RemoveX, Vacate or VacateFast jobs (a constraint)."""
    # A plain string as reason is lost in the bindings (25.14 and 23.9); a pair of reason and sub-code is not.
    result = htcondor2.Schedd().act(getattr(htcondor2.JobAction, action), job, reason=(reason or "by the test", 0))
    return plain(result)


def edit(job: str, attributes: dict[str, str]) -> Any:
    """Change attributes; all values are expressions."""
    schedd = htcondor2.Schedd()
    return [plain(schedd.edit(job, name, value)) for name, value in attributes.items()]


def reschedule() -> Any:
    """Ask for a negotiation now."""
    return htcondor2.Schedd().reschedule()


def history_file(name: str, constraint: str, newest: int) -> Any:
    """Ads of SPOOL/<name> (rotated parts too) that match, newest first; ``Banner`` is the record's title line.

    Read from the file: a question to the schedd would start a condor_history for each.
    """
    wanted = classad2.ExprTree(constraint)
    found: list[Any] = []
    current = Path(htcondor2.param["SPOOL"]) / name
    for path in [current, *sorted(current.parent.glob(f"{name}.2*"), reverse=True)]:
        records = split_records(path.read_text(errors="replace")) if path.exists() else []
        for banner, text in reversed(records):
            ad = classad2.parseOne(text)
            if len(found) < newest and matches(ad, wanted):
                found.append({**plain(ad), "Banner": banner})
    return found


def split_records(text: str) -> list[tuple[str, str]]:
    """(banner, attributes) of each complete record of a history file."""
    records: list[tuple[str, str]] = []
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("***"):
            records.append((line.strip("* "), "\n".join(lines)))
            lines = []
        else:
            lines.append(line)
    return records


def matches(ad: Any, wanted: Any) -> bool:
    """True when the constraint holds for the ad."""
    return wanted.eval(ad) is True


def events(path: str) -> Any:
    """Events of a job's user log, oldest first."""
    if not Path(path).exists():
        return []
    log = htcondor2.JobEventLog(path)
    result = []
    for event in log.events(stop_after=0):
        fields = {name: plain(event[name]) for name in event}
        fields.update(Type=int(event.type), Name=event.type.name, Time=event.timestamp)
        result.append({**fields, "Job": f"{event.cluster}.{event.proc}"})
    return result


OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (query_jobs, query_collector, act, edit, reschedule, history_file, events)
}


def answer(line: str) -> dict[str, Any]:
    """Answer of one request: ``{"value": ...}`` or ``{"error": text}``."""
    try:
        request = json.loads(line)
        return {"value": OPERATIONS[request["op"]](**request["args"])}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(lines: Any | None = None) -> None:
    """Answer until the input ends."""
    # Output of the bindings must not come between the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in lines or iter(sys.stdin.readline, ""):
        replies.write(json.dumps(answer(line)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
