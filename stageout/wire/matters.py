"""Matters of a pool that need a person: one list for the web page, the doctor, the metrics and the alerts. Pure.

All comes from reports of managers, and from notices of agents, routers and policy services. The owners are those of the
managers' records, which the startd names, and of the queue. No text that a job can write is part of a matter: errors
are shown by their class (:mod:`stageout.core.reasons`), servers by host and port.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from stageout.core.errors import ErrorClass
from stageout.core.metrics import Readings, host_of
from stageout.core.reasons import FAILURES
from stageout.core.states import ENDS, FREED, State, plain_word
from stageout.core.units import count, duration, size
from stageout.wire.custody import (
    JobKey,
    Report,
    Run,
    identities_in,
    left_in,
    left_jobs_in,
    schedd_of,
    silent_in,
)
from stageout.wire.expected import for_runs
from stageout.wire.outlook import Outlook, outlook
from stageout.wire.services import Letters, bounded

#: An agent sends a notice every minute; routers and policy services send a report every five minutes.
AGENT_SILENT_S, SERVICE_SILENT_S = 300, 660
#: Seconds without a report from which a node can count as silent. Readers of large pools read the reports in turns.
_LEAST_SILENT_S = 300
#: A sandbox should be confirmed after this time (STAGEOUT_CONFIRM_TIMEOUT).
UNCONFIRMED_S = 3600
#: Retries for a longer time, and output that is older, need a person.
RETRIES_S, OLD_S = 1800, 86400
#: Share of refused hand-offs that needs a person. Every busy node refuses some because a data slot is full.
USUAL_SHARE = 0.1
_SHOWN, _OWNERS_SHOWN = 5, 5
SCHEMA = 1
"""Version of :func:`as_json`: a field may be added, and one that changes or goes raises it."""
_NAME_CODES = frozenset({ErrorClass.NAME_NOT_RESOLVED.code, ErrorClass.NAME_LOOKUP_FAILED.code})
#: States in which a node sends output, or will.
_TRIED = frozenset({State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})
#: States that are always examined, and those that need no further attention.
_SPECIAL = frozenset({State.ACCEPTED, State.FAILED, State.LOST})
_GONE = FREED - {State.LOST}
_WORD = re.compile(r"[\w.+-]{1,40}", re.A)
_LOG = "Look into the log of the agent (`ScheddAgentLog`) on that access point"


class Kind(str, enum.Enum):
    """The kind of a matter, the most urgent first. The values are labels of metrics and alerts."""

    PILOT_ENDS = "pilot-ends"
    SILENT_NODE = "silent-node"
    SILENT_AGENT = "silent-agent"
    SPOOL_FULL = "spool-full"
    IDENTITY = "identity"
    HANDOFFS_REFUSED = "handoffs-refused"
    FAILED = "failed"
    NAME = "name-unresolved"
    UNREACHABLE = "unreachable"
    RETRIES = "retries"
    UNCONFIRMED = "unconfirmed"
    OLD = "old-output"
    RERUNS = "reruns"
    LEFT = "left-output"
    ROUTER = "router"
    POLICY = "policy"
    VERSIONS = "versions"

    def __str__(self) -> str:
        return self.value


_URGENCY = {kind: place for place, kind in enumerate(Kind)}


class Matter(NamedTuple):
    """Something that needs a person.

    :param title: one sentence. :param action: next step; text between backquotes is a command.
    :param since_at: by the collector's clock, in seconds; 0: not known. :param owners: of the outputs, those with the
        most first; empty: it is the administrator's. :param outputs: number of job outputs affected.
    :param view, query: page with the objects that are affected.
    """

    kind: Kind
    title: str
    action: str
    since_at: int = 0
    owners: tuple[str, ...] = ()
    outputs: int = 0
    view: str = ""
    query: Mapping[str, str] = {}

    def age_s(self, now_at: int) -> int:
        """Return its age in seconds, 0 if unknown."""
        return max(0, now_at - self.since_at) if self.since_at else 0

    def whose(self, now_at: int) -> str:
        """Return owner and age as people read them."""
        owners = ", ".join(self.owners[:_OWNERS_SHOWN])
        more = len(self.owners) - _OWNERS_SHOWN
        who = f"Owner: {owners}{f' and {more} more' if more > 0 else ''}" if owners else "Owner: the administrator"
        return f"{who}. Age: {duration(self.age_s(now_at))}." if self.since_at else f"{who}."


class Output(Protocol):
    """A sandbox, as a report or a compact form of a report describes it
    (:class:`stageout.wire.custody.SandboxReport`).
    """

    @property
    def job(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def server(self) -> str: ...
    @property
    def code(self) -> int: ...
    @property
    def accepted_at(self) -> int: ...
    @property
    def trouble_since_at(self) -> int: ...
    @property
    def files_left(self) -> int: ...
    @property
    def run(self) -> Run: ...


class NodeFacts(NamedTuple):
    """The newest report of a manager.

    :param report: may lack its sandboxes, and flows to servers that are reached.
    :param heard_at: by the collector's clock, in seconds.
    :param outputs: its sandboxes. :param whole: returns the report with its sandboxes.
    """

    report: Report
    heard_at: int
    outputs: Collection[Output]
    whole: Callable[[], Report]


class PoolFacts(NamedTuple):
    """The facts about a pool from which its matters are derived.

    :param now_at: by the collector's clock, in seconds. :param answers_since_at: start of the collector's answers by
        its clock; no daemon counts as silent for the time before.
    """

    now_at: int
    nodes: Iterable[NodeFacts]
    letters: Letters
    answers_since_at: int = 0

    def silent_s(self, heard_at: int) -> int:
        """Return for how many seconds a daemon is silent. Time in which the collector did not answer does not count."""
        return self.now_at - max(heard_at, self.answers_since_at)


def is_silent(report: Report, silent_s: int) -> bool:
    """Tell whether a manager's next report is overdue. :param silent_s: seconds since the last one."""
    return silent_s > max(report.silent_after_s, _LEAST_SILENT_S)


@dataclass
class _Group:
    """Outputs with the same trouble. :ivar since_at: of the oldest, 0 for none."""

    outputs: int = 0
    since_at: int = 0
    owners: Counter[str] = field(default_factory=Counter)

    def add(self, owner: str, since_at: int, number: int = 1) -> None:
        self.outputs += number
        self.owners[owner] += number
        if since_at and not 0 < self.since_at <= since_at:
            self.since_at = since_at

    def matter(self, kind: Kind, title: str, action: str, view: str = "", **query: str) -> Matter:
        owners = tuple(_name(owner) for owner, _ in self.owners.most_common())
        return Matter(kind, title, action, self.since_at, owners, self.outputs, view, query)


class _Silent(NamedTuple):
    group: _Group
    lost_in_s: int | None


def matters(facts: PoolFacts) -> list[Matter]:
    """Return all matters of a pool, the most urgent kind first, and of one kind those with the most outputs."""
    found = _Survey(facts).matters()
    return sorted(found, key=lambda matter: (_URGENCY[matter.kind], -matter.outputs, matter.since_at, matter.title))


class _Survey:
    """One pass over all nodes and their outputs."""

    def __init__(self, facts: PoolFacts) -> None:
        self.facts, self.now_at = facts, facts.now_at
        self.left_jobs: frozenset[JobKey] = frozenset().union(*map(left_jobs_in, facts.letters.notices.values()))
        self.troubled: dict[tuple[Kind, int, str], _Group] = {}
        self.waiting: dict[str, _Group] = {}
        self.unconfirmed: dict[str, _Group] = {}
        self.left: dict[str, _Group] = {}
        self.fresh = {schedd for schedd, at in facts.letters.agents.items() if facts.silent_s(at) <= AGENT_SILENT_S}
        self.unreachable: dict[str, _Group] = {}
        self.away: dict[str, dict[str, int]] = {}
        self.wanted = set[str]()
        self.old = _Group()
        self.silent: dict[str, _Silent] = {}
        self.versions: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.handoffs = 0
        self.misnamed = _Group()
        self.of_nodes: list[Matter] = []
        for node in facts.nodes:
            self._look_at(node)

    def _look_at(self, node: NodeFacts) -> None:
        report = node.report
        self.versions[_version(report.version)] += 1
        self.handoffs += max(0, report.handoffs)
        self.refused.update({_word(code): number for code, number in report.handoffs_refused.items() if number > 0})
        if report.handoffs_refused.get("Identity", 0) > 0:
            for refusal in report.refusals:
                if refusal.code == "Identity":
                    self.misnamed.add(refusal.owner or "an owner that is not known", 0)
        wanted = {flow.server for flow in report.flows}
        for server in report.servers:
            seen = self.away.setdefault(host_of(server.server), {})
            seen[report.manager] = server.since_at
            self.wanted |= {host_of(server.server)} if server.server in wanted else set()
        away = {host_of(server.server) for server in report.servers}
        looks_at_all, old_at, fresh, is_busy = bool(away or self.left_jobs), self.now_at - OLD_S, self.fresh, False
        for sandbox in node.outputs:  # most of 100,000 need no attention, and are skipped here
            state = sandbox.state
            if state in _GONE:
                continue
            is_busy = is_busy or state != State.LOST
            if (
                looks_at_all or state in _SPECIAL or sandbox.trouble_since_at or sandbox.accepted_at < old_at
                or sandbox.job.partition("#")[0] not in fresh
            ):  # fmt: skip
                self._sort(sandbox, away)
        if is_busy:
            self._look_at_busy(node)

    def _look_at_busy(self, node: NodeFacts) -> None:
        """Examine a node with output."""
        report, host = node.report, _host(node.report.manager)
        if is_silent(report, self.facts.silent_s(node.heard_at)):
            self.silent[report.manager] = _Silent(_aboard_of(node, node.heard_at), None)
            return
        if report.full_since:
            group = _aboard_of(node, report.full_since)
            title = f"{host} takes no new jobs: its spool is too full ({_fullness(report)})."
            action = "See which server its output waits for, on its page; or give the spool more room "
            action += "(docs/administrator/spool.md)."
            self.of_nodes.append(group.matter(Kind.SPOOL_FULL, title, action, "node", name=report.manager))
        if report.ends_in_s:
            self._look_at_end(node, host)

    def _look_at_end(self, node: NodeFacts, host: str) -> None:
        """Examine a pilot that ends."""
        left_s = max(0, node.heard_at + node.report.ends_in_s - self.now_at)
        report = node.whole()
        aboard = outlook(report, for_runs(report, self.now_at, {sandbox.run for sandbox in report.sandboxes}), left_s)
        if not aboard.late + aboard.unknown:
            return
        group = _aboard_of(node, 0)
        group.outputs = aboard.late + aboard.unknown
        title = f"{host} ends in {duration(left_s)} with output aboard: {_aboard(aboard)}."
        action = "Let the pilot run longer, or set `STAGEOUT_PILOT_ROUTER`: a router then takes the rest. Output that "
        action += "is left is lost, and its jobs run again."
        self.of_nodes.append(group.matter(Kind.PILOT_ENDS, title, action, "node", name=node.report.manager))

    def _sort(self, sandbox: Output, away: Collection[str]) -> None:
        """Sort one output into its group. :param away: servers that its node cannot reach."""
        state, accepted_at = sandbox.state, sandbox.accepted_at
        if self.left_jobs and state not in FREED and sandbox.run.key in self.left_jobs:
            self.left.setdefault(sandbox.run.schedd, _Group()).add(
                sandbox.owner, sandbox.trouble_since_at or accepted_at
            )
        if state in (State.FAILED, State.LOST):
            self._add_trouble(sandbox, Kind.RERUNS if state == State.LOST else Kind.FAILED)
            return
        if state in ENDS:
            return
        schedd = schedd_of(sandbox.job)
        if schedd not in self.fresh:
            self.waiting.setdefault(schedd, _Group()).add(sandbox.owner, accepted_at)
        if 0 < accepted_at < self.now_at - OLD_S:
            self.old.add(sandbox.owner, accepted_at)
        if state == State.ACCEPTED:
            if 0 < accepted_at < self.now_at - UNCONFIRMED_S:
                self.unconfirmed.setdefault(schedd, _Group()).add(sandbox.owner, accepted_at)
        elif state in _TRIED:
            is_away = bool(away) and sandbox.server in away
            if is_away and sandbox.code not in _NAME_CODES:
                self.unreachable.setdefault(sandbox.server, _Group()).add(sandbox.owner, 0)
            elif (since_at := sandbox.trouble_since_at) and (
                since_at <= self.now_at - RETRIES_S or is_away or sandbox.code == ErrorClass.NAME_NOT_RESOLVED.code
            ):
                self._add_trouble(sandbox, Kind.RETRIES)

    def _add_trouble(self, sandbox: Output, kind: Kind) -> None:
        code = 0 if kind is Kind.RERUNS else sandbox.code
        kind = Kind.NAME if code in _NAME_CODES else kind
        self.troubled.setdefault((kind, code, sandbox.server), _Group()).add(sandbox.owner, sandbox.trouble_since_at)

    def matters(self) -> Iterator[Matter]:
        """Yield the matters."""
        yield from self.of_nodes
        yield from self._outputs()
        yield from self._silent_nodes()
        yield from self._access_points()
        yield from self._handoffs()
        yield from self._services()
        yield from self._identities()
        yield from self._versions()

    def _outputs(self) -> Iterator[Matter]:
        """Yield output that has failed, that was lost, or that has waited for too long."""
        for (kind, code, server), group in self.troubled.items():
            outputs, where = count(group.outputs, "output"), f" for {server}" if server else ""
            explanation = FAILURES[ErrorClass.from_code(code)]
            happened, action = explanation.happened, explanation.action_while_tried
            query = {"error": str(code), "server": server}
            if kind is Kind.RERUNS:
                title, query = f"{outputs}{where} lost.", {"state": State.LOST.value, "server": server}
                action = "Do nothing: the agent runs these jobs again."
            elif kind is Kind.RETRIES:
                title = f"{outputs}{where} tried again and again. {happened}"
            elif kind is Kind.NAME:
                title = f"{outputs}{where} cannot be sent. {happened}"
            else:
                title, action = f"{outputs}{where} failed. {happened}", explanation.action
                query["state"] = State.FAILED.value
            yield group.matter(kind, title, action, "jobs", **query)
        unnamed = {server for kind, _, server in self.troubled if kind is Kind.NAME} - self.unreachable.keys()
        for server, nodes in self.away.items():
            if server in unnamed or not (server in self.wanted or server in self.unreachable):
                continue  # the node no longer sends this output
            group = self.unreachable.get(server, _Group())
            group.since_at = min(nodes.values())
            title = f"{server} cannot be reached from {count(len(nodes), 'node')}. Its outputs wait."
            action = "Ask the administrator of the server. The nodes try again by themselves."
            yield group.matter(Kind.UNREACHABLE, title, action, "destination", server=server)
        if self.old.outputs:
            text = f"{count(self.old.outputs, 'output')} not delivered for more than {duration(OLD_S)}."
            action = "`stageout status --all` says what each waits for. The list has the oldest first."
            yield self.old.matter(Kind.OLD, text, action, "jobs", group="waiting")

    def _silent_nodes(self) -> Iterator[Matter]:
        """Yield nodes that send no reports, according to the agents and the reports. Reports expire, agents
        remember.
        """
        told: dict[str, _Silent] = {}
        for schedd, notice in self.facts.letters.notices.items():
            heard_at = self.facts.letters.agents[schedd]
            for one in silent_in(notice):
                group, lost_in_s = told.get(one.name, _Silent(_Group(), None))
                for owner in one.owners:
                    group.add(owner, heard_at - one.silent_s, 0)
                group.outputs += one.outputs
                in_s = one.lost_in_s - max(0, self.now_at - heard_at)
                told[one.name] = _Silent(group, in_s if lost_in_s is None else min(in_s, lost_in_s))
        for name, (group, lost_in_s) in {**self.silent, **told}.items():
            when = "after `STAGEOUT_LEASE` at the latest" if lost_in_s is None else f"in {duration(lost_in_s)}"
            title = f"{_host(name)} sends no reports. {count(group.outputs, 'output')} there."
            action = "See whether the node is up and its manager runs: then the delivery goes on. Its jobs run again "
            action += f"{when}."
            yield group.matter(Kind.SILENT_NODE, title, action, "node", name=name)

    def _access_points(self) -> Iterator[Matter]:
        letters = self.facts.letters
        for schedd, group in self.waiting.items():
            heard_at = letters.agents.get(schedd, 0)
            if self.facts.silent_s(heard_at) > AGENT_SILENT_S:
                group.since_at = heard_at
                title = (
                    f"The agent of {_name(schedd)} sends no notices. {count(group.outputs, 'output')} may wait for it."
                )
                action = "Start it on that access point: `condor_on -daemon SCHEDD_AGENT`"
                yield group.matter(Kind.SILENT_AGENT, title, action, "jobs", q=schedd)
        for schedd, group in self.unconfirmed.items():
            title = f"{count(group.outputs, 'output')} of {_name(schedd)} without confirmation for more than an hour."
            yield group.matter(
                Kind.UNCONFIRMED, title, f"{_LOG}. Jobs that still run are in order.", "jobs",
                state=State.ACCEPTED.value, q=schedd,
            )  # fmt: skip
        for schedd, notice in letters.notices.items():
            states = left_in(notice)
            if not states:
                continue
            number, group = sum(states.values()), self.left.get(schedd, _Group())
            group.outputs = number
            parts = ", ".join(f"{found} {plain_word(state)}" for state, found in states.items())
            title = f"{count(number, 'output')} of jobs that have left the queue of {_name(schedd)}: {parts}."
            action = (
                "Nobody waits for it in the queue. With owners and reasons: `stageout status --all` on that machine."
            )
            yield group.matter(Kind.LEFT, title, action, "jobs", q=schedd, group="left")

    def _handoffs(self) -> Iterator[Matter]:
        refused = sum(self.refused.values())
        if self.handoffs and refused > USUAL_SHARE * self.handoffs:
            codes = ", ".join(f"{code} {number}" for code, number in self.refused.most_common(_SHOWN))
            title = f"{refused} of {count(self.handoffs, 'hand-off')} refused within the last hour: {codes}."
            action = "These jobs hold their slots until their output is sent. docs/user/synchronous.md says what each "
            yield Matter(Kind.HANDOFFS_REFUSED, title, f"{action}code means and what to do.", view="nodes")

    def _services(self) -> Iterator[Matter]:
        """Yield routers that cannot deliver, and services that cannot use their configuration, or are silent."""
        letters = self.facts.letters
        for router in letters.routers.values():
            failing = [one for one in router.report.custody if one.problems]
            if self.facts.silent_s(router.heard_at) > SERVICE_SILENT_S:
                yield _silent_service(Kind.ROUTER, "router", router.name, router.heard_at)
            elif failing:
                files = count(sum(one.files for one in failing), "file")
                title = f"Router {_name(router.name)} cannot deliver to all destinations. {files} there may wait."
                action = "Its page names the destinations. The router tries again by itself."
                since_at = router.heard_at - max(one.oldest_s for one in failing)
                yield Matter(Kind.ROUTER, title, action, since_at, view="router", query={"name": router.name})
        for service in letters.policies.values():
            if self.facts.silent_s(service.heard_at) > SERVICE_SILENT_S:
                yield _silent_service(Kind.POLICY, "policy service", service.name, service.heard_at)
            elif not (service.report.is_policy_ok and service.report.is_reconfig_ok):
                title = f"The service {_name(service.name)} cannot use its configuration."
                action = "Look into its log (`StageoutPolicyLog`), mend the setting, and run `condor_reconfig`."
                yield Matter(Kind.POLICY, title, action, view="policy")

    def _identities(self) -> Iterator[Matter]:
        """Yield owners whose jobs or outputs have names of other jobs."""
        for notice in self.facts.letters.notices.values():
            for one in identities_in(notice):
                group, jobs = _Group(), ", ".join(_word(job) for job in one.jobs[:_SHOWN])
                group.add(one.owner, one.since_at, one.number)
                if one.what == "output":
                    title = f"Output was handed off in the name of jobs that are not its owner's: {jobs}."
                    action = (
                        "docs/administrator/upgrade.md#security-notes says how to look for abuse. "
                        "The node deletes it in time."
                    )
                else:
                    title = f"GlobalJobId of {count(one.number, 'job')} is another job's: {jobs}. They are refused."
                    action = "Ask the owner, remove the jobs, and put `GlobalJobId` into `SECURE_JOB_ATTRS`."
                yield group.matter(Kind.IDENTITY, title, action)
        if self.misnamed.outputs:
            title = "Nodes refused hand-offs of jobs whose GlobalJobId is not their own."
            action = "Ask the owner, and put `GlobalJobId` into `SECURE_JOB_ATTRS`."
            yield self.misnamed.matter(Kind.IDENTITY, title, action)

    def _versions(self) -> Iterator[Matter]:
        agents: Counter[str] = Counter(
            _version(str(notice.extra.get("version", ""))) for notice in self.facts.letters.notices.values()
        )
        versions = sorted({*self.versions, *agents})
        if len(versions) > 1:
            parts = [
                f"{version} on " + " and ".join(
                    count(number, what)
                    for number, what in ((self.versions[version], "node"), (agents[version], "access point")) if number
                )
                for version in versions[:_SHOWN]
            ]  # fmt: skip
            title = f"The pool runs {len(versions)} versions of stageout: {', '.join(parts)}."
            action = "Install one version, access points first (docs/administrator/upgrade.md)."
            yield Matter(Kind.VERSIONS, title, action, view="nodes")


def _aboard_of(node: NodeFacts, since_at: int) -> _Group:
    """Return the outputs of a node whose bytes still exist."""
    group = _Group()
    for sandbox in node.outputs:
        if sandbox.state not in FREED:
            group.add(sandbox.owner, 0)
    group.since_at = since_at
    return group


def _silent_service(kind: Kind, what: str, name: str, heard_at: int) -> Matter:
    title = f"The {what} {_name(name)} sends no reports."
    return Matter(kind, title, "See whether its machine is up and the daemon runs.", heard_at, view=kind.value,
                  query={"name": name} if kind is Kind.ROUTER else {})  # fmt: skip


def _aboard(aboard: Outlook) -> str:
    size_bytes = aboard.late_bytes + aboard.unknown_bytes
    late = f"{count(aboard.late, 'output')} will probably not arrive in time" if aboard.late else ""
    unknown = f"of {count(aboard.unknown, 'output')} nobody knows" if aboard.unknown else ""
    return f"{', '.join(filter(None, (late, unknown)))}, {size(size_bytes)}"


def _fullness(report: Report) -> str:
    if not report.spool_limit_bytes:
        return "its disk is full"
    return f"{size(report.spool_bytes)} of {size(report.spool_limit_bytes)}"


def _host(manager: str) -> str:
    return _name(manager.rpartition("@")[2])


def _name(text: str) -> str:
    """Return a name for a sentence: short, on one line, and safe inside a command."""
    shown: str = bounded(text)
    return shown.replace("`", "'")


def _word(text: str) -> str:
    return text if _WORD.fullmatch(text) else "?"


def _version(text: str) -> str:
    return _word(text) if text else "an earlier one"


def as_json(found: Iterable[Matter], now_at: int) -> list[dict[str, Any]]:
    """Return the matters for programs (fields: ``docs/reference/json.md``)."""
    return [
        {
            "kind": matter.kind.value, "title": matter.title, "action": matter.action, "since_at": matter.since_at,
            "age_s": matter.age_s(now_at), "owners": list(matter.owners), "outputs": matter.outputs,
        }
        for matter in found
    ]  # fmt: skip


def put_matters(readings: Readings, found: Iterable[Matter], now_at: int) -> None:
    """Add number, outputs and age of the matters of each kind. Kinds without a matter have zeros."""
    number: dict[str, int] = dict.fromkeys(map(str, Kind), 0)
    outputs, ages_s = dict(number), dict(number)
    for matter in found:
        kind = matter.kind.value
        number[kind] += 1
        outputs[kind] += matter.outputs
        ages_s[kind] = max(ages_s[kind], matter.age_s(now_at))
    readings.put_all("stageout_pool_matters", number)
    readings.put_all("stageout_pool_matter_outputs", outputs)
    readings.put_all("stageout_pool_matter_age_seconds", ages_s)
