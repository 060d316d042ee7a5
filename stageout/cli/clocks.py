"""Clocks of several machines: what another one says of times, as the clock of this one would tell them. Pure.

The difference between the clocks of a node and the collector is known without a question
(:mod:`stageout.wire.clocks`). The difference between the collector's clock and this one takes some, for a collector
only says whether an expression is true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stageout.wire.custody import FileReport, Report, SandboxReport, ServerReport
from stageout.wire.deposits import read_holdings

#: Nobody minds so much; within it two questions are enough.
_ALIKE_S = 5
_MOST_S = 1 << 31


def collector_ahead_s(is_at_least: Callable[[int], bool]) -> int:
    """Measure by how much the collector's clock is ahead; 0 for a few seconds, and where it is not known.

    Right after it was started a collector has no ad of its own, and so nothing to be asked of.

    :param is_at_least: asks the collector whether it is ahead by so many seconds (negative: behind by less).
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
    """Move all times of a report by some seconds. A value that is no time, such as 0 for none, stays."""
    if not by_s:
        return report
    return replace(
        report,
        sent_at=report.sent_at + by_s,
        sandboxes=tuple(_sandbox(one, by_s) for one in report.sandboxes),
        servers=tuple(_server(one, by_s) for one in report.servers),
    )


def _sandbox(box: SandboxReport, by_s: int) -> SandboxReport:
    holdings = (replace(one, since=one.since + by_s) for one in read_holdings(box.holdings))
    return replace(
        box,
        next_attempt_at=_later(box.next_attempt_at, by_s),
        accepted_at=_later(box.accepted_at, by_s),
        confirmed_at=_later(box.confirmed_at, by_s),
        ended_at=_later(box.ended_at, by_s),
        files=tuple(_file(one, by_s) for one in box.files),
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
