"""The views of the service: figures for Prometheus and a page for people."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from policy_service.book import Book
from policy_service.model import Lease

_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #bbb;padding:.2em .7em;text-align:left}td.n{text-align:right}.bad{color:#a00}"
)
_PREFIX = "stageout_policy"
_OF_PAIRS: tuple[tuple[str, str, Callable[[Lease], float]], ...] = (
    ("streams_granted", "Streams that are granted, or still in use.", lambda lease: lease.counted),
    ("clients_holding", "Clients that hold streams.", lambda lease: lease.counted > 0),
    ("clients_waiting", "Clients that wait for streams.", lambda lease: not lease.counted),
    ("rate_bytes_per_second", "Sum of the rates last reported.", lambda lease: (lease.rate_mb_s or 0.0) * 1e6),
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


def metrics(picture: Picture, requests: Mapping[tuple[str, int], int]) -> tuple[bytes, str]:
    """Return the metrics in Prometheus' text format, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(picture, requests))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Metrics(Collector):
    """The metrics of one moment."""

    def __init__(self, picture: Picture, requests: Mapping[tuple[str, int], int]) -> None:
        self._picture = picture
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its values."""
        now = self._picture
        yield from self._of_pairs(now.pairs())
        yield GaugeMetricFamily(f"{_PREFIX}_streams_max", "Most streams of any pair.", now.max_pair)
        yield GaugeMetricFamily(f"{_PREFIX}_policy_ok", "1 while the chosen policy decides.", now.policy_ok)
        yield GaugeMetricFamily(f"{_PREFIX}_reconfig_ok", "0 after a reconfig was refused.", now.reconfig_ok)
        yield CounterMetricFamily(f"{_PREFIX}_leases_expired", "Leases that were not renewed.", now.expired)
        asked = CounterMetricFamily(
            f"{_PREFIX}_requests", "Requests by operation and status.", labels=["operation", "status"]
        )
        for (operation, status), count in sorted(self._requests.items()):
            asked.add_metric([operation, str(status)], count)
        yield asked

    def _of_pairs(self, pairs: Mapping[tuple[str, str], list[Lease]]) -> Iterator[Metric]:
        for name, doc, value in _OF_PAIRS:
            family = GaugeMetricFamily(f"{_PREFIX}_{name}", doc, labels=["source", "destination"])
            for pair, leases in pairs.items():
                family.add_metric(pair, sum(value(lease) for lease in leases))
            yield family


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
