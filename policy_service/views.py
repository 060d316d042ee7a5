"""The views of the service: figures for Prometheus and a page for people."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from policy_service.lease_table import LeaseTable
from policy_service.model import Lease
from stageout.core.metrics import OTHER, Readings

_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #bbb;padding:.2em .7em;text-align:left}td.n{text-align:right}.bad{color:#a00}"
)
_PREFIX = "stageout_policy"
_OF_PAIRS: tuple[tuple[str, Callable[[Lease], float]], ...] = (
    ("streams_granted", lambda lease: lease.counted),
    ("clients_holding", lambda lease: lease.counted > 0),
    ("clients_waiting", lambda lease: not lease.counted),
    ("rate_bytes_per_second", lambda lease: (lease.rate_mb_s or 0.0) * 1e6),
)
#: Pairs of sites with labels of their own.
_PAIRS = 50
_FIRST_REFUSAL = 400


@dataclass(frozen=True)
class LeaseSnapshot:
    """The lease table at one moment."""

    leases: tuple[tuple[Lease, float], ...]
    max_pair: int
    policy: str
    problems: tuple[str, ...]
    policy_ok: bool
    reconfig_ok: bool
    expired: int

    @classmethod
    def of(cls, table: LeaseTable) -> LeaseSnapshot:
        """Take a snapshot. Call it in the table's thread."""
        leases = tuple((lease, table.left_s(lease)) for lease in table.leases())
        chosen, reconfig = table.policy.problem, table.reconfig_problem
        problems = (
            *([f"{chosen}. The greedy policy decides."] if chosen else []),
            *([f"The last reconfig was refused, the settings before it count: {reconfig}"] if reconfig else []),
        )
        policy, max_pair = table.policy.name, table.rules.limits.max_pair
        return cls(leases, max_pair, policy, problems, not chosen, not reconfig, table.expired)

    def pairs(self) -> dict[tuple[str, str], list[Lease]]:
        """Group the leases by source and destination."""
        found: dict[tuple[str, str], list[Lease]] = defaultdict(list)
        for lease, _ in self.leases:
            found[lease.pair].append(lease)
        return found


def readings(snapshot: LeaseSnapshot, requests: Mapping[tuple[str, int], int]) -> Readings:
    """Return the metrics of one moment. :param requests: counts by operation and status."""
    found = Readings()
    pairs = snapshot.pairs()
    labels = _labels(pairs)
    for name, value in _OF_PAIRS:
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for pair, leases in pairs.items():
            sums[labels[pair]] += sum(value(lease) for lease in leases)
        found.put_each(f"{_PREFIX}_{name}", sums)
    found.put(f"{_PREFIX}_streams_max", snapshot.max_pair)
    found.put(f"{_PREFIX}_policy_ok", snapshot.policy_ok)
    found.put(f"{_PREFIX}_reconfig_ok", snapshot.reconfig_ok)
    found.put(f"{_PREFIX}_leases_expired_total", snapshot.expired)
    found.put_each(f"{_PREFIX}_requests_total", requests)
    refused = {status for _, status in requests if status >= _FIRST_REFUSAL}
    counts = {status: sum(count for (_, other), count in requests.items() if other == status) for status in refused}
    found.put_all(f"{_PREFIX}_refusals_total", counts)
    return found


def _labels(pairs: Mapping[tuple[str, str], Sequence[Lease]]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the labels of each pair: its own for the pairs with most streams."""
    largest = sorted(pairs, key=lambda pair: (-sum(lease.counted for lease in pairs[pair]), pair))[:_PAIRS]
    return {pair: pair if pair in largest else (OTHER, OTHER) for pair in pairs}


def page(snapshot: LeaseSnapshot) -> str:
    """Return the table of leases as HTML."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Streams</title><style>{_STYLE}</style>",
        f"<h1>Streams</h1><p>Policy: {html.escape(snapshot.policy)}, at most {snapshot.max_pair} between two sites."
        "</p>",
    ]
    parts += [f"<p class=bad>{html.escape(problem)}</p>" for problem in snapshot.problems]
    left = {lease.id: left_s for lease, left_s in snapshot.leases}
    for (source, destination), leases in snapshot.pairs().items():
        total = sum(lease.counted for lease in leases)
        parts.append(
            f"<h2>{html.escape(source)} &rarr; {html.escape(destination)}: {total} of {snapshot.max_pair}</h2>"
        )
        parts.append(_table(leases, left))
    if not snapshot.leases:
        parts.append("<p>Nobody has streams, and nobody waits.</p>")
    return "\n".join(parts) + "</html>\n"


def _table(leases: Iterable[Lease], left: Mapping[str, float]) -> str:
    heads = ("Owner", "Client", "Granted", "In use", "Wanted", "MB/s", "Ends in s")
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for lease in leases:
        rate = "" if lease.rate_mb_s is None else f"{lease.rate_mb_s:.1f}"
        granted = str(lease.streams) if lease.counted else "waits"
        figures = (granted, str(lease.in_use), str(lease.wanted), rate, f"{left[lease.id]:.0f}")
        names = "".join(f"<td>{html.escape(name)}</td>" for name in (lease.owner, lease.client))
        rows.append(f"<tr>{names}{''.join(f'<td class=n>{figure}</td>' for figure in figures)}</tr>")
    return f"<table>{''.join(rows)}</table>"
