"""The job queue and its history, through HTCondor's bindings and ``condor_qedit``. Blocking; one thread at a time."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from schedd_agent.credentials import Owner, services_of
from schedd_agent.edits import Edit
from schedd_agent.model import (
    HOLD_CODE,
    HOLD_SUBCODE_BASE,
    NOTHING_YET,
    POLICY_HOLD_CODE,
    Dag,
    Job,
    Past,
    Shown,
    Status,
)
from stageout.core.durable import step
from stageout.core.errors import StageoutError
from stageout.core.states import State
from stageout.wire.custody import Run
from stageout.wire.typed import MOST_NUMBER

_TIMEOUT_S = 60
_IDS_AT_ONCE = 200

#: Jobs that the agent may have to do with. Idle and running ones matter only after they showed something.
CANDIDATES = (
    f"StageOutGuard =?= true && (JobStatus == {int(Status.COMPLETED)} || JobStatus == {int(Status.REMOVED)} "
    f'|| StageOutState =!= "{NOTHING_YET}" || StageOutRequest isnt undefined || (JobStatus == {int(Status.HELD)} '
    f"&& (HoldReasonCode == {HOLD_CODE} && HoldReasonSubCode > {HOLD_SUBCODE_BASE} "
    f"|| HoldReasonCode == {POLICY_HOLD_CODE} && OnExitHold =?= true)))"
)

PROJECTION = [
    "GlobalJobId", "ClusterId", "ProcId", "JobStatus", "NumShadowStarts", "NumJobReconnects", "NumJobCompletions",
    "ShadowBday", "EnteredCurrentStatus", "JobPrio", "DAGManJobId", "TransferOutputStats", "TransferOutFinished",
    "JobCurrentFinishTransferOutputDate", "JobCurrentStartExecutingDate",
    "HoldReasonCode", "HoldReasonSubCode", "StageOutRequest", "StageOutReruns", "StageOutState", "StageOutRun",
    "StageOutReason", "StageOutBytesLeft", "StageOutFilesLeft", "StageOutAttempts", "StageOutNextAttempt",
    "StageOutManager", "StageOutKeys", "StageOutCustody",
]  # fmt: skip


class QueueError(StageoutError):
    """The schedd did not answer, or refused."""


class Queue(Protocol):
    """What the agent needs of a schedd. All calls block and raise QueueError."""

    def jobs(self, reported: Collection[str]) -> list[Job]:
        """Candidates, and the jobs with these GlobalJobIds that are in the queue."""

    def past(self, names: Collection[str]) -> dict[str, Past]:
        """How jobs left the queue, for those that the history knows."""

    def dags(self, clusters: Collection[int]) -> dict[int, Dag]:
        """What became of these DAGMan jobs."""

    def owners(self, names: Collection[str]) -> dict[str, Owner]:
        """Whose credentials go with these jobs, for those that are in the queue."""

    def apply(self, edit: Edit) -> None:
        """Change a job. On return it is in the schedd's log. :raises QueueError: it is not."""

    def remove(self, job: Job, reason: str) -> None:
        """condor_rm. :raises QueueError: the job stays."""


def parse_job(ad: Mapping[str, Any], candidate: bool) -> Job:
    """A job's ad as the agent sees it.

    :param candidate: the ad matched CANDIDATES, which looks at OnExitHold.
    """

    def number(name: str) -> int:
        value = ad.get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return 0
        return max(-MOST_NUMBER, min(MOST_NUMBER, int(value)))  # an order with more would be refused, and all with it

    def text(name: str) -> str:
        value = ad.get(name)
        return value if isinstance(value, str) else ""

    stats: Any = ad.get("TransferOutputStats")
    handed_off = stats.get("STAGEOUTFilesCountLastRun") if hasattr(stats, "get") else 0
    return Job(
        name=str(ad["GlobalJobId"]), cluster=number("ClusterId"), proc=number("ProcId"), status=number("JobStatus"),
        run=number("NumShadowStarts"), handed_off=handed_off if isinstance(handed_off, int) else 0,
        priority=number("JobPrio"), dag=number("DAGManJobId"), entered_at=number("EnteredCurrentStatus"),
        completions=number("NumJobCompletions"), reconnects=number("NumJobReconnects"),
        shadow_since=number("ShadowBday"), executing_since=number("JobCurrentStartExecutingDate"),
        # A reconnect of the shadow loses the one or the other.
        transferred_at=max(number("TransferOutFinished"), number("JobCurrentFinishTransferOutputDate")),
        hold_code=number("HoldReasonCode"), hold_subcode=number("HoldReasonSubCode"),
        held_at_exit=candidate and number("HoldReasonCode") == POLICY_HOLD_CODE,
        request=text("StageOutRequest"), reruns=number("StageOutReruns"),
        shown=Shown(
            state=text("StageOutState") or NOTHING_YET, run=number("StageOutRun"), reason=text("StageOutReason"),
            bytes_left=number("StageOutBytesLeft"), files_left=number("StageOutFilesLeft"),
            attempts=number("StageOutAttempts"), next_attempt_at=number("StageOutNextAttempt"),
            manager=text("StageOutManager"), keys=text("StageOutKeys"), custody=text("StageOutCustody"),
        ),
    )  # fmt: skip


class CondorQueue:
    """The schedd on this machine.

    :param qedit: path of condor_qedit, the only way to change several attributes in one transaction.
    """

    def __init__(self, qedit: str = "condor_qedit") -> None:
        import htcondor2

        self._condor = htcondor2
        self._qedit = qedit
        # 23.x raises OSError and the like where 25.x has a class of its own.
        own = getattr(htcondor2, "HTCondorException", None)
        self._errors: tuple[type[Exception], ...] = (
            OSError, RuntimeError, ValueError, TypeError, *([own] if own else [])
        )  # fmt: skip

    def name(self) -> str:
        """Name of the schedd: the first part of its jobs' GlobalJobIds. :raises QueueError: there is none here."""
        try:
            return str(self._condor.Collector().locate(self._condor.DaemonType.Schedd)["Name"])
        except self._errors as problem:
            raise QueueError(f"no schedd on this machine: {problem}") from None

    def jobs(self, reported: Collection[str]) -> list[Job]:
        """Candidates, and the jobs with these GlobalJobIds that are in the queue."""
        found = {str(ad["GlobalJobId"]): parse_job(ad, True) for ad in self._query(CANDIDATES)}
        for constraint in _by_ids([Run(name, 0).job_id for name in reported if name not in found]):
            for ad in self._query(constraint):
                found.setdefault(str(ad["GlobalJobId"]), parse_job(ad, False))
        return list(found.values())

    def past(self, names: Collection[str]) -> dict[str, Past]:
        """How jobs left the queue, for those that the history knows."""
        found = {}
        for ad in self._history([Run(name, 0).job_id for name in names]):
            if ad.get("GlobalJobId") in names:
                job = parse_job(ad, False)
                given_up = job.shown.state == State.CANCELLED
                found[job.name] = Past(job.status, job.run, job.executing_since, job.transferred_at, given_up)
        return found

    def dags(self, clusters: Collection[int]) -> dict[int, Dag]:
        """What became of these DAGMan jobs."""
        ids = [f"{cluster}.0" for cluster in clusters]
        running = {int(ad["ClusterId"]) for text in _by_ids(ids) for ad in self._query(text, ["ClusterId"])}
        gone = [f"{cluster}.0" for cluster in clusters if cluster not in running]
        found = {}
        for ad in self._history(gone):
            found[int(ad["ClusterId"])] = Dag.REMOVED if ad["JobStatus"] == Status.REMOVED else Dag.ENDED
        return found

    def owners(self, names: Collection[str]) -> dict[str, Owner]:
        """Whose credentials go with these jobs, for those that are in the queue."""
        wanted = ["GlobalJobId", "Owner", "JobStatus", "NumShadowStarts", "x509userproxy", "OAuthServicesNeeded"]
        return {
            str(ad["GlobalJobId"]): Owner(
                str(ad.get("Owner") or ""), int(ad["JobStatus"]), int(ad.get("NumShadowStarts") or 0),
                str(ad.get("x509userproxy") or ""), services_of(str(ad.get("OAuthServicesNeeded") or "")),
            )
            for constraint in _by_ids([Run(name, 0).job_id for name in names])
            for ad in self._query(constraint, wanted)
        }  # fmt: skip

    def apply(self, edit: Edit) -> None:
        """Change a job. On return it is in the schedd's log. :raises QueueError: it is not."""
        schedd = self._condor.Schedd()
        flags = self._condor.TransactionFlag
        with step(edit.label):
            try:
                for name, value in edit.plain:
                    schedd.edit(edit.job_id, name, value)
                for name, value in edit.logged:
                    schedd.edit(edit.job_id, name, value, flags=flags.ShouldLog)
            except self._errors as problem:
                raise QueueError(f"{edit.job_id}: {problem}") from None
            if edit.atomic:
                self._edit_at_once(edit)

    def remove(self, job: Job, reason: str) -> None:
        """condor_rm. :raises QueueError: the job stays."""
        try:
            self._condor.Schedd().act(self._condor.JobAction.Remove, f"{job.cluster}.{job.proc}", reason=reason)
        except self._errors as problem:
            raise QueueError(f"{job.cluster}.{job.proc}: {problem}") from None

    def _edit_at_once(self, edit: Edit) -> None:
        argv = [self._qedit, "-constraint", edit.condition, *(part for pair in edit.atomic for part in pair)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise QueueError(f"{edit.job_id}: {problem}") from None
        if done.returncode:
            raise QueueError(f"{edit.job_id}: {' '.join(done.stderr.split())}")

    def _query(self, constraint: str, projection: Iterable[str] = PROJECTION) -> list[Any]:
        try:
            return list(self._condor.Schedd().query(constraint, list(projection)))
        except self._errors as problem:
            raise QueueError(f"the schedd does not answer: {problem}") from None

    def _history(self, ids: list[str]) -> Iterator[Any]:
        wanted = [
            "GlobalJobId", "ClusterId", "ProcId", "JobStatus", "NumShadowStarts", "TransferOutFinished",
            "JobCurrentFinishTransferOutputDate", "JobCurrentStartExecutingDate",
        ]  # fmt: skip
        for constraint in _by_ids(ids):
            try:
                yield from self._condor.Schedd().history(constraint, wanted, min(len(ids), _IDS_AT_ONCE))
            except self._errors as problem:
                raise QueueError(f"the history cannot be read: {problem}") from None


def _by_ids(ids: list[str]) -> Iterator[str]:
    """Constraints for jobs by ``cluster.proc``, some hundred at a time."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        parts = (job_id.split(".") for job_id in ids[start : start + _IDS_AT_ONCE])
        yield " || ".join(f"ClusterId == {int(cluster)} && ProcId == {int(proc)}" for cluster, proc in parts)
