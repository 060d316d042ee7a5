"""Totals of all transfers since the start, for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from sandbox_manager.scheduling.retry import BatchOutcome
from stageout.core.errors import OF_NODE, ErrorClass
from stageout.core.metrics import OTHER, FairLabels, host_of

DELIVERED, HANDED_OVER, NODE_FAULT = "delivered", "handed_over", "node_fault"
_RETRIED, _FAILED = "retried", "failed"
_RESULTS = (DELIVERED, HANDED_OVER, _RETRIED, _FAILED, NODE_FAULT)


class ServerTotals:
    """Attempts and bytes by server, for a bounded number of servers.

    :ivar attempts: files by label and result: :data:`DELIVERED`, :data:`HANDED_OVER`, "retried", "failed" for those
        that were given up, and :data:`NODE_FAULT` for attempts that say nothing of the server.
    """

    def __init__(self) -> None:
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.delivered_bytes: Counter[str] = Counter()
        self._labels = FairLabels(self._forget)
        self._begin(OTHER)

    def begin(self, server: str, owner: str, now_s: float) -> str:
        """Return the label of a server. Its counters exist from then on. :param now_s: monotonic clock."""
        label = self._labels.label(host_of(server), owner, now_s)
        if label not in self.delivered_bytes:
            self._begin(label)
        return label

    def add(self, server: str, owner: str, outcome: BatchOutcome, now_s: float) -> None:
        """Count a batch that a plugin has answered."""
        label = self.begin(server, owner, now_s)
        self.attempts[label, HANDED_OVER] += len(outcome.handed_over)
        self.attempts[label, _FAILED] += len(outcome.failed)
        for item in outcome.waiting:
            is_of_node = item.of_node or ErrorClass.from_code(item.error_code) in OF_NODE
            self.attempts[label, NODE_FAULT if is_of_node else _RETRIED] += 1
        self._add_delivered(label, len(outcome.delivered), outcome.delivered_bytes)

    def add_part(self, server: str, owner: str, sizes: Sequence[int], now_s: float) -> None:
        """Count what had arrived of a batch that was stopped. :param sizes: bytes of its files that arrived."""
        self._add_delivered(self.begin(server, owner, now_s), len(sizes), sum(sizes))

    def _add_delivered(self, label: str, files: int, size_bytes: int) -> None:
        self.attempts[label, DELIVERED] += files
        self.delivered_bytes[label] += size_bytes

    def _begin(self, label: str) -> None:
        """Let the counters of a label exist: Prometheus does not see an increase from nothing to one."""
        self.attempts.update(dict.fromkeys(((label, result) for result in _RESULTS), 0))
        self.delivered_bytes[label] += 0

    def _forget(self, label: str) -> None:
        del self.delivered_bytes[label]
        for result in _RESULTS:
            del self.attempts[label, result]


class TransferTotals:
    """Attempts, bytes and seconds by plugin.

    :ivar attempts: files by plugin and result: an error class, :data:`DELIVERED`, :data:`HANDED_OVER`, or
        :data:`NODE_FAULT` where the class would blame a server for a fault of the node.
    """

    def __init__(self) -> None:
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.delivered_bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def begin(self, plugin: str) -> None:
        """Let the counters of a plugin exist. :param plugin: path of the executable."""
        self.add_part(plugin, (), 0.0)

    def add(self, plugin: str, outcome: BatchOutcome, took_s: float) -> None:
        """Count a batch that a plugin has answered. :param plugin: path of the executable."""
        name = self._took(plugin, took_s)
        self.attempts[name, DELIVERED] += len(outcome.delivered)
        self.attempts[name, HANDED_OVER] += len(outcome.handed_over)
        self.delivered_bytes[name] += outcome.delivered_bytes
        for item in (*outcome.waiting, *outcome.failed):
            kind = ErrorClass.from_code(item.error_code)
            is_clear = kind in OF_NODE or not item.of_node
            self.attempts[name, kind.name.lower() if is_clear else NODE_FAULT] += 1

    def add_part(self, plugin: str, sizes: Sequence[int], took_s: float) -> None:
        """Count what had arrived of a batch that was stopped. :param sizes: bytes of its files that arrived."""
        name = self._took(plugin, took_s)
        self.attempts[name, DELIVERED] += len(sizes)
        self.delivered_bytes[name] += sum(sizes)

    def _took(self, plugin: str, took_s: float) -> str:
        name = PurePath(plugin).name
        self.seconds[name] = self.seconds.get(name, 0.0) + took_s
        return name
