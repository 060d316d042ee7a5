"""The job queue and its history, through HTCondor's bindings and ``condor_qedit``. Blocking; one thread at a time."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from schedd_agent.credentials import CredentialOwner, services_of
from schedd_agent.edits import Change, Edit, ToolCommand
from schedd_agent.factories import Factory, read_limit
from schedd_agent.model import DagEnd, DagRoot
from schedd_agent.outcomes import PROJECTION as OUTCOME
from schedd_agent.outcomes import JobOutcome, read_outcome
from schedd_agent.output_watch import Watched
from stageout.condor.ads import UNDECODABLE, SkippedAttributes, decoded, value_of
from stageout.condor.bindings import CondorError
from stageout.condor.collector import Collector
from stageout.condor.limits import TOOL_S
from stageout.condor.schedd import Schedd
from stageout.core import log
from stageout.core.classads import quote
from stageout.core.dagman import is_kept_node, is_with_its_dag
from stageout.core.durable import step
from stageout.core.reasons import HOLD_SUBCODE_BASE
from stageout.core.routed import is_kept_copy
from stageout.core.states import State
from stageout.model.job import (
    HOLD_CODE,
    HOLD_STATES,
    NOTHING_YET,
    POLICY_HOLD_CODE,
    TRANSFER_HOLD_CODES,
    HistoryRecord,
    Job,
    JobAdState,
    MailRecipient,
    Status,
)
from stageout.wire.custody import JobKey, job_id_of
from stageout.wire.typed import MOST_NUMBER

_IDS_AT_ONCE = 200
_IDS_SHOWN = 3
_OF_A_CLUSTER = "(ProcId ?: -1) < 0"
#: Ads of clusters whose factory has not made all its jobs.
_OPEN_FACTORY = (
    f"{_OF_A_CLUSTER} && JobMaterializeNextProcId isnt undefined "
    "&& !((TotalSubmitProcs ?: 0) > 0 && JobMaterializeNextProcId >= TotalSubmitProcs)"
)
#: Sub-DAGs within each other at most.
_DAG_DEPTH = 20

#: Jobs that may need a decision. Idle and running ones matter only after their ads showed a stage-out.
CANDIDATES = (
    f"StageOutGuard =?= true && (JobStatus == {int(Status.COMPLETED)} || JobStatus == {int(Status.REMOVED)} "
    f'|| StageOutState =!= "{NOTHING_YET}" || StageOutRequest isnt undefined || (JobStatus == {int(Status.HELD)} '
    f"&& (HoldReasonCode == {HOLD_CODE} && HoldReasonSubCode > {HOLD_SUBCODE_BASE} "
    f"|| HoldReasonCode == {POLICY_HOLD_CODE} && OnExitHold =?= true "
    f"|| ({' || '.join(f'HoldReasonCode == {code}' for code in TRANSFER_HOLD_CODES)}) "
    "&& (TransferOutputStats.STAGEOUTFilesCountLastRun ?: 0) > 0)))"
)

PROJECTION = [
    "GlobalJobId", "ClusterId", "ProcId", "JobStatus", "NumShadowStarts", "NumJobReconnects", "NumJobCompletions",
    "ShadowBday", "EnteredCurrentStatus", "JobPrio", "DAGManJobId", "TransferOutputStats", "TransferOutFinished",
    "JobCurrentFinishTransferOutputDate", "JobCurrentStartExecutingDate",
    "HoldReasonCode", "HoldReasonSubCode", "StageOutRequest", "StageOutReruns", "StageOutState", "StageOutRun",
    "StageOutReason", "StageOutBytesLeft", "StageOutFilesLeft", "StageOutAttempts", "StageOutNextAttempt",
    "StageOutManager", "StageOutKeys", "StageOutCustody", "StageOutUntold", "NumHoldsByReason", "Owner", "User",
    "TerminationPending", "RemoveReason", "RemoteHost",
    "JobNotification", "NotifyUser", "UidDomain", "StageOutKeptUntil", "RemotePool", "LastRemotePool",
    "JobMaterializeNextProcId", "StageOutUserLeave", "QDate", "TotalSubmitProcs", "RoutedBy",
]  # fmt: skip


class QueueError(CondorError):
    """The schedd did not answer, or it refused the request."""


class JobQueue(Protocol):
    """The agent's interface to a schedd. All calls block and raise QueueError."""

    def jobs(self, reported: Collection[JobKey]) -> list[Job]:
        """Return the candidates, and the jobs in the queue with the numbers of these, whatever their names are."""

    def history_records(self, jobs: Collection[JobKey]) -> dict[JobKey, HistoryRecord]:
        """Return the history's records of these jobs."""

    def dags(self, clusters: Collection[int]) -> dict[int, DagEnd]:
        """Return the ends of these DAGMan jobs."""

    def owners(self, names: Collection[str]) -> dict[str, CredentialOwner]:
        """Return the owners of these jobs' credentials, for jobs in the queue.

        :param names: GlobalJobIds.
        """

    def ids(self, first: int, last: int) -> set[tuple[int, int]]:
        """Return cluster and process of all jobs in the queue whose clusters lie between these, both included."""

    def apply(self, edit: Edit) -> None:
        """Change a job. On return the change is in the schedd's log. :raises QueueError: the job is not changed."""

    def set_in(self, job_ids: Sequence[str], change: Change) -> None:
        """Set an attribute in these jobs, in one transaction. :raises QueueError: no job is changed."""

    def remove(self, job: Job, reason: str) -> None:
        """Remove a job, as condor_rm does. :raises QueueError: the job stays."""


def parse_job(ad: Mapping[str, Any], candidate: bool) -> Job:
    """Return a job from its ad.

    :param candidate: the ad matches CANDIDATES, which tests OnExitHold.
    """

    def number(name: str) -> int:
        value = ad.get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return 0
        return max(-MOST_NUMBER, min(MOST_NUMBER, int(value)))  # a manager refuses a sheet with a larger number

    def text(name: str) -> str:
        value = ad.get(name)
        return value if isinstance(value, str) else ""

    stats: Any = ad.get("TransferOutputStats")
    handed_off = value_of(stats, "STAGEOUTFilesCountLastRun") if hasattr(stats, "get") else 0
    has_ended = ad.get("TerminationPending") is True
    is_kept = is_kept_node(number("JobStatus"), "DAGManJobId" in ad, has_ended, text("RemoveReason"))
    return Job(
        name=text("GlobalJobId"), user=text("User"), cluster=number("ClusterId"), proc=number("ProcId"),
        status=Status.COMPLETED if is_kept else number("JobStatus"), is_kept=is_kept, has_ended=has_ended,
        is_kept_copy=is_kept_copy(number("JobStatus"), "RoutedBy" in ad, has_ended, text("RemoveReason")),
        has_shadow="RemoteHost" in ad,
        run=number("NumShadowStarts"), handed_off=handed_off if isinstance(handed_off, int) else 0,
        priority=number("JobPrio"), dag=number("DAGManJobId"), entered_at=number("EnteredCurrentStatus"),
        completions=number("NumJobCompletions"), reconnects=number("NumJobReconnects"),
        shadow_since=number("ShadowBday"), executing_since=number("JobCurrentStartExecutingDate"),
        # A reconnect of the shadow loses one of the two.
        transferred_at=max(number("TransferOutFinished"), number("JobCurrentFinishTransferOutputDate")),
        hold_code=number("HoldReasonCode"), hold_subcode=number("HoldReasonSubCode"),
        held_at_exit=candidate and number("HoldReasonCode") == POLICY_HOLD_CODE,
        request=text("StageOutRequest"), reruns=number("StageOutReruns"),
        ad_state=JobAdState(
            state=text("StageOutState") or NOTHING_YET, run=number("StageOutRun"), reason=text("StageOutReason"),
            bytes_left=number("StageOutBytesLeft"), files_left=number("StageOutFilesLeft"),
            attempts=number("StageOutAttempts"), next_attempt_at=number("StageOutNextAttempt"),
            manager=text("StageOutManager"), keys=text("StageOutKeys"), custody=text("StageOutCustody"),
        ),
        unlogged_hold_run=number("StageOutUntold"), hold_counts=_counts(ad.get("NumHoldsByReason")),
        owner=text("Owner"),
        mail=MailRecipient(number("JobNotification"), text("NotifyUser") or text("Owner"), text("UidDomain")),
        kept_until=number("StageOutKeptUntil"), has_flocked="RemotePool" in ad or "LastRemotePool" in ad,
        in_factory="JobMaterializeNextProcId" in ad, is_left_by_owner=ad.get("StageOutUserLeave", False) is not False,
        submitted_at=number("QDate"), cluster_jobs=number("TotalSubmitProcs"),
    )  # fmt: skip


def parse_root(ad: Mapping[str, Any]) -> DagRoot:
    """Return a DAGMan job from its ad."""
    job = parse_job(ad, False)
    return DagRoot(job.cluster, job.mail, job.submitted_at)


def parse_factory(ad: Any) -> Factory | None:
    """Return a factory from its cluster's ad; None when its limit is an owner's expression."""
    limit = read_limit(str(ad.lookup("JobMaterializeLimit")))
    if limit is None:
        return None
    return Factory(
        cluster=int(ad["ClusterId"]),
        limit=limit,
        made=int(ad["JobMaterializeNextProcId"]),
        total=int(ad.get("TotalSubmitProcs", 0)),
        is_paused=ad.get("JobMaterializePaused", 0) != 0,
    )


def _counts(found: Any) -> dict[str, int]:
    """Return the counts in a nested ad, by name."""
    try:
        pairs = found.items() if hasattr(found, "items") else ()
        return {str(name): value for name, value in pairs if isinstance(value, int)}
    except UNDECODABLE:
        return {}


class CondorJobQueue:
    """The schedd on this machine.

    :param tools: directory of HTCondor's commands. Only condor_qedit changes several attributes in one transaction, and
        only condor_hold sets a sub-code.
    """

    def __init__(self, tools: Path = Path("/usr/bin")) -> None:
        self._tools = tools
        self._schedd = Schedd()
        self._skipped = SkippedAttributes()

    def name(self) -> str:
        """Return the schedd's name, the first part of GlobalJobIds. :raises QueueError: no schedd runs here."""
        try:
            return str(Collector().locate("Schedd")["Name"])
        except CondorError as problem:
            raise QueueError(f"no schedd on this machine: {problem}") from None

    def jobs(self, reported: Collection[JobKey]) -> list[Job]:
        """Return the candidates, and the jobs in the queue with the numbers of these, whatever their names are."""
        found = [parse_job(ad, True) for ad in self._query(CANDIDATES, PROJECTION)]
        known = {f"{job.cluster}.{job.proc}" for job in found}
        wanted = dict.fromkeys(key.job_id for key in reported if key.job_id not in known)
        for constraint in _any_of(map(_is_job, wanted)):
            found += [parse_job(ad, False) for ad in self._query(constraint, PROJECTION)]
        return found

    def history_records(self, jobs: Collection[JobKey]) -> dict[JobKey, HistoryRecord]:
        """Return the history's records of these jobs."""
        found = {}
        named = [f"{_is_job(key.job_id)} && GlobalJobId =?= {quote(key.name)}" for key in jobs]
        for ad in self._query_history(named):
            job = parse_job(ad, False)
            if job.has_own_name and job.key in jobs:
                found[job.key] = HistoryRecord(
                    Status.COMPLETED if job.is_kept_copy else job.status,
                    job.run, job.executing_since, job.transferred_at,
                    given_up=job.ad_state.state == State.CANCELLED,
                    failed=job.ad_state.state in HOLD_STATES and job.ad_state.run == job.run,
                    reconnects=job.reconnects, owner=job.owner, mail=job.mail,
                )  # fmt: skip
        return found

    def dags(self, clusters: Collection[int]) -> dict[int, DagEnd]:
        """Return the ends of these DAGMan jobs. A sub-DAG that was removed with the DAG above it ends as that one."""
        found: dict[int, DagEnd] = {}
        above = {cluster: cluster for cluster in clusters}
        for _ in range(_DAG_DEPTH):
            ends = self._ends_of_dags(set(above.values()))
            found.update((cluster, end) for cluster, dag in above.items() if isinstance(end := ends.get(dag), DagEnd))
            parents = ((cluster, ends.get(dag)) for cluster, dag in above.items())
            above = {cluster: end for cluster, end in parents if isinstance(end, int)}
            if not above:
                return found
        # Owners write DAGManJobId. Removed DAGs that name each other have no end of their own.
        return {**found, **dict.fromkeys(above, DagEnd.REMOVED)}

    def _ends_of_dags(self, clusters: Collection[int]) -> dict[int, DagEnd | int]:
        """Return the ends of DAGMan jobs; for one that was removed with the DAG above it, the cluster of that DAG."""
        roots = [_is_job(f"{cluster}.0") for cluster in clusters]
        running = {int(ad["ClusterId"]) for text in _any_of(roots) for ad in self._query(text, ["ClusterId"])}
        gone = [_is_job(f"{cluster}.0") for cluster in clusters if cluster not in running]
        return {int(ad["ClusterId"]): _end_of_dag(ad) for ad in self._query_history(gone)}

    def owners(self, names: Collection[str]) -> dict[str, CredentialOwner]:
        """Return the owners of these jobs' credentials, for jobs in the queue. :param names: GlobalJobIds."""
        wanted = [*PROJECTION, "x509userproxy", "OAuthServicesNeeded"]
        named = _any_of(_is_job(job_id_of(name)) for name in names)
        ads = [(ad, parse_job(ad, False)) for constraint in named for ad in self._query(constraint, wanted)]
        return {
            job.name: CredentialOwner(
                job=job.key,
                user=job.owner,
                status=job.status,
                run=job.run,
                proxy=str(ad.get("x509userproxy") or ""),
                services=services_of(str(ad.get("OAuthServicesNeeded") or "")),
            )
            for ad, job in ads
            if job.has_own_name
        }

    def dag_root(self, cluster: int, user: str) -> DagRoot | None:
        """Return the DAGMan job above a user's DAGMan job and all its parents, itself without a parent.

        None when it is unknown or another user's: owners write DAGManJobId.
        """
        wanted = ["ClusterId", "DAGManJobId", "QDate", "Owner", "User", "JobNotification", "NotifyUser", "UidDomain"]
        found = None
        for _ in range(_DAG_DEPTH):
            constraint = f"ClusterId == {cluster} && ProcId == 0"
            ads = self._query(constraint, wanted) or list(self._history_ads(constraint, wanted, 1))
            if not ads or ads[0].get("User") != user:
                break
            found = parse_root(ads[0])
            parent = ads[0].get("DAGManJobId")
            if not isinstance(parent, int) or parent == cluster:
                break
            cluster = parent
        return found

    def has_unfinished(self, watched: Watched) -> bool:
        """Tell whether jobs of a cluster or DAG are, or will be, in the queue whose output has not come to its end."""
        settled = _settled(bool(watched.dags))
        constraint = f"({_group(watched)}) && ({_OPEN_FACTORY} || ProcId >= 0 && ({settled}) =!= true)"
        return bool(self._query_raw(constraint, ["ClusterId"], with_clusters=True, limit=1))

    def outcomes(self, watched: Watched) -> Iterator[JobOutcome]:
        """Yield the outcomes of its jobs in the queue, then of those in the history."""
        here = [found for ad in self._query(_group(watched), OUTCOME) if (found := read_outcome(ad))]
        yield from here
        if watched.jobs and len(here) >= watched.jobs:
            return
        constraint = f"({_group(watched)}) && QDate >= {watched.submitted_at}"
        # A limit ends the search in the history early. Jobs that leave meanwhile are in both places.
        ads = self._history_ads(constraint, OUTCOME, watched.jobs or -1)
        yield from (found for ad in ads if (found := read_outcome(ad)))

    def apply(self, edit: Edit) -> None:
        """Change a job. On return the change is in the schedd's log. :raises QueueError: the job is not changed."""
        with step(edit.label):
            for change in edit.changes:
                self.set_in([edit.job_id], change)
            for pair in edit.told:
                self._set(edit.condition, edit.job_id, Change(*pair, is_logged=True))
            if edit.atomic:
                self._edit_at_once(edit)
            if edit.command:
                self._run_command(edit.job_id, edit.command)

    def set_in(self, job_ids: Sequence[str], change: Change) -> None:
        """Set an attribute in these jobs, in one transaction. :raises QueueError: no job is changed."""
        self._set(list(job_ids), ", ".join(job_ids[:_IDS_SHOWN]), change)

    def _set(self, which: list[str] | str, named: str, change: Change) -> None:
        """Set an attribute. :param which: job ids, or a constraint. :raises QueueError: no job is changed."""
        try:
            self._schedd.edit(which, change.name, change.value, is_logged=change.is_logged)
        except CondorError as problem:
            raise QueueError(f"{named}: {problem}") from None

    def remove(self, job: Job, reason: str) -> None:
        """Remove a job, as condor_rm does. :raises QueueError: the job stays."""
        try:
            self._schedd.remove(f"{job.cluster}.{job.proc}", reason)
        except CondorError as problem:
            raise QueueError(f"{job.cluster}.{job.proc}: {problem}") from None

    def factories(self) -> list[Factory]:
        """Return all factories in the queue whose limit can be raised."""
        wanted = ["ClusterId", "JobMaterializeLimit", "JobMaterializeNextProcId", "JobMaterializePaused"]
        constraint = f"{_OF_A_CLUSTER} && JobMaterializeNextProcId isnt undefined"
        ads = self._query_raw(constraint, [*wanted, "TotalSubmitProcs"], with_clusters=True)
        return [found for found in map(parse_factory, ads) if found]

    def procs(self, clusters: Collection[int]) -> list[tuple[int, int]]:
        """Return cluster and process of each job of these clusters."""
        constraint = " || ".join(f"ClusterId == {cluster}" for cluster in clusters)
        return [(int(ad["ClusterId"]), int(ad["ProcId"])) for ad in self._query(constraint, ["ClusterId", "ProcId"])]

    def ids(self, first: int, last: int) -> set[tuple[int, int]]:
        """Return cluster and process of all jobs in the queue whose clusters lie between these, both included."""
        ads = self._query(f"ClusterId >= {first} && ClusterId <= {last}", ["ClusterId", "ProcId"])
        return {(int(ad["ClusterId"]), int(ad["ProcId"])) for ad in ads}

    def set_limit(self, cluster: int, limit: str) -> None:
        """Change the JobMaterializeLimit of a cluster's own ad. On return it is in the schedd's log."""
        which = f"ClusterId == {cluster} && {_OF_A_CLUSTER}"
        with step("edit-factory"):
            try:
                self._schedd.edit(which, "JobMaterializeLimit", limit, is_of_cluster=True)
            except CondorError as problem:
                raise QueueError(f"cluster {cluster}: {problem}") from None

    def _edit_at_once(self, edit: Edit) -> None:
        done = self._run(
            "condor_qedit", "-constraint", edit.condition, *(part for pair in edit.atomic for part in pair)
        )
        if done.returncode:
            raise QueueError(f"{edit.job_id}: {_sentence(done)}")

    def _run_command(self, job_id: str, command: ToolCommand) -> None:
        done = self._run(command.tool, "-reason", command.reason, *command.options, "-constraint", command.condition)
        if done.returncode:
            log.warn("event-write-failed", job=job_id, tool=command.tool, problem=_sentence(done))

    def _run(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self._tools / tool), *arguments]
        try:
            return subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise QueueError(f"{tool}: {problem}") from None

    def _query(self, constraint: str, wanted: list[str]) -> list[dict[str, Any]]:
        """Return attributes of jobs, without those that cannot be decoded."""
        return [decoded(ad, wanted, self._skipped.add) for ad in self._query_raw(constraint, wanted)]

    def _query_raw(self, constraint: str, wanted: list[str], **options: Any) -> list[Any]:
        try:
            return self._schedd.query(constraint, wanted, **options)
        except CondorError as problem:
            raise QueueError(f"the schedd does not answer: {problem}") from None

    def _query_history(self, jobs: list[str]) -> Iterator[Any]:
        wanted = [
            "GlobalJobId", "ClusterId", "ProcId", "JobStatus", "NumShadowStarts", "TransferOutFinished",
            "JobCurrentFinishTransferOutputDate", "JobCurrentStartExecutingDate", "StageOutState", "DAGManJobId",
            "TerminationPending", "RemoveReason", "RoutedBy",
            "StageOutRun", "Owner", "User", "JobNotification", "NotifyUser", "UidDomain",
        ]  # fmt: skip
        for constraint in _any_of(jobs):
            yield from self._history_ads(constraint, wanted, min(len(jobs), _IDS_AT_ONCE))

    def _history_ads(self, constraint: str, wanted: list[str], most: int) -> Iterator[dict[str, Any]]:
        """Yield attributes of jobs in the history, the newest first. :param most: number of ads, -1 without a limit."""
        try:
            for ad in self._schedd.history(constraint, wanted, most):
                yield decoded(ad, wanted, self._skipped.add)
        except CondorError as problem:
            raise QueueError(f"the history cannot be read: {problem}") from None


def _end_of_dag(ad: Mapping[str, Any]) -> DagEnd | int:
    """Return the end of a DAG; for a sub-DAG that was removed with the DAG above it, the cluster of that one."""
    if ad["JobStatus"] != Status.REMOVED:
        return DagEnd.ENDED
    parent = ad.get("DAGManJobId")
    if not isinstance(parent, int) or not is_with_its_dag(str(ad.get("RemoveReason") or "")):
        return DagEnd.REMOVED
    return parent


def _group(watched: Watched) -> str:
    """Return the constraint for a user's jobs of a cluster, or for the root job and the nodes of a DAG."""
    parts = (f"DAGManJobId == {dag}" for dag in watched.dags)
    group = " || ".join((f"ClusterId == {watched.cluster}", *parts))
    return f"({group}) && User =?= {quote(watched.user)}" if watched.user else group


def _settled(is_dag: bool) -> str:
    """Return the constraint for jobs that have ended and whose output has, too. A failed node of a DAG stays."""
    states = (State.DELIVERED, State.CANCELLED, *(HOLD_STATES if is_dag else ()))
    ended = f"JobStatus == {int(Status.COMPLETED)}"
    if is_dag:
        ended = f"({ended} || JobStatus == {int(Status.REMOVED)} && TerminationPending =?= true)"
    names = " || ".join(f'StageOutState =?= "{state.value}"' for state in states)
    handed_off = "(TransferOutputStats.STAGEOUTFilesCountLastRun ?: 0)"
    return f"{ended} && ({handed_off} == 0 || StageOutRun =?= NumShadowStarts && ({names}))"


def _sentence(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split())


def _is_job(job_id: str) -> str:
    """Return the constraint for a job. :param job_id: ``cluster.proc``."""
    cluster, proc = job_id.split(".")
    return f"ClusterId == {int(cluster)} && ProcId == {int(proc)}"


def _any_of(jobs: Iterable[str]) -> Iterator[str]:
    """Return constraints for any of these jobs, some hundred jobs in each. :param jobs: a constraint for each."""
    parts = list(jobs)
    for start in range(0, len(parts), _IDS_AT_ONCE):
        yield " || ".join(parts[start : start + _IDS_AT_ONCE])
