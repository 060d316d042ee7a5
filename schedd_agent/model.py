"""The facts that the agent decides from, and the effects of its decisions. Plain data, no I/O.

``stageout/model`` has the records of a job and of a run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from stageout.core.states import State
from stageout.model.job import HistoryRecord, Job, JobAdState, MailRecipient
from stageout.model.run import RunRecord, manager_identity
from stageout.wire.custody import Action, SandboxReport


@dataclass(frozen=True)
class ReportedSandbox:
    """A sandbox in a manager's report.

    :param key: public key that verified the report.
    """

    manager_name: str
    key: str
    sandbox: SandboxReport

    @property
    def manager(self) -> str:
        """Return the manager's identity."""
        return manager_identity(self.manager_name, self.key)


@dataclass(frozen=True)
class FailedAttempt:
    """A failed attempt to deliver a file, which is repeated.

    :param host: of the file's URL. :param attempts_limit: for each file, 0 without a limit.
    :param gives_up_at: wall clock, seconds, of the last attempt at the latest; 0 when unknown.
    :param of_node: the node failed, not the host.
    """

    file: str
    host: str
    error: str
    attempts_limit: int
    gives_up_at: int
    of_node: bool = False


@dataclass(frozen=True)
class DagRoot:
    """The DAGMan job at the top of a DAG with its sub-DAGs. :param submitted_at: QDate."""

    cluster: int
    mail: MailRecipient
    submitted_at: int


class PreviousRunManager(NamedTuple):
    """A manager that accepted output of an earlier run. :param manager: its identity."""

    manager: str
    run: int


class DagEnd(enum.Enum):
    """The end of a node's DAG."""

    UNKNOWN = "unknown"
    REMOVED = "removed"
    ENDED = "ended"


@dataclass(frozen=True)
class DecisionInput:
    """The facts on which the decision about one job depends.

    Managers are identities. Silence and waiting count only while the agent could have received reports
    (:class:`schedd_agent.liveness.LivenessTracker`).

    :param job: job in the queue, None after it left. :param history: its ad in the history, None when unknown.
    :param record: record of the final run, None while there is none.
    :param recorded_run: number of the final run in the records, 0 when unknown. It is lower than the job's number after
        a shadow that only confirmed the end of the job.
    :param records_written: False on an access point that writes no records of transfers.
    :param reported: sandboxes of the job in managers' reports.
    :param absent_s: manager -> seconds without a report of this run. :param waited_s: seconds since this run's end.
    :param previous_managers: managers of earlier runs -> seconds without a report.
    :param patience_s: manager -> seconds without a report after which it sends nothing more; the lease for others.
    :param edited_s_ago: seconds since the agent's last edit of the job.
    :param done: acknowledged orders about the job: (manager, action, run number).
    :param requests_done: acknowledged redirects: (manager, run number, request).
    """

    name: str
    job: Job | None
    history: HistoryRecord | None = None
    record: RunRecord | None = None
    recorded_run: int = 0
    records_written: bool = True
    reported: tuple[ReportedSandbox, ...] = ()
    absent_s: Mapping[str, float] = field(default_factory=dict)
    waited_s: float = 0.0
    previous_managers: Mapping[PreviousRunManager, float] = field(default_factory=dict)
    patience_s: Mapping[str, float] = field(default_factory=dict)
    edited_s_ago: float = float("inf")
    dag: DagEnd = DagEnd.UNKNOWN
    done: frozenset[tuple[str, Action, int]] = frozenset()
    requests_done: frozenset[tuple[str, int, str]] = frozenset()
    wall_s: float = 0.0


@dataclass(frozen=True)
class DecisionLimits:
    """Knobs of decisions, in seconds and counts.

    :param history_s: least seconds between two queries of the history about the same job or DAG.
    :param docs_url: address of the documentation, without a slash at its end; "" for none.
    """

    lease_s: float = 7200.0
    max_reruns: int = 2
    edit_interval_s: float = 20.0
    record_wait_s: float = 60.0
    shadow_settle_s: float = 60.0
    leave_s: float = 604800.0
    history_s: float = 60.0
    docs_url: str = ""

    @property
    def managers_lease_s(self) -> float:
        """Return the seconds for which a manager may send after a report: it must stop before it counts as lost."""
        return 0.75 * self.lease_s


@dataclass(frozen=True)
class SendOrder:
    """Send a manager an order about one run of the job. :param manager: its identity."""

    manager: str
    action: Action
    run: int
    tickets: tuple[str, ...] = ()
    files: int = 0
    priority: int = 0
    request: str = ""
    new_url: str = ""
    only_file: str = ""


@dataclass(frozen=True)
class UpdateAdState:
    """Write the progress of the stage-out into the job's ad."""

    ad_state: JobAdState


@dataclass(frozen=True)
class MarkDelivered:
    """Write that the output is delivered, so that a completed job can leave the queue.

    :param stats: StageOutStats: bytes, files, seconds, kind of verification, hosts and time.
    """

    ad_state: JobAdState
    stats: Mapping[str, int | str]


@dataclass(frozen=True)
class Hold:
    """Hold the completed job, with an event in its log. :param subcode: HoldReasonSubCode."""

    ad_state: JobAdState
    subcode: int
    reason: str


@dataclass(frozen=True)
class RestoreHoldReason:
    """Restore the reason and codes of a hold, after condor_hold wrote its event and replaced them."""

    subcode: int
    reason: str


@dataclass(frozen=True)
class Rerun:
    """Put the completed job back to idle because its output was lost."""

    ad_state: JobAdState


@dataclass(frozen=True)
class Complete:
    """Release the job that the agent held, so that it is completed, with an event in its log."""

    reason: str


@dataclass(frozen=True)
class LeaveQueue:
    """Let the completed job leave the queue without its output."""


@dataclass(frozen=True)
class Remove:
    """Remove the job, as the removal of its DAG would have done."""

    reason: str


@dataclass(frozen=True)
class KeepInQueue:
    """Keep the completed job in the queue for longer. :param until: wall clock, seconds."""

    until: int


@dataclass(frozen=True)
class ClearRequest:
    """Clear the owner's request, which was carried out or cannot be.

    :param refused: name of the request, and the reason why it was not carried out; "" without one.
    """

    refused: str = ""


@dataclass(frozen=True)
class RecordFailure:
    """Record that output failed after its job had left the queue."""

    run: int
    state: str
    reason: str


Effect = Union[
    SendOrder,
    UpdateAdState,
    MarkDelivered,
    Hold,
    RestoreHoldReason,
    Rerun,
    Complete,
    LeaveQueue,
    Remove,
    ClearRequest,
    KeepInQueue,
    RecordFailure,
]

GOOD_ENDS = (State.DELIVERED, State.RELEASED)
