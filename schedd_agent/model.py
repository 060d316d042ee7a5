"""The agent's knowledge (jobs, records, reports) and its effects. Plain data, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from stageout.core.states import State
from stageout.wire.custody import Action, SandboxReport

HOLD_CODE = 12
"""HoldReasonCode of a failed output transfer."""

HOLD_NAME = "TransferOutputError"
"""Its name in NumHoldsByReason."""

HOLD_SUBCODE_BASE = 20000
"""Our HoldReasonSubCode is this plus the error code: above anything that a plugin's exit status can make."""

POLICY_HOLD_CODE = 3
USER_HOLD_CODE = 1
HOLDING = (State.FAILED, State.LOST)
"""Ends for which we hold a job."""

NOTHING_YET = "None"
"""StageOutState of a job that has handed nothing off."""


def custodian(manager: str, key: str) -> str:
    """One manager with one key. A name can be taken by anybody, so all that is decided goes by this."""
    return f"{manager} {key}".rstrip()


def name_of(custodian: str) -> str:
    """The manager's name."""
    return custodian.partition(" ")[0]


def key_of(custodian: str) -> str:
    """The manager's public key; "" when its reports are not signed."""
    return custodian.partition(" ")[2]


class Status(enum.IntEnum):
    """JobStatus."""

    IDLE = 1
    RUNNING = 2
    REMOVED = 3
    COMPLETED = 4
    HELD = 5
    TRANSFERRING = 6
    SUSPENDED = 7


class Request(str, enum.Enum):
    """The owner's request by StageOutRequest; the schedd has made sure that it is the owner."""

    RETRY = "retry"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True)
class Shown:
    """The job ad's attributes about stage-out.

    :param run: StageOutRun. :param next_attempt_at: wall clock, seconds; 0 when none is planned.
    :param keys: public keys of the managers that the run's record named.
    :param custody: what routers of the overlay have (:class:`stageout.wire.deposits.Holding`), apart by "; ".
    """

    state: str = NOTHING_YET
    run: int = 0
    reason: str = ""
    bytes_left: int = 0
    files_left: int = 0
    attempts: int = 0
    next_attempt_at: int = 0
    manager: str = ""
    keys: str = ""
    custody: str = ""


@dataclass(frozen=True)
class MailTo:
    """The person who gets mail about a job.

    :param notification: JobNotification. :param address: NotifyUser, or the owner. :param domain: UidDomain.
    """

    notification: int = 0
    address: str = ""
    domain: str = ""


@dataclass(frozen=True)
class Job:
    """A job in the queue.

    :param name: GlobalJobId. :param run: NumShadowStarts. :param handed_off: files that its last run handed off.
    :param owner: Owner, "" when it is not known.
    :param held_at_exit: held by its own on_exit_hold, where HTCondor delivers output too.
    :param shadow_since: ShadowBday, wall clock, seconds. :param executing_since: when its last run began to execute,
    likewise. :param transferred_at: end of its last transfer of output, likewise, 0 when it had none.
    :param dag: cluster of its DAGMan job, 0 when it is no node.
    :param untold: run that we held, until its log says so. :param hold_counts: NumHoldsByReason.
    :param is_kept: a node that DAGMan removed after its end, and that counts as completed.
    :param has_ended: its last run has ended for good: the next shadow, if there is one, only says so again.
    :param has_shadow: something of its last run still goes on (RemoteHost).
    :param kept_until: the queue keeps it until then, wall clock, seconds; 0: for the limit after its end.
    :param has_flocked: its last run was in another pool. :param in_factory: its cluster makes jobs one after the other.
    :param is_left_by_owner: its owner's own expression may keep it in the queue.
    """

    name: str
    cluster: int
    proc: int
    status: int
    run: int
    handed_off: int = 0
    priority: int = 0
    dag: int = 0
    entered_at: int = 0
    completions: int = 0
    reconnects: int = 0
    shadow_since: int = 0
    executing_since: int = 0
    transferred_at: int = 0
    hold_code: int = 0
    hold_subcode: int = 0
    held_at_exit: bool = False
    request: str = ""
    reruns: int = 0
    is_kept: bool = False
    has_ended: bool = False
    has_shadow: bool = False
    shown: Shown = field(default_factory=Shown)
    untold: int = 0
    hold_counts: Mapping[str, int] = field(default_factory=dict)
    owner: str = ""
    mail: MailTo = MailTo()
    kept_until: int = 0
    has_flocked: bool = False
    in_factory: bool = False
    is_left_by_owner: bool = False

    @property
    def held_by_us(self) -> bool:
        """True when a failed stage-out is the reason of its hold."""
        code = self.hold_code == HOLD_CODE or (self.hold_code == USER_HOLD_CODE and self.hold_untold)
        return self.status == Status.HELD and code and self.hold_subcode > HOLD_SUBCODE_BASE

    @property
    def hold_untold(self) -> bool:
        """True when a crash came between our hold of this run and its event."""
        return self.untold == self.run and self.shown.run == self.run and self.shown.state in HOLDING

    @property
    def ended(self) -> bool:
        """True when its last run is the one that counts."""
        return self.status == Status.COMPLETED or self.held_by_us or (self.status == Status.HELD and self.held_at_exit)

    @property
    def runs_anew_after_hold(self) -> bool:
        """True when it is held and its release starts a new run.

        The policy's code may stand for an on_exit_hold that is no longer true.
        """
        return self.status == Status.HELD and not (self.ended or self.has_shadow or self.hold_code == POLICY_HOLD_CODE)

    @property
    def settling(self) -> bool:
        """True when output of its last run was handed off and the run counts."""
        return self.ended and self.handed_off > 0

    @property
    def waits_in_factory(self) -> bool:
        """True when only its output keeps it, as a completed job of a factory, in the queue."""
        return self.in_factory and self.status == Status.COMPLETED and self.handed_off > 0 and not self.is_left_by_owner


@dataclass(frozen=True)
class Past:
    """The way in which a job left the queue.

    :param status: JobStatus in the history. :param run: NumShadowStarts there. :param executing_since: as of a
    :class:`Job`, and so is ``transferred_at``: they do not tell two ends apart.
    :param given_up: its owner has done without its output: StageOutState says Cancelled.
    :param failed: its ad says that its output failed or was lost. :param reconnects: as of a :class:`Job`.
    """

    status: int
    run: int
    executing_since: int = field(default=0, compare=False)
    transferred_at: int = field(default=0, compare=False)
    given_up: bool = field(default=False, compare=False)
    failed: bool = field(default=False, compare=False)
    reconnects: int = field(default=0, compare=False)
    owner: str = field(default="", compare=False)
    mail: MailTo = field(default=MailTo(), compare=False)

    @property
    def wants_nothing(self) -> bool:
        """Tell whether files that are still on their way must not arrive."""
        return self.status == Status.REMOVED or self.given_up


@dataclass(frozen=True)
class Ticket:
    """One receipt out of the record of a run. :param key: "" from a manager that did not sign."""

    name: str
    manager_name: str
    key: str
    files: int
    size_bytes: int

    @property
    def manager(self) -> str:
        """The custodian."""
        return custodian(self.manager_name, self.key)


@dataclass(frozen=True)
class Record:
    """Hand-offs of one run, by the AP's own record (OUTPUT).

    :param written_at: wall clock, seconds. :param job: GlobalJobId, "" from 23.x; ``owner`` likewise.
    """

    tickets: tuple[Ticket, ...] = ()
    written_at: int = field(default=0, compare=False)
    job: str = field(default="", compare=False)
    owner: str = field(default="", compare=False)

    @property
    def managers(self) -> tuple[str, ...]:
        """Custodians, in order of first mention."""
        return tuple(dict.fromkeys(ticket.manager for ticket in self.tickets))

    def of(self, manager: str) -> tuple[Ticket, ...]:
        """Receipts of one custodian."""
        return tuple(ticket for ticket in self.tickets if ticket.manager == manager)


@dataclass(frozen=True)
class Seen:
    """A sandbox as its manager reports it. :param key: public key that the report was checked with."""

    manager_name: str
    key: str
    sandbox: SandboxReport

    @property
    def manager(self) -> str:
        """The custodian."""
        return custodian(self.manager_name, self.key)


class Elder(NamedTuple):
    """A manager that took over output of an earlier run."""

    manager: str
    run: int


class Dag(enum.Enum):
    """The end of a node's DAG."""

    UNKNOWN = "unknown"
    REMOVED = "removed"
    ENDED = "ended"


@dataclass(frozen=True)
class Situation:
    """All that a decision about one job depends on.

    :param job: None when it is not in the queue; then ``past`` says how it left, None when that is not known.
    :param record: of the run that counts, None when there is none (yet). :param counts: the number of that run in the
    records, 0 when it is not known. It is lower than the job's after a shadow that only said that the job is done.
    :param records_written: False on an AP that writes no records of transfers.
    :param absent_s: custodian -> for how long it has not shown this run, in a view without holes.
    :param waited_s: for how long this run has been waiting, in a view without holes.
    :param elders: managers of earlier runs -> for how long nothing was heard of each, in a view without holes.
    :param edited_s_ago: since the last edit of this job by this agent.
    :param done: orders about this job that were acknowledged: (custodian, action, run number).
    """

    name: str
    job: Job | None
    past: Past | None = None
    record: Record | None = None
    counts: int = 0
    records_written: bool = True
    seen: tuple[Seen, ...] = ()
    absent_s: Mapping[str, float] = field(default_factory=dict)
    waited_s: float = 0.0
    elders: Mapping[Elder, float] = field(default_factory=dict)
    edited_s_ago: float = float("inf")
    dag: Dag = Dag.UNKNOWN
    done: frozenset[tuple[str, Action, int]] = frozenset()
    wall_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Knobs that decisions depend on, in seconds and counts.

    :param history_s: least between two questions about the same job that has left the queue, or the same DAG.
    """

    lease_s: float = 7200.0
    max_reruns: int = 2
    edit_interval_s: float = 20.0
    record_wait_s: float = 60.0
    shadow_settle_s: float = 60.0
    leave_s: float = 604800.0
    history_s: float = 60.0


@dataclass(frozen=True)
class Send:
    """Order a manager to do something about one run of the job. :param manager: custodian."""

    manager: str
    action: Action
    run: int
    tickets: tuple[str, ...] = ()
    files: int = 0
    priority: int = 0


@dataclass(frozen=True)
class Show:
    """Write into the job's ad what is going on."""

    shown: Shown


@dataclass(frozen=True)
class Deliver:
    """Write that the output arrived; a completed job leaves the queue after that.

    :param stats: StageOutStats: real bytes, files, seconds, and how it was verified.
    """

    shown: Shown
    stats: Mapping[str, int | str]


@dataclass(frozen=True)
class Hold:
    """Hold the completed job, with an event in its log. :param subcode: HoldReasonSubCode."""

    shown: Shown
    subcode: int
    reason: str


@dataclass(frozen=True)
class Told:
    """The log of the job that was held says so: its ad gets reason and codes of the hold again."""

    subcode: int
    reason: str


@dataclass(frozen=True)
class Rerun:
    """Put the completed job back to idle: its output was lost."""

    shown: Shown


@dataclass(frozen=True)
class Complete:
    """Release the job that we held into being completed, with an event in its log."""

    reason: str


@dataclass(frozen=True)
class LetGo:
    """Let the completed job leave the queue without its output."""


@dataclass(frozen=True)
class Remove:
    """Remove the job, as the removal of its DAG would have done."""

    reason: str


@dataclass(frozen=True)
class Keep:
    """Keep the completed job in the queue for longer. :param until: wall clock, seconds."""

    until: int


@dataclass(frozen=True)
class ClearRequest:
    """The owner's request was carried out, or cannot be."""


@dataclass(frozen=True)
class Note:
    """Record that output failed after its job had left the queue."""

    run: int
    state: str
    reason: str


Effect = Union[Send, Show, Deliver, Hold, Told, Rerun, Complete, LetGo, Remove, ClearRequest, Keep, Note]

GOOD_ENDS = (State.DELIVERED, State.RELEASED)
