"""Expected ends of deliveries, from a manager's report. Pure.

Output that waits for a server goes in the order of the planner: owners take turns, and of one owner a small sandbox
goes before a large one. A report does not say how much of a running transfer has arrived. So the work before a sandbox
has a lower and an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from stageout.core.eta import Eta, estimate, latest, work_bytes
from stageout.core.states import State
from stageout.wire.custody import FlowReport, Report, Run, SandboxReport

#: States in which the time of delivery can be estimated. A failed sandbox waits for its owner.
_OPEN = frozenset({State.ACCEPTED, State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})
_GONE = frozenset({State.DELIVERED, State.HANDED_OVER, State.FAILED})


@dataclass
class _Server:
    """Work for one server.

    :param is_blocked: it cannot be reached. :param probe_at: wall clock of the next probe, 0 for none.
    :ivar waiting: for each waiting run, its work and the earlier work of its owner. :ivar of_owner: all waiting work.
    :ivar moving: for each run that is being sent, its work and the wall clock of its start.
    """

    flow: FlowReport
    is_blocked: bool
    probe_at: int
    waiting: dict[Run, float] = field(default_factory=dict)
    of_owner: dict[str, float] = field(default_factory=dict)
    moving: dict[Run, tuple[float, int]] = field(default_factory=dict)

    def add(self, sandbox: SandboxReport, amount: float) -> None:
        """Count the work of a sandbox. Add waiting sandboxes in their order."""
        began_at = max((file.began_at for file in sandbox.files if file.state == State.MOVING), default=0)
        if sandbox.state == State.MOVING and began_at:
            self.moving[sandbox.run] = (amount, began_at)
            return
        self.of_owner[sandbox.owner] = self.of_owner.get(sandbox.owner, 0.0) + amount
        self.waiting[sandbox.run] = self.of_owner[sandbox.owner]

    def before(self, sandbox: SandboxReport) -> float:
        """Return the waiting work that precedes a sandbox: its owner's, and that of others in their turns."""
        mine = self.waiting[sandbox.run]
        return mine + sum(min(mine, theirs) for owner, theirs in self.of_owner.items() if owner != sandbox.owner)


def server_of(url: str) -> str:
    """Return method and host, as managers name a server. :param url: as people see it."""
    scheme, _, rest = url.partition("://")
    return f"{re.split('[-+.]', scheme)[-1]}://{rest.partition('/')[0]}".lower()


class Backlog(NamedTuple):
    """Work of one manager for one server.

    :param counted_at: wall clock, seconds. :param probe_at: wall clock of the next probe, 0 for none.
    :param is_blocked: the server cannot be reached.
    """

    waiting_bytes: float
    moving_bytes: float
    rate_bytes_per_s: int
    spread: float
    counted_at: int
    probe_at: int
    is_blocked: bool

    def expected(self, now: float) -> Eta | None:
        """Return the time until everything for the server has arrived. :param now: wall clock, seconds."""
        if not self.waiting_bytes + self.moving_bytes:
            return None
        return estimate(
            self.waiting_bytes, self.waiting_bytes + self.moving_bytes, self.rate_bytes_per_s, self.spread,
            passed_s=now - self.counted_at, starts_in_s=self.probe_at - now, is_blocked=self.is_blocked,
        )  # fmt: skip


def backlogs(report: Report) -> dict[str, Backlog]:
    """Return the work for each server."""
    return {
        name: Backlog(
            work_bytes(server.flow.files_waiting, server.flow.bytes_waiting),
            work_bytes(server.flow.files_moving, server.flow.bytes_moving),
            server.flow.work_bytes_per_s, server.flow.spread, report.sent_at, server.probe_at, server.is_blocked,
        )
        for name, server in _servers(report).items()
    }  # fmt: skip


def for_servers(report: Report, now: float) -> dict[str, Eta]:
    """Return the time until everything for a server has arrived, by server. :param now: wall clock, seconds."""
    found = {name: backlog.expected(now) for name, backlog in backlogs(report).items()}
    return {name: expected for name, expected in found.items() if expected is not None}


def for_runs(report: Report, now: float, wanted: Collection[Run]) -> dict[Run, Eta]:
    """Return the time until a run's output has arrived, for those with enough data.

    :param now: wall clock, seconds. :param wanted: the runs to estimate.
    """
    if not wanted or not report.flows:
        return {}
    sandboxes = [
        sandbox
        for sandbox in report.sandboxes
        if sandbox.state in _OPEN and sandbox.files_left > 0 and not sandbox.paused
    ]
    servers, shares = _servers(report), {}
    for sandbox in sorted(sandboxes, key=lambda sandbox: (sandbox.bytes_left, sandbox.accepted_at)):
        shares[sandbox.run] = _by_server(sandbox, report.flows)
        for name, amount in shares[sandbox.run].items():
            if name in servers:
                servers[name].add(sandbox, amount)
    found = {}
    for sandbox in sandboxes:
        if sandbox.run in wanted:
            expected = latest([_expected(sandbox, servers.get(name), report, now) for name in shares[sandbox.run]])
            if expected is not None:
                found[sandbox.run] = expected
    return found


def _servers(report: Report) -> dict[str, _Server]:
    troubled = {one.server: one.probe_at for one in report.servers}
    return {flow.server: _Server(flow, flow.server in troubled, troubled.get(flow.server, 0)) for flow in report.flows}


def _by_server(sandbox: SandboxReport, flows: Iterable[FlowReport]) -> dict[str, float]:
    """Return the work of a sandbox by server: of all its files, as the files in the report are distributed."""
    left = [file for file in sandbox.files if file.state not in _GONE]
    total = work_bytes(sandbox.files_left, sandbox.bytes_left)
    if not left:
        names = [flow.server for flow in flows]
        return {names[0]: total} if len(names) == 1 else {}
    known = sum(work_bytes(1, max(0, file.size_bytes)) for file in left)
    parts: dict[str, float] = {}
    for file in left:
        name = server_of(file.url)
        parts[name] = parts.get(name, 0.0) + total * work_bytes(1, max(0, file.size_bytes)) / known
    return parts


def _expected(sandbox: SandboxReport, server: _Server | None, report: Report, now: float) -> Eta | None:
    if server is None:
        return None
    if sandbox.run in server.moving:
        own, began_at = server.moving[sandbox.run]
        # Simultaneous transfers share the rate.
        low = high = sum(min(amount, own) for amount, _ in server.moving.values())
        passed_s = now - began_at
    else:
        low = server.before(sandbox)
        high = low + sum(amount for amount, _ in server.moving.values())
        passed_s = now - report.sent_at
    return estimate(
        low, high, server.flow.work_bytes_per_s, server.flow.spread, passed_s=passed_s,
        starts_in_s=max(sandbox.next_attempt_at, server.probe_at) - now,
        is_blocked=server.is_blocked or sandbox.state == State.RETRY_WAIT or sandbox.run.schedd in report.unleased,
    )  # fmt: skip
