"""Messages about the output of whole clusters and DAGs: the first failed attempt, and the end.

The watched clusters are stored before a message is posted. So each message is posted at most once, over restarts too.
The sums come from the job queue and its history. The watch itself counts nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from schedd_agent.mail import END_KINDS, GROUP_KINDS, MailKind, MailQueue
from schedd_agent.model import DagRoot, FailedAttempt
from schedd_agent.outcomes import JobOutcome, Totals, totals_of
from stageout.core import durable, log
from stageout.core.clock import Clock
from stageout.core.errors import StageoutError
from stageout.core.states import State
from stageout.core.units import count
from stageout.model.job import HOLD_STATES, Job, MailRecipient

FILE_NAME = "stageout_agent_watched"
#: Clusters and DAGs that are watched at most.
MOST = 1000
#: Clusters about which one pass queries the queue at most, and seconds after which it begins no other query. The
#: history of a large access point takes seconds to read, and orders wait meanwhile.
_QUERIES_AT_ONCE, _QUERIES_S = 20, 2.0
_MOST_ROOTS = 1000
_FILE_CHARS = 100
_ERROR_CHARS = 200
_SETTLED = (State.DELIVERED, State.CANCELLED)

#: Cluster and user of a watched cluster or DAG.
GroupKey = tuple[int, str]


@dataclass(frozen=True)
class Watched:
    """A cluster or a DAG whose owner gets messages.

    :param cluster: ClusterId, of a DAG that of its root job.
    :param submitted_at: QDate; numbers of clusters begin again with a new queue.
    :param jobs: number of all jobs, 0 while unknown. :param dags: clusters of the DAGMan jobs of its nodes.
    :param is_attempt_told: the owner got the message about a failed attempt. :param is_end_told: a message about the
        end was sent.
    :param user: User of its jobs, and of the root job; "" in a row of an earlier version. Owners write DAGManJobId, so
        jobs of others may name the DAG.
    """

    cluster: int
    notification: int
    address: str
    domain: str
    submitted_at: int = 0
    jobs: int = 0
    dags: tuple[int, ...] = ()
    is_attempt_told: bool = False
    is_end_told: bool = False
    user: str = ""

    @property
    def key(self) -> GroupKey:
        """Return the identity of the cluster or DAG."""
        return self.cluster, self.user

    @property
    def mail(self) -> MailRecipient:
        """Return the recipient of the messages."""
        return MailRecipient(self.notification, self.address, self.domain)

    @property
    def name(self) -> str:
        """Return the name in messages."""
        return f"{'DAG' if self.dags else 'Cluster'} {self.cluster}"


class OutputQueue(Protocol):
    """The calls to a schedd that the watch needs. All block, and raise :class:`schedd_agent.queue.QueueError`."""

    def dag_root(self, cluster: int, user: str) -> DagRoot | None:
        """Return the DAGMan job above a user's DAGMan job and all its parents, itself without a parent.

        None when it is unknown or another user's.
        """

    def has_unfinished(self, watched: Watched) -> bool:
        """Tell whether jobs of a cluster or DAG are, or will be, in the queue whose output has not come to its end."""

    def outcomes(self, watched: Watched) -> Iterator[JobOutcome]:
        """Yield the outcomes of its jobs in the queue, then of those in the history."""


def read_watched(path: Path) -> dict[GroupKey, Watched]:
    """Read the file. Without one, or when it cannot be read, nothing is watched."""
    try:
        rows = json.loads(durable.read_file(path))
        found = [Watched(**{**row, "dags": tuple(row["dags"])}) for row in rows]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as problem:
        log.error(
            "watched-read-failed", path=path, problem=problem, advice="owners get no message about these clusters"
        )
        return {}
    return {one.key: one for one in found}


@dataclass
class OutputWatch:
    """The watched clusters and DAGs of one schedd.

    :param query_interval_s: least seconds between two queries about one of them.
    """

    path: Path
    queue: OutputQueue
    mail_queue: MailQueue
    clock: Clock
    query_interval_s: float = 60.0
    _watched: dict[GroupKey, Watched] = field(init=False)
    _stored: dict[GroupKey, Watched] = field(init=False)
    _queried_at_s: dict[GroupKey, float] = field(init=False, default_factory=dict)
    _roots: dict[GroupKey, DagRoot] = field(init=False, default_factory=dict)
    _lookups_s: dict[str, float] = field(init=False, default_factory=dict)
    _problem: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._watched = read_watched(self.path)
        self._stored = self._watched

    def set_query_interval(self, interval_s: float) -> None:
        """Take over a changed :attr:`query_interval_s`."""
        self.query_interval_s = interval_s

    def follow(self, delivered: Iterable[Job], attempts: Iterable[tuple[Job, FailedAttempt]]) -> None:
        """Watch the clusters of these jobs, and post messages about first failed attempts.

        :param delivered: jobs about to be marked as delivered. :param attempts: jobs with failed attempts.
        """
        self._lookups_s.clear()
        watched = dict(self._watched)
        for job in delivered:
            self._add(watched, job, END_KINDS)
        begun = dict(watched)
        told: list[tuple[Watched, Job, FailedAttempt]] = []
        for job, attempt in attempts:
            group = self._add(watched, job, [MailKind.ATTEMPT_FAILED])
            if group and not group.is_attempt_told:
                watched[group.key] = replace(group, is_attempt_told=True)
                told.append((group, job, attempt))
        if not self._store(watched):
            self._watched = begun
            return
        for group, job, attempt in told:
            self.mail_queue.post(group.mail, group.name, MailKind.ATTEMPT_FAILED, attempt_text(job, attempt))

    def post_ends(self, jobs: Iterable[Job]) -> None:
        """Post messages about clusters and DAGs all of whose output has come to its end.

        :param jobs: the agent's jobs in the queue. Clusters with unfinished ones among them cause no query.
        """
        ended: list[tuple[Watched, Totals]] = []
        begun_s = self.clock.monotonic_s()
        try:
            for one in self._due(jobs):
                if self.clock.monotonic_s() - begun_s > _QUERIES_S:
                    break
                self._queried_at_s[one.key] = self.clock.monotonic_s()
                if not self.queue.has_unfinished(one):
                    ended.append((one, self._totals(one)))
        except StageoutError as problem:
            self._log_problem(str(problem))
        watched = {**self._watched, **{one.key: replace(one, is_end_told=True) for one, _ in ended}}
        for one, _ in ended:
            if not one.dags:  # nothing of a cluster can come back; a failed node of a DAG can be retried
                del watched[one.key]
        if ended and self._store(watched):
            for one, totals in ended:
                self._post_end(one, totals)

    def _totals(self, one: Watched) -> Totals:
        """Return the sums for the message, empty ones when the owner wants none. The history is expensive."""
        is_wanted = self.mail_queue.wants(one.mail, END_KINDS)
        return totals_of(self.queue.outcomes(one), one.jobs) if is_wanted else Totals()

    def _post_end(self, one: Watched, totals: Totals) -> None:
        if totals.delivered:
            kind = MailKind.ALL_DELIVERED if totals.is_complete else MailKind.SOME_DELIVERED
            self.mail_queue.post(one.mail, one.name, kind, totals.text())

    def _due(self, jobs: Iterable[Job]) -> Sequence[Watched]:
        """Return the watched ones to query about, those that wait longest first."""
        now_s = self.clock.monotonic_s()
        self._queried_at_s = {key: at_s for key, at_s in self._queried_at_s.items() if key in self._watched}
        busy = {(job.cluster, job.dag, user) for job in jobs if _is_unfinished(job) for user in (job.user, "")}
        clusters = {(cluster, user) for cluster, dag, user in busy if not dag}
        dags = {(dag, user) for _, dag, user in busy if dag}
        due = [
            one for one in self._watched.values()
            if not one.is_end_told
            and not (any((dag, one.user) in dags for dag in one.dags) if one.dags else one.key in clusters)
            and now_s - self._queried_at_s.get(one.key, float("-inf")) >= self.query_interval_s
        ]  # fmt: skip
        return sorted(due, key=lambda one: self._queried_at_s.get(one.key, 0.0))[:_QUERIES_AT_ONCE]

    def _add(self, watched: dict[GroupKey, Watched], job: Job, kinds: Collection[MailKind]) -> Watched | None:
        """Add the cluster or DAG of a job. Return None when its owner wants no message of these kinds about it."""
        group = self._group_of(job)
        if group is None or not self.mail_queue.wants(group.mail, kinds):
            return None
        known = watched.get(group.key) or watched.get((group.cluster, ""))
        if known and known.submitted_at == group.submitted_at:
            if not known.user:
                del watched[known.key]
            group = replace(
                group, jobs=max(known.jobs, group.jobs), dags=tuple(sorted({*known.dags, *group.dags})),
                is_attempt_told=known.is_attempt_told, is_end_told=known.is_end_told,
            )  # fmt: skip
        watched[group.key] = group
        return group

    def _group_of(self, job: Job) -> Watched | None:
        if not job.dag:
            mail = job.mail
            return Watched(
                cluster=job.cluster,
                notification=mail.notification,
                address=mail.address,
                domain=mail.domain,
                submitted_at=job.submitted_at,
                jobs=job.cluster_jobs,
                user=job.user,
            )
        root = self._root_of(job.dag, job.user)
        if root is None:
            return None
        mail = root.mail if self.mail_queue.wants(root.mail, GROUP_KINDS) else job.mail
        return Watched(
            cluster=root.cluster,
            notification=mail.notification,
            address=mail.address,
            domain=mail.domain,
            submitted_at=root.submitted_at,
            dags=(job.dag,),
            user=job.user,
        )

    def _root_of(self, dag: int, user: str) -> DagRoot | None:
        """Return the root of a user's DAG; None when the schedd does not answer, or in time.

        The history is read to its end for a number that no job has. Owners write such numbers, so the time that a pass
        spends for one of them is bounded.
        """
        if (dag, user) not in self._roots:
            if self._lookups_s.get(user, 0.0) > _QUERIES_S:
                self._log_problem(
                    f"the DAGs of {user} are looked up too slowly; there is no message about some of them"
                )
                return None
            begun_s = self.clock.monotonic_s()
            try:
                root = self.queue.dag_root(dag, user)
            except StageoutError as problem:
                self._log_problem(str(problem))
                return None
            if len(self._roots) >= _MOST_ROOTS:
                del self._roots[next(iter(self._roots))]
            self._roots[dag, user] = root or DagRoot(dag, MailRecipient(), 0)
            spent_s = self.clock.monotonic_s() - begun_s
            self._lookups_s[user] = self._lookups_s.get(user, 0.0) + spent_s
        return self._roots[dag, user]

    def _store(self, watched: Mapping[GroupKey, Watched]) -> bool:
        """Store what is watched. Return False when that fails: then nothing may be posted."""
        kept = _bounded(watched)
        if kept == self._stored:
            self._watched = kept
            return True
        text = json.dumps([asdict(one) for one in kept.values()], indent=0)
        try:
            durable.write_file("watched-record", self.path, text.encode())
        except OSError as problem:
            log.error("watched-write-failed", clusters=len(kept), problem=problem, advice="make room in SPOOL")
            return False
        self._watched = self._stored = kept
        return True

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            log.warn("watched-query-failed", problem=problem)
        self._problem = problem


def attempt_text(job: Job, attempt: FailedAttempt) -> str:
    """Return the message about a failed attempt."""
    text = f"{attempt.file[:_FILE_CHARS]} of job {job.cluster}.{job.proc} did not reach {attempt.host}"
    text += ", for a fault of its node: " if attempt.of_node else ": "
    text += f"{attempt.error[:_ERROR_CHARS].rstrip('.')}. Its node tries again"
    if attempt.gives_up_at:
        text += time.strftime(" until %Y-%m-%d %H:%M UTC", time.gmtime(attempt.gives_up_at))
    if attempt.attempts_limit and not attempt.of_node:
        text += f", with at most {count(attempt.attempts_limit, 'attempt')} for each file"
    return f"{text}. There is no message about later attempts; if the node gives up, you get one."


def _is_unfinished(job: Job) -> bool:
    """Tell whether the output of a job in the queue has not come to its end. A failed node of a DAG stays as it is."""
    settled = (*_SETTLED, *HOLD_STATES) if job.dag else _SETTLED
    return job.has_final_handoff and not (job.ad_state.run == job.run and job.ad_state.state in settled)


def _bounded(watched: Mapping[GroupKey, Watched]) -> dict[GroupKey, Watched]:
    """Return the newest ones. Those about which the owner knows the end go first."""
    surplus = len(watched) - MOST
    if surplus <= 0:
        return dict(watched)
    dropped = set(sorted(watched, key=lambda key: not watched[key].is_end_told)[:surplus])
    unknown = [cluster for cluster, user in dropped if not watched[cluster, user].is_end_told]
    if unknown:
        log.warn("watched-dropped", clusters=len(unknown), first=min(unknown))
    return {key: one for key, one in watched.items() if key not in dropped}
