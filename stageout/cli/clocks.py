"""Conversion of times from other machines' clocks to the clock of this machine. Pure.

Reports contain the difference between the clocks of a node and the collector (:mod:`stageout.wire.clocks`). The
difference between the collector's clock and this machine's is measured by queries, because a collector only evaluates
expressions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stageout.wire.custody import FileReport, Report, SandboxReport, ServerReport
from stageout.wire.deposits import read_holdings

#: Differences up to this many seconds do not matter. Two queries confirm them.
_ALIKE_S = 5
_MOST_S = 1 << 31


def collector_ahead_s(is_at_least: Callable[[int], bool]) -> int:
    """Measure by how many seconds the collector's clock is ahead. Return 0 for a small difference, or for an unknown
    one.

    Right after its start a collector has no ad of its own, so that no expression can be evaluated.

    :param is_at_least: asks the collector whether it is ahead by at least this many seconds (negative: behind by less).
    """
    if not is_at_least(-_ALIKE_S):
        low, high = -_MOST_S, -_ALIKE_S
        step = 2 * _ALIKE_S
        while step < _MOST_S and not is_at_least(-step):
            high, step = -step, 2 * step
        low = max(low, -step)
        if low == -_MOST_S and not is_at_least(low):
            return 0
    elif is_at_least(_ALIKE_S + 1):
        low, high, step = _ALIKE_S + 1, _MOST_S, 2 * _ALIKE_S
        while step < _MOST_S and is_at_least(step):
            low, step = step, 2 * step
        high = min(high, step)
    else:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_at_least(middle) else (low, middle)
    return low


def shifted(report: Report, by_s: int) -> Report:
    """Shift all times of a report by some seconds. A value that is no time, such as 0 for none, stays."""
    if not by_s:
        return report
    return replace(
        report,
        sent_at=report.sent_at + by_s,
        sandboxes=tuple(_sandbox(one, by_s) for one in report.sandboxes),
        servers=tuple(_server(one, by_s) for one in report.servers),
    )


def _sandbox(sandbox: SandboxReport, by_s: int) -> SandboxReport:
    holdings = (replace(one, since=one.since + by_s) for one in read_holdings(sandbox.holdings))
    return replace(
        sandbox,
        next_attempt_at=_later(sandbox.next_attempt_at, by_s),
        accepted_at=_later(sandbox.accepted_at, by_s),
        confirmed_at=_later(sandbox.confirmed_at, by_s),
        ended_at=_later(sandbox.ended_at, by_s),
        files=tuple(_file(one, by_s) for one in sandbox.files),
        holdings=tuple(map(str, holdings)),
    )


def _file(file: FileReport, by_s: int) -> FileReport:
    return replace(
        file,
        next_attempt_at=_later(file.next_attempt_at, by_s),
        began_at=_later(file.began_at, by_s),
        ended_at=_later(file.ended_at, by_s),
    )


def _server(server: ServerReport, by_s: int) -> ServerReport:
    return replace(server, since_at=_later(server.since_at, by_s), probe_at=_later(server.probe_at, by_s))


def _later(at: int, by_s: int) -> int:
    return at + by_s if at else 0
