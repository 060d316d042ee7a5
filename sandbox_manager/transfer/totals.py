"""Totals of all transfers since the start, for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from sandbox_manager.scheduling.retry import BatchOutcome
from stageout.core.errors import OF_NODE, ErrorClass

DELIVERED, HANDED_OVER, NODE_FAULT = "delivered", "handed_over", "node_fault"


class TransferTotals:
    """Attempts, bytes and seconds by plugin.

    :ivar attempts: files by plugin and result: an error class, :data:`DELIVERED`, :data:`HANDED_OVER`, or
        :data:`NODE_FAULT` where the class would blame a server for a fault of the node.
    """

    def __init__(self) -> None:
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.delivered_bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

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
