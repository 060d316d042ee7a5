"""Jobs as the command sees them: arguments of the command line, and the schedd's ads. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stageout.cli.exits import UsageError
from stageout.core.classads import ClassAd
from stageout.core.dagman import is_kept_node
from stageout.core.reasons import HOLD_SUBCODE_BASE
from stageout.core.states import State
from stageout.model.job import HOLD_CODE, NOTHING_YET, Status
from stageout.wire.custody import JobKey, is_name_of, schedd_of
from stageout.wire.deposits import Holding, read_holdings

_JOB_ID = re.compile(r"(\d{1,10})(?:\.(\d{1,10}))?\Z", re.A)

#: Attributes that :meth:`Job.from_ad` reads.
ATTRIBUTES = (
    "ClusterId", "ProcId", "GlobalJobId", "Owner", "JobStatus", "CompletionDate",
    "NumShadowStarts", "TransferOutputStats", "DAGManJobId", "HoldReason", "HoldReasonCode", "HoldReasonSubCode",
    "RemoveReason", "StageOutGuard", "StageOutState", "StageOutRun", "StageOutReason", "StageOutBytesLeft",
    "StageOutFilesLeft", "StageOutAttempts", "StageOutNextAttempt", "StageOutManager", "StageOutKeys", "StageOutReruns",
    "StageOutCustody", "StageOutStats", "StageOutRequest", "StageOutRefused", "JobMaterializeLimit",
    "JobMaterializePaused", "TerminationPending", "StageOutSynchronousCode", "StageOutUserLeave",
    "TransferringOutput", "RemoteHost", "User",
)  # fmt: skip

STATUS_WORDS = {
    1: "Idle", 2: "Running", 3: "Removed", 4: "Completed", 5: "Held", 6: "TransferringOutput", 7: "Suspended",
}  # fmt: skip

#: States of held jobs whose output is no longer sent.
_SETTLED = ("Delivered", "Cancelled")
#: JobMaterializePaused of a factory that makes no more jobs: no more items, or the cluster is removed.
_FACTORY_DONE = (2, 3)


class JobId(NamedTuple):
    """A job, or with ``proc`` None all jobs of a cluster."""

    cluster: int
    proc: int | None = None

    def __str__(self) -> str:
        return str(self.cluster) if self.proc is None else f"{self.cluster}.{self.proc}"

    def covers(self, other: JobId) -> bool:
        """Tell whether ``other`` is this job or belongs to this cluster."""
        return self.cluster == other.cluster and self.proc in (None, other.proc)


def parse_job_id(text: str) -> JobId:
    """Parse ``cluster`` or ``cluster.proc``.

    :raises UsageError: the text has another form.
    """
    found = _JOB_ID.match(text)
    if not found or int(found[1]) < 1:
        raise UsageError(
            f"'{text}' is not a job: write a cluster (1234) or a job of it (1234.0), as condor_q shows them"
        )
    return JobId(int(found[1]), None if found[2] is None else int(found[2]))


def parse_job_ids(texts: Iterable[str]) -> list[JobId]:
    """Parse several job ids. Return each one once, in the given order."""
    return list(dict.fromkeys(map(parse_job_id, texts)))


def constraint(wanted: Sequence[JobId], with_clusters: bool = False) -> str:
    """Write the ClassAd constraint that selects the jobs.

    :param with_clusters: also select the cluster ads, which have no ProcId.
    """
    also = " || ProcId is undefined || ProcId < 0" if with_clusters else ""
    parts = [
        f"ClusterId == {job.cluster}" + ("" if job.proc is None else f" && (ProcId == {job.proc}{also})")
        for job in wanted
    ]
    return " || ".join(f"({part})" for part in parts) or "false"


@dataclass(frozen=True)
class Job:
    """One job, in the queue or in the history.

    :param status: JobStatus; COMPLETED for a node that DAGMan removed after its end, TRANSFERRING also while the schedd
        still counts a job as running although its output is transferred.
    :param run: NumShadowStarts, the number of the last run.
    :param files_handed_off: files of the last run; 0 for a synchronous transfer, and before the transfer.
    :param state: StageOutState, "None" before and without hand-off. :param state_run: the run of that state.
    :param next_attempt_at: wall clock, seconds; 0 when none is planned.
    :param keys: keys of the managers that took the output over; empty until the agent writes them.
    :param custody: output in the custody of routers.
    :param left_out: code of the reason why the access point left the job out of stage-out.
    :param is_left_by_owner: the owner's own leave_in_queue keeps the job. :param in_queue: False: from the history.
    :param slot: name of the slot in which the job runs; "" when it does not run. :param user: User, ``alice@domain``.
    """

    id: JobId
    global_id: str
    owner: str
    status: int
    run: int
    guard: bool
    files_handed_off: int
    bytes_handed_off: int
    state: str
    state_run: int | None
    reason: str
    files_left: int | None
    bytes_left: int | None
    attempts: int
    next_attempt_at: int
    manager: str
    reruns: int
    in_dag: bool
    hold_code: int
    hold_subcode: int
    hold_reason: str
    remove_reason: str
    completed_at: int
    request: str
    stats: Mapping[str, Any]
    keys: frozenset[str] = frozenset()
    custody: tuple[Holding, ...] = ()
    left_out: str = ""
    is_left_by_owner: bool = False
    in_queue: bool = True
    refused: str = ""
    slot: str = ""
    user: str = ""

    @classmethod
    def from_ad(cls, ad: ClassAd) -> Job:
        """Read a job's ad. Attributes that are absent or of another type count as not set."""
        moved = ad.get("TransferOutputStats")
        moved = moved if isinstance(moved, ClassAd) else ClassAd()
        stats = ad.get("StageOutStats")
        stats = stats if isinstance(stats, ClassAd) else ClassAd()
        is_delivered = ad.text("StageOutState") == State.DELIVERED
        return cls(
            id=JobId(ad.integer("ClusterId"), ad.integer("ProcId")),
            global_id=ad.text("GlobalJobId"),
            owner=ad.text("Owner"),
            status=_status(ad),
            run=ad.integer("NumShadowStarts"),
            guard=ad.get("StageOutGuard") is True,
            files_handed_off=moved.integer("STAGEOUTFilesCountLastRun"),
            bytes_handed_off=moved.integer("STAGEOUTSizeBytesLastRun"),
            state=ad.text("StageOutState", NOTHING_YET),
            state_run=_optional(ad, "StageOutRun"),
            reason=ad.text("StageOutReason"),
            files_left=_optional(ad, "StageOutFilesLeft"),
            bytes_left=_optional(ad, "StageOutBytesLeft"),
            attempts=stats.integer("Attempts") if is_delivered else ad.integer("StageOutAttempts"),
            next_attempt_at=ad.integer("StageOutNextAttempt"),
            manager=ad.text("StageOutManager"),
            reruns=ad.integer("StageOutReruns"),
            in_dag="DAGManJobId" in ad,
            hold_code=ad.integer("HoldReasonCode"),
            hold_subcode=ad.integer("HoldReasonSubCode"),
            hold_reason=ad.text("HoldReason"),
            remove_reason=ad.text("RemoveReason"),
            completed_at=ad.integer("CompletionDate"),
            request=ad.text("StageOutRequest"),
            stats=dict(stats),
            keys=frozenset(filter(None, ad.text("StageOutKeys").split(","))),
            custody=read_holdings(ad.text("StageOutCustody").split("; ")),
            left_out="" if ad.get("StageOutGuard") is True else ad.text("StageOutSynchronousCode"),
            is_left_by_owner=ad.get("StageOutUserLeave", False) is not False,
            refused=ad.text("StageOutRefused"),
            slot=ad.text("RemoteHost"),
            user=ad.text("User"),
        )

    @property
    def key(self) -> JobKey:
        """Return the identity of the job's output in managers' reports."""
        return JobKey(self.global_id, self.user)

    @property
    def is_misnamed(self) -> bool:
        """Tell whether GlobalJobId names another job, so that nodes and the agent refuse the output."""
        return not is_name_of(self.global_id, schedd_of(self.global_id), str(self.id))

    @property
    def handed_off(self) -> bool:
        """Tell whether output of the last run was handed off, at least in part."""
        return self.files_handed_off > 0

    @property
    def synchronous(self) -> bool:
        """Tell whether the output of the last run was transferred before the job ended."""
        return self.status == Status.COMPLETED and not self.handed_off

    @property
    def delivered(self) -> bool:
        """Tell whether the output of the last run is at its destination and verified."""
        return self.state == "Delivered" and self.state_run == self.run

    @property
    def held_by_stage_out(self) -> bool:
        """Tell whether the job is held because its output could not be delivered, or was lost too often."""
        return self.status == Status.HELD and self.hold_code == HOLD_CODE and self.hold_subcode > HOLD_SUBCODE_BASE

    @property
    def held_after_handoff(self) -> bool:
        """Tell whether the job is held for another reason while output of its last run is being delivered."""
        has_state = self.state_run == self.run and self.state != NOTHING_YET
        return self.status == Status.HELD and has_state and not self.held_by_stage_out

    @property
    def in_stage_out(self) -> bool:
        """Tell whether output was handed off and its delivery has not ended, or its end has not been handled."""
        finished = self.status == Status.COMPLETED and self.handed_off and not self.delivered
        is_sent = self.held_after_handoff and self.state not in _SETTLED
        return finished or self.held_by_stage_out or is_sent


def _status(ad: ClassAd) -> int:
    status, has_ended = ad.integer("JobStatus"), ad.get("TerminationPending") is True
    if status == Status.RUNNING and ad.get("TransferringOutput") is True:
        return Status.TRANSFERRING
    return Status.COMPLETED if is_kept_node(status, "DAGManJobId" in ad, has_ended, ad.text("RemoveReason")) else status


def _optional(ad: ClassAd, name: str) -> int | None:
    return ad.integer(name) if name in ad else None


def is_cluster_ad(ad: ClassAd) -> bool:
    """Tell whether an ad is a cluster ad."""
    return ad.integer("ProcId", -1) < 0


def makes_more_jobs(ad: ClassAd) -> bool:
    """Tell whether an ad is the cluster ad of a job factory that has not made all of its jobs."""
    return "JobMaterializeLimit" in ad and ad.integer("JobMaterializePaused") not in _FACTORY_DONE
