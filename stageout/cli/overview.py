"""The figures of ``stageout top``: jobs by cluster and destination, and their rates. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stageout.cli.render import bar, clean, table
from stageout.cli.rows import Row
from stageout.core.states import State
from stageout.core.units import count, duration, size
from stageout.core.units import rate as rate_text

#: Seconds over which rates are measured. A file's bytes count when it has arrived completely.
WINDOW_S = 60.0
_BAR = 20
_REASONS = 5
_KINDS = {
    State.MOVING.value: "moving",
    State.HANDED_OVER.value: "moving",
    State.RETRY_WAIT.value: "retry",
    State.FAILED.value: "failed",
    State.LOST.value: "failed",
    State.DELIVERED.value: "delivered",
    State.RELEASED.value: "delivered",
    State.CANCELLED.value: "ended",
    State.SUPERSEDED.value: "ended",
    "None": "unreported",
}
KINDS = ("waiting", "moving", "retry", "failed", "delivered", "ended", "unreported")


class Key(NamedTuple):
    """A line of the table: jobs of one cluster whose output goes to one server. :param server: "several" for more."""

    cluster: int
    owner: str
    server: str


@dataclass
class Group:
    """The jobs of a line.

    :ivar jobs: by kind of state. :ivar rate: bytes per second; None before enough measurements.
    """

    key: Key
    jobs: Counter[str] = field(default_factory=Counter)
    bytes_total: int = 0
    bytes_left: int = 0
    files_left: int = 0
    rate: float | None = None


def groups_of(rows: Iterable[Row], servers: Mapping[str, str]) -> list[Group]:
    """Return the lines, those with the most bytes left first. :param servers: servers of jobs, by ``cluster.proc``."""
    found: dict[Key, Group] = {}
    for row in rows:
        key = Key(int(row.job.partition(".")[0]), row.owner, servers.get(row.job, ""))
        group = found.setdefault(key, Group(key))
        group.jobs[_KINDS.get(row.state, "waiting")] += 1
        group.bytes_total += row.bytes_total
        group.bytes_left += row.bytes_left
        group.files_left += row.files_left
    return sorted(found.values(), key=lambda group: (-group.bytes_left, group.key))


class Rates:
    """Bytes that arrived in the last minute, or since the previous query when daemons are slow, by line of the
    table.
    """

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self._arrived: deque[tuple[float, float, Counter[Key]]] = deque()  # from, until, and the bytes

    def take(self, now_s: float, rows: Sequence[Row], servers: Mapping[str, str], groups: Iterable[Group]) -> None:
        """Compare with the previous query, and set the rates of the lines. :param now_s: monotonic, seconds."""
        arrived: Counter[Key] = Counter()
        for row in rows:
            before = self._left.get(row.global_id, row.bytes_left)
            key = Key(int(row.job.partition(".")[0]), row.owner, servers.get(row.job, ""))
            arrived[key] += max(0, before - row.bytes_left)
        self._left = {row.global_id: row.bytes_left for row in rows}
        self._arrived.append((self._arrived[-1][1] if self._arrived else now_s, now_s, arrived))
        while self._arrived[0][1] < now_s - WINDOW_S:
            self._arrived.popleft()
        for group in groups:
            group.rate = self._rate(group.key)

    def _rate(self, key: Key) -> float | None:
        looked_s = self._arrived[-1][1] - self._arrived[0][0]
        moved_bytes = sum(arrived[key] for _, _, arrived in self._arrived)
        return moved_bytes / looked_s if looked_s and moved_bytes else None


def lines(groups: Sequence[Group], rows: Sequence[Row], notes: Iterable[str]) -> list[str]:
    """Return the table for a person, and the most frequent reasons."""
    found = [headline(groups), *(f"Note: {clean(note)}" for note in notes)]
    if groups:
        found += ["", *table(_HEADER, map(_cells, groups))]
    reasons = Counter(clean(row.reason) for row in rows if row.reason and _KINDS.get(row.state) in ("retry", "failed"))
    if reasons:
        found += ["", *(f"{count(number, 'job')}: {reason}" for reason, number in reasons.most_common(_REASONS))]
    return found


_HEADER = ("CLUSTER", "OWNER", "SERVER", "WAITING", "MOVING", "RETRY", "FAILED", "LEFT", "RATE", "DONE")


def headline(groups: Sequence[Group]) -> str:
    """Return the sums in one line."""
    jobs, left = sum(sum(group.jobs.values()) for group in groups), sum(group.bytes_left for group in groups)
    rates = [group.rate for group in groups if group.rate is not None]
    text = f"{count(jobs, 'job')} in {count(len({group.key.cluster for group in groups}), 'cluster')}; "
    text += f"{count(sum(group.files_left for group in groups), 'file')}, {size(left)} still to deliver"
    return f"{text}; {rate_text(sum(rates))} in the last {duration(WINDOW_S)}" if rates else text


def _cells(group: Group) -> list[str]:
    counts = [str(group.jobs[kind]) for kind in ("waiting", "moving", "retry", "failed")]
    rate = "" if group.rate is None else rate_text(group.rate)
    done = bar(group.bytes_total - group.bytes_left, group.bytes_total, _BAR)
    return [str(group.key.cluster), group.key.owner, group.key.server, *counts, size(group.bytes_left), rate, done]


def as_json(group: Group) -> dict[str, object]:
    """Return the fields of a line for programs."""
    return {
        **group.key._asdict(),
        **{kind: group.jobs[kind] for kind in KINDS},
        "files_left": group.files_left,
        "bytes_total": group.bytes_total,
        "bytes_left": group.bytes_left,
    }
