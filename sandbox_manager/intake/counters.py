"""Counts of hand-offs accepted and refused lately, by reason."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Any

WINDOW_S = 3600
_KEPT = 20_000
_REASONS_SHOWN = 5
_NUMBER = re.compile(r"[0-9]+([.][0-9]+)*")


class HandoffCounters:
    """The outcomes of the last hour, in memory; the oldest go when there are very many.

    :ivar accepted_total: since the start. :ivar refused_total: likewise, by code of the reason.
    """

    def __init__(self) -> None:
        self.accepted_total = 0
        self.refused_total: Counter[str] = Counter()
        self._outcomes: deque[tuple[float, str, str]] = deque(maxlen=_KEPT)
        self._copies: deque[tuple[float, int, float]] = deque(maxlen=_KEPT)

    def accepted(self, now_s: float) -> None:
        """Count a hand-off that was accepted."""
        self.accepted_total += 1
        self._outcomes.append((now_s, "", ""))

    def refused(self, now_s: float, reason: str, code: str) -> None:
        """Count a refused hand-off. Reasons that differ in numbers only, such as sizes, count as one."""
        self.refused_total[code] += 1
        self._outcomes.append((now_s, code, _NUMBER.sub("N", reason)))

    def copied(self, now_s: float, size_bytes: int, took_s: float) -> None:
        """Count the bytes that a hand-off has copied, because they could not be linked."""
        self._copies.append((now_s, size_bytes, took_s))

    def facts(self, now_s: float) -> dict[str, Any]:
        """Return the counts for people, the commonest reason first."""
        self._forget(now_s)
        reasons = Counter(reason for _, _, reason in self._outcomes if reason)
        common = [{"Reason": reason, "Count": count} for reason, count in reasons.most_common(_REASONS_SHOWN)]
        refused = sum(reasons.values())
        return {
            "HandoffsTried": len(self._outcomes),
            "HandoffsRefused": refused,
            "HandoffRefusals": common,
            "HandoffsCopied": len(self._copies),
            "HandoffBytesCopied": sum(size_bytes for _, size_bytes, _ in self._copies),
            "HandoffCopyMs": round(sum(took_s for _, _, took_s in self._copies) * 1000),
        }

    def figures(self, now_s: float) -> dict[str, Any]:
        """Return the counts for the slot ads: hand-offs that were tried, and those that were refused for each code."""
        self._forget(now_s)
        codes = Counter(code for _, code, _ in self._outcomes if code)
        return {"StageOutHandoffs": len(self._outcomes), "StageOutSynchronous": dict(codes.most_common())}

    def _forget(self, now_s: float) -> None:
        while self._outcomes and self._outcomes[0][0] < now_s - WINDOW_S:
            self._outcomes.popleft()
        while self._copies and self._copies[0][0] < now_s - WINDOW_S:
            self._copies.popleft()
