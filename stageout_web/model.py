"""The pool as the page shows it: compact, so that 100,000 sandboxes fit into memory. Pure.

A report's text stays compressed. Names of files and URLs come out of it only when somebody looks at one job.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stageout.core.eta import Eta, at_least
from stageout.core.metrics import host_of
from stageout.core.states import State
from stageout.wire.custody import (
    AD_LIFETIME_S,
    JobKey,
    Report,
    Run,
    SandboxReport,
    ServerReport,
    is_job_name,
    job_id_of,
    left_jobs_in,
    read_report,
    schedd_of,
)
from stageout.wire.expected import Backlog, backlogs
from stageout.wire.matters import NodeFacts, PoolFacts, is_silent
from stageout.wire.services import Letters, PolicyReport, RouterReport, Service

#: Groups of states, as the page counts them.
WAITING, MOVING, DELIVERED, TROUBLE, GONE = "waiting", "moving", "delivered", "trouble", "gone"
#: Selects output whose job has left the queue, in whatever group.
LEFT = "left"
GROUP_OF: dict[str, str] = {
    **{state.value: WAITING for state in State},
    State.MOVING.value: MOVING,
    State.DELIVERED.value: DELIVERED,
    State.RELEASED.value: DELIVERED,
    State.FAILED.value: TROUBLE,
    State.LOST.value: TROUBLE,
    State.CANCELLED.value: GONE,
    State.SUPERSEDED.value: GONE,
}
#: States after which a sandbox that leaves the reports was delivered. A report may be replaced before it is read.
_LAST_BEFORE_DELIVERY = frozenset({State.LEASED.value, State.MOVING.value, State.HANDED_OVER.value})
_COMPRESSION = 1


class SandboxSummary(NamedTuple):
    """A sandbox. Times are wall clock, in seconds.

    :param number: of the run. :param server: host and port of its first URL. :param next_attempt_at: 0 for none.
    :param accounting_group: "" without one. :param trouble_since_at: 0 without trouble.
    """

    job: str
    number: int
    owner: str
    state: str
    server: str
    files_left: int
    bytes_total: int
    bytes_left: int
    error_code: int
    next_attempt_at: int
    accepted_at: int
    accounting_group: str
    trouble_since_at: int
    is_paused: bool = False

    @property
    def code(self) -> int:
        """Return the code of its last failure, 0 without one."""
        return self.error_code

    @property
    def group(self) -> str:
        """Return the group of its state."""
        return GROUP_OF.get(self.state, WAITING)

    @property
    def run(self) -> Run:
        """Return the run."""
        return Run(self.job, self.number, self.owner)

    @property
    def job_id(self) -> str:
        """Return ``cluster.proc``."""
        return job_id_of(self.job) if is_job_name(self.job) else self.job

    @property
    def schedd(self) -> str:
        """Return the name of the schedd."""
        return schedd_of(self.job)


@dataclass
class Tally:
    """Sandboxes in each group, and their bytes."""

    waiting: int = 0
    moving: int = 0
    delivered: int = 0
    trouble: int = 0
    gone: int = 0
    bytes_left: int = 0

    def add(self, sandbox: SandboxSummary) -> None:
        """Count one sandbox."""
        group = sandbox.group
        setattr(self, group, getattr(self, group) + 1)
        if group in (WAITING, MOVING, TROUBLE):
            self.bytes_left += sandbox.bytes_left

    def add_all(self, other: Tally) -> None:
        """Count all that another tally counted."""
        self.waiting += other.waiting
        self.moving += other.moving
        self.delivered += other.delivered
        self.trouble += other.trouble
        self.gone += other.gone
        self.bytes_left += other.bytes_left


class Figures(NamedTuple):
    """Figures of a node from its slot ads. :param accepts: the node takes new jobs."""

    data_slots: int = 0
    data_slots_free: int = 0
    accepts: bool = True
    draining: bool = False


class Flow(NamedTuple):
    """Transfers of one node to one server. :param limit: files at once. :param tuning: state of the tuner."""

    server: str
    streams: int
    limit: int
    tuning: str
    backlog: Backlog


class Delivery(NamedTuple):
    """A change between two reports. :param is_whole: the whole sandbox is delivered."""

    server: str
    sent_bytes: int
    is_whole: bool
    bytes_total: int


@dataclass
class Node:
    """The newest report of one manager.

    :param heard_at: time of the report by the collector's clock, in seconds. :param packed: the report, compressed.
    :param head: the report without its sandboxes and flows. :param tallies: by server.
    """

    name: str
    key: str
    number: int
    heard_at: int
    sent_at: int
    packed: bytes
    head: Report
    sandboxes: tuple[SandboxSummary, ...]
    servers: tuple[ServerReport, ...]
    bytes_at_risk: int
    ends_in_s: int
    flows: tuple[Flow, ...] = ()
    spool_bytes: int = 0
    spool_limit_bytes: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Tell whether output waits on the node."""
        return any(tally.waiting or tally.moving or tally.trouble for tally in self.tallies.values())

    @property
    def host(self) -> str:
        """Return the node's name without the manager's own part."""
        return self.name.rpartition("@")[2]

    def total(self) -> Tally:
        """Return one tally over all servers."""
        found = Tally()
        for tally in self.tallies.values():
            found.add_all(tally)
        return found

    def report(self) -> Report:
        """Return the whole report, with the files of each sandbox."""
        return read_report(zlib.decompress(self.packed).decode("utf-8"))

    def expected(self, now: float) -> Eta | None:
        """Return the time until all output that waits or moves has arrived. :param now: wall clock, seconds."""
        return at_least(flow.backlog.expected(now) for flow in self.flows)


def site_of(text: str) -> str:
    """Return a text that may be a URL without all that may be secret."""
    return server_of(text) if "://" in text else text


def server_of(url: str) -> str:
    """Return host and port of a URL, "" without one. User names and passwords do not stay."""
    return host_of(url) if url else ""


def summary_of(sandbox: SandboxReport) -> SandboxSummary:
    """Return the compact form of a sandbox. Equal texts are kept once."""
    total = sandbox.bytes_total
    return SandboxSummary(
        job=sandbox.job,
        number=sandbox.number,
        owner=sys.intern(sandbox.owner),
        state=sys.intern(sandbox.state),
        server=sys.intern(sandbox.server),
        files_left=sandbox.files_left,
        bytes_total=total,
        bytes_left=total if sandbox.bytes_left == total else sandbox.bytes_left,
        error_code=sandbox.code,
        next_attempt_at=sandbox.next_attempt_at,
        accepted_at=sandbox.accepted_at,
        accounting_group=sys.intern(sandbox.group),
        trouble_since_at=sandbox.trouble_since_at,
        is_paused=bool(sandbox.paused),
    )


def node_of(report: Report, text: str, heard_at: int) -> Node:
    """Return the compact form of a report. :param text: of its payload."""
    raw = text.encode("utf-8")
    sandboxes = tuple(map(summary_of, report.sandboxes))
    tallies: dict[str, Tally] = {}
    for sandbox in sandboxes:
        tallies.setdefault(sandbox.server, Tally()).add(sandbox)
    servers = tuple(replace(one, server=sys.intern(server_of(one.server))) for one in report.servers)
    work = backlogs(report)
    flows = tuple(
        Flow(sys.intern(server_of(one.server)), one.streams, one.limit, sys.intern(one.tuning), work[one.server])
        for one in report.flows
    )
    away = {one.server for one in report.servers}
    blocked = tuple(flow for flow in report.flows if flow.server in away)
    head = replace(report, sandboxes=(), flows=blocked, acknowledged={})
    return Node(
        name=report.manager,
        key=report.key,
        number=report.number,
        heard_at=heard_at,
        sent_at=report.sent_at,
        packed=zlib.compress(raw, _COMPRESSION),
        head=head,
        sandboxes=sandboxes,
        servers=servers,
        bytes_at_risk=report.bytes_at_risk,
        ends_in_s=report.ends_in_s,
        flows=flows,
        spool_bytes=report.spool_bytes,
        spool_limit_bytes=report.spool_limit_bytes,
        tallies=tallies,
    )


def deliveries(before: Node, after: Node) -> Iterator[Delivery]:
    """Yield what was sent between two reports of one manager."""
    known = {sandbox.run: sandbox for sandbox in after.sandboxes}
    for old in before.sandboxes:
        new = known.get(old.run)
        if old.group in (DELIVERED, GONE):
            continue
        if new is None:
            if old.state in _LAST_BEFORE_DELIVERY:
                yield Delivery(old.server, old.bytes_left, True, old.bytes_total)
        elif new.group == DELIVERED:
            yield Delivery(old.server, old.bytes_left, True, old.bytes_total)
        elif new.bytes_left < old.bytes_left and new.group != GONE:
            yield Delivery(old.server, old.bytes_left - new.bytes_left, False, 0)


class Pool:
    """All nodes of the pool.

    :param silence_s: seconds after which a silent node with output is dropped.
    """

    def __init__(self, silence_s: float = 7200.0) -> None:
        self.nodes: dict[tuple[str, str], Node] = {}
        self.figures: dict[str, Figures] = {}
        self.letters = Letters()
        self._left_jobs: frozenset[JobKey] = frozenset()
        self.now_at = self.answers_since_at = 0
        self._silence_s = silence_s

    def reach(self, now_at: int, after_outage: bool = False) -> None:
        """Move the pool's time on, never back. :param after_outage: nobody is silent because of the time before."""
        self.now_at = max(self.now_at, now_at)
        if after_outage:
            self.answers_since_at = self.now_at

    def set_figures(self, figures: Mapping[str, Figures]) -> None:
        """Replace the figures in the slot ads, by manager."""
        self.figures = dict(figures)

    def set_letters(self, letters: Letters) -> None:
        """Replace the notices of agents, and the figures of routers and policy services."""
        self.letters = letters
        self._left_jobs = frozenset().union(*map(left_jobs_in, letters.notices.values()))

    @property
    def routers(self) -> dict[str, Service[RouterReport]]:
        """Return the routers by name."""
        return self.letters.routers

    @property
    def policies(self) -> dict[str, Service[PolicyReport]]:
        """Return the policy services by name."""
        return self.letters.policies

    def facts(self) -> PoolFacts:
        """Return what :func:`stageout.wire.matters.matters` needs."""
        nodes = (NodeFacts(node.head, node.heard_at, node.sandboxes, node.report) for node in self.nodes.values())
        return PoolFacts(self.now_at, nodes, self.letters, self.answers_since_at)

    def put(self, node: Node) -> list[Delivery]:
        """Take a report and return what was sent since the report before. An older report changes nothing."""
        place = node.name, node.key
        before = self.nodes.get(place)
        self.reach(node.heard_at)
        if before is not None and node.number < before.number:
            return []
        self.nodes[place] = node
        return list(deliveries(before, node)) if before is not None else []

    def silent_s(self, heard_at: int) -> int:
        """Return how long a daemon is silent. Time in which the collector did not answer does not count."""
        return self.facts().silent_s(heard_at)

    def drop_silent(self) -> None:
        """Drop nodes whose reports have expired: at once without output, and after ``silence_s`` with output."""
        for place, node in list(self.nodes.items()):
            if self.silent_s(node.heard_at) > (self._silence_s if node.is_busy else AD_LIFETIME_S):
                del self.nodes[place]

    def sandboxes(self) -> Iterator[tuple[Node, SandboxSummary]]:
        """Yield all sandboxes with their nodes."""
        for node in list(self.nodes.values()):
            for sandbox in node.sandboxes:
                yield node, sandbox

    def total(self) -> Tally:
        """Return one tally over the pool."""
        found = Tally()
        for tally in self.by_server().values():
            found.add_all(tally)
        return found

    def by_server(self) -> dict[str, Tally]:
        """Return a tally for each server."""
        found: dict[str, Tally] = {}
        for node in list(self.nodes.values()):
            for server, tally in node.tallies.items():
                found.setdefault(server, Tally()).add_all(tally)
        return found

    def find(self, job: str, user: str = "") -> list[tuple[Node, SandboxSummary]]:
        """Return the sandboxes of a job, the newest run first.

        :param job: GlobalJobId. :param user: User of the job in the queue, "" when it is not known.
        """
        found = (pair for pair in self.sandboxes() if pair[1].job == job and user in ("", pair[1].owner))
        return sorted(found, key=lambda pair: -pair[1].number)

    def troubled_servers(self) -> dict[str, list[tuple[Node, ServerReport]]]:
        """Return the servers that nodes cannot reach."""
        found: dict[str, list[tuple[Node, ServerReport]]] = {}
        for node in list(self.nodes.values()):
            for one in node.servers:
                found.setdefault(one.server, []).append((node, one))
        return found

    def flows_to(self, server: str) -> list[Flow]:
        """Return the transfers of all nodes to one server."""
        return [flow for node in list(self.nodes.values()) for flow in node.flows if flow.server == server]

    def expected(self) -> dict[str, Eta | None]:
        """Return for each server the time until all output of all nodes has arrived there."""
        found: dict[str, list[Eta | None]] = {}
        for node in list(self.nodes.values()):
            for flow in node.flows:
                found.setdefault(flow.server, []).append(flow.backlog.expected(self.now_at))
        return {server: at_least(parts) for server, parts in found.items()}

    def expected_at(self, server: str) -> Eta | None:
        """Return the time until all output of all nodes has arrived at one server."""
        return at_least(flow.backlog.expected(self.now_at) for flow in self.flows_to(server))

    def by_owner(self) -> dict[tuple[str, str], Tally]:
        """Return a tally for each owner and accounting group."""
        found: dict[tuple[str, str], Tally] = {}
        for _, sandbox in self.sandboxes():
            found.setdefault((sandbox.owner, sandbox.accounting_group), Tally()).add(sandbox)
        return found

    def has_left(self, sandbox: SandboxSummary) -> bool:
        """Tell whether the job of a sandbox has left the queue, as far as its agent says."""
        return sandbox.run.key in self._left_jobs

    def is_silent(self, node: Node) -> bool:
        """Tell whether a node with output sends no reports any more."""
        return node.is_busy and is_silent(node.head, self.silent_s(node.heard_at))


def figures_of(ad: Mapping[str, object]) -> Figures:
    """Return the figures in a slot's ad."""

    def number(name: str) -> int:
        value = ad.get(name)
        return value if isinstance(value, int) else 0

    return Figures(
        number("StageOutDataSlots"), number("StageOutDataSlotsFree"),
        ad.get("StageOutAccept") is not False, ad.get("StageOutDraining") is True,
    )  # fmt: skip
