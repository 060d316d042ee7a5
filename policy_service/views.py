"""The views of the service: figures for Prometheus and a page for people."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from policy_service.book import Book
from policy_service.model import Lease

_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #bbb;padding:.2em .7em;text-align:left}td.n{text-align:right}.bad{color:#a00}"
)


@dataclass(frozen=True)
class Picture:
    """The book at one moment."""

    leases: tuple[tuple[Lease, float], ...]
    max_pair: int
    policy: str
    problems: tuple[str, ...]
    policy_ok: bool
    reconfig_ok: bool
    expired: int

    @classmethod
    def of(cls, book: Book) -> Picture:
        """Taken in the book's thread."""
        leases = tuple((lease, book.left_s(lease)) for lease in book.leases())
        chosen, reconfig = book.decider.problem, book.reconfig_problem
        problems = (
            *([f"{chosen}. The greedy policy decides."] if chosen else []),
            *([f"The last reconfig was refused, the settings before it count: {reconfig}"] if reconfig else []),
        )
        policy, max_pair = book.decider.name, book.rules.limits.max_pair
        return cls(leases, max_pair, policy, problems, not chosen, not reconfig, book.expired)

    def pairs(self) -> dict[tuple[str, str], list[Lease]]:
        """Leases by source and destination."""
        found: dict[tuple[str, str], list[Lease]] = defaultdict(list)
        for lease, _ in self.leases:
            found[lease.pair].append(lease)
        return found


def metrics(picture: Picture, requests: Mapping[tuple[str, int], int]) -> str:
    """Prometheus text format."""
    pairs = {_labels(source=key[0], destination=key[1]): leases for key, leases in picture.pairs().items()}
    counted = {labels: sum(lease.counted for lease in leases) for labels, leases in pairs.items()}
    holding = {labels: sum(lease.counted > 0 for lease in leases) for labels, leases in pairs.items()}
    waiting = {labels: len(leases) - holding[labels] for labels, leases in pairs.items()}
    rates = {labels: sum(lease.rate_mb_s or 0.0 for lease in leases) for labels, leases in pairs.items()}
    asked = {_labels(operation=key[0], status=str(key[1])): count for key, count in sorted(requests.items())}
    return "".join(
        (
            _metric("streams_granted", "gauge", "Streams that are granted, or still in use.", counted),
            _metric("streams_max", "gauge", "Most streams of any pair.", {"": picture.max_pair}),
            _metric("clients_holding", "gauge", "Clients that hold streams.", holding),
            _metric("clients_waiting", "gauge", "Clients that wait for streams.", waiting),
            _metric("rate_mb_per_second", "gauge", "Sum of the rates last reported.", rates),
            _metric("policy_ok", "gauge", "1 while the chosen policy decides.", {"": int(picture.policy_ok)}),
            _metric("reconfig_ok", "gauge", "0 after a reconfig was refused.", {"": int(picture.reconfig_ok)}),
            _metric("leases_expired_total", "counter", "Leases that were not renewed.", {"": picture.expired}),
            _metric("requests_total", "counter", "Requests by operation and status.", asked),
        )
    )


def _metric(name: str, kind: str, doc: str, values: Mapping[str, float]) -> str:
    full = f"stageout_policy_{name}"
    lines = [
        f"# HELP {full} {doc}",
        f"# TYPE {full} {kind}",
        *(f"{full}{labels} {value}" for labels, value in values.items()),
    ]
    return "\n".join(lines) + "\n"


def _labels(**labels: str) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def page(picture: Picture) -> str:
    """Return the table of leases as HTML."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Streams</title><style>{_STYLE}</style>",
        f"<h1>Streams</h1><p>Policy: {html.escape(picture.policy)}, at most {picture.max_pair} between two sites.</p>",
    ]
    parts += [f"<p class=bad>{html.escape(problem)}</p>" for problem in picture.problems]
    left = {lease.id: left_s for lease, left_s in picture.leases}
    for (source, destination), leases in picture.pairs().items():
        total = sum(lease.counted for lease in leases)
        parts.append(f"<h2>{html.escape(source)} &rarr; {html.escape(destination)}: {total} of {picture.max_pair}</h2>")
        parts.append(_table(leases, left))
    if not picture.leases:
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
