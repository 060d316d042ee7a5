"""A job of the access point: its record in the queue, and in the history. Plain data, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stageout.core.reasons import HOLD_SUBCODE_BASE
from stageout.core.states import State
from stageout.wire.custody import JobKey, is_name_of, schedd_of
from stageout.wire.owner_requests import OwnerRequest, Verb, parse_request

HOLD_CODE = 12
"""HoldReasonCode of a failed output transfer."""

HOLD_NAME = "TransferOutputError"
"""Its name in NumHoldsByReason."""

POLICY_HOLD_CODE = 3
USER_HOLD_CODE = 1
TRANSFER_HOLD_CODES = (HOLD_CODE, 33)
"""HoldReasonCodes of HTCondor's own holds after a transfer of output: it failed, or it was larger than allowed."""
HOLD_STATES = (State.FAILED, State.LOST)
"""Ends for which we hold a job."""

NOTHING_YET = "None"
"""StageOutState of a job that has not handed anything off."""


class Status(enum.IntEnum):
    """JobStatus."""

    IDLE = 1
    RUNNING = 2
    REMOVED = 3
    COMPLETED = 4
    HELD = 5
    TRANSFERRING = 6
    SUSPENDED = 7


@dataclass(frozen=True)
class JobAdState:
    """The job ad's attributes about stage-out.

    :param run: StageOutRun. :param next_attempt_at: wall clock, seconds; 0 when none is planned.
    :param keys: public keys of the managers in the run's record.
    :param custody: holdings of the overlay's routers (:class:`stageout.wire.deposits.Holding`), separated by "; ".
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
class MailRecipient:
    """Recipient of mail about a job.

    :param notification: JobNotification. :param address: NotifyUser, or the owner. :param domain: UidDomain.
    """

    notification: int = 0
    address: str = ""
    domain: str = ""


@dataclass(frozen=True)
class Job:
    """A job in the queue.

    Times are wall clock, in seconds.

    :param name: GlobalJobId, which its owner may have changed. :param user: User, ``alice@domain``.
    :param run: NumShadowStarts. :param handed_off: files that the last run handed off.
    :param owner: Owner, the user without a domain; "" when unknown.
    :param dag: cluster of the DAGMan job, 0 for a job outside DAGs.
    :param request: StageOutRequest, "" without one.
    :param held_at_exit: held by its on_exit_hold; HTCondor delivers the output of such jobs too.
    :param shadow_since: ShadowBday. :param executing_since: start of the last run's program.
    :param transferred_at: end of the last transfer of output, 0 for none.
    :param unlogged_hold_run: run that the agent held, until the job's log has the event (StageOutUntold).
    :param hold_counts: NumHoldsByReason.
    :param is_kept: DAG node that DAGMan removed after its end; it counts as completed.
    :param is_kept_copy: copy that a JobRouter removed after its end; in the history it counts as completed.
    :param has_ended: the last run has ended for good. Another shadow would only confirm that.
    :param has_shadow: the last run still has a shadow (RemoteHost).
    :param kept_until: time until which the queue keeps the job; 0 for the default limit after its end.
    :param has_flocked: the last run was in another pool. :param in_factory: the job comes from a factory.
    :param is_left_by_owner: the owner's own expression may keep the job in the queue.
    :param submitted_at: QDate. :param cluster_jobs: TotalSubmitProcs, 0 while unknown.
    """

    name: str
    cluster: int
    proc: int
    status: int
    run: int
    user: str = ""
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
    is_kept_copy: bool = False
    has_ended: bool = False
    has_shadow: bool = False
    ad_state: JobAdState = field(default_factory=JobAdState)
    unlogged_hold_run: int = 0
    hold_counts: Mapping[str, int] = field(default_factory=dict)
    owner: str = ""
    mail: MailRecipient = MailRecipient()
    kept_until: int = 0
    has_flocked: bool = False
    in_factory: bool = False
    is_left_by_owner: bool = False
    submitted_at: int = 0
    cluster_jobs: int = 0

    @cached_property
    def owner_request(self) -> OwnerRequest:
        """Return the request in StageOutRequest."""
        return parse_request(self.request)

    def has_request_of_other_run(self, recorded_run: int) -> bool:
        """Tell whether the owner asked about another run than the last one.

        :param recorded_run: lowest number of the last run, 0 when unknown. A shadow that only confirmed the end of the
            job has raised the number since.
        """
        return not self.owner_request.is_for(recorded_run or self.run, self.run)

    def asks(self, verb: Verb, recorded_run: int) -> bool:
        """Tell whether the owner asks this for the last run. :param recorded_run: its lowest number, 0: unknown."""
        return self.owner_request.verb is verb and not self.has_request_of_other_run(recorded_run)

    @property
    def key(self) -> JobKey:
        """Return the identity by which all about the job is found, if its name is its own."""
        return JobKey(self.name, self.user)

    @property
    def has_own_name(self) -> bool:
        """Tell whether GlobalJobId is that of this job. Its schedd may have had another name."""
        return bool(self.user) and is_name_of(self.name, schedd_of(self.name), f"{self.cluster}.{self.proc}")

    @property
    def held_by_us(self) -> bool:
        """Tell whether the job is held because its stage-out failed."""
        code = self.hold_code == HOLD_CODE or (self.hold_code == USER_HOLD_CODE and self.is_hold_unlogged)
        return self.status == Status.HELD and code and self.hold_subcode > HOLD_SUBCODE_BASE

    @property
    def is_hold_unlogged(self) -> bool:
        """Tell whether the agent died between its hold of this run and the event in the job's log."""
        return (
            self.unlogged_hold_run == self.run and self.ad_state.run == self.run and self.ad_state.state in HOLD_STATES
        )

    @property
    def has_failed_transfer(self) -> bool:
        """Tell whether HTCondor holds the job because a part of its output transfer failed.

        A condor_hold after that replaces the code. The ad then still has the state of the parts that were handed off.
        """
        if self.status != Status.HELD or self.has_shadow or self.has_ended or self.held_by_us:
            return False
        has_state = self.ad_state.run == self.run and self.ad_state.state != NOTHING_YET
        return self.hold_code in TRANSFER_HOLD_CODES or has_state

    @property
    def ended(self) -> bool:
        """Tell whether the last run is the final one, or its output is sent as if it were."""
        if self.status != Status.HELD:
            return self.status == Status.COMPLETED
        return self.held_by_us or self.held_at_exit or self.has_failed_transfer

    @property
    def stays_held(self) -> bool:
        """Tell whether the job is held for another reason than its stage-out. Its release starts a new run."""
        return self.status == Status.HELD and not self.held_by_us

    @property
    def runs_anew_after_hold(self) -> bool:
        """Tell whether the job is held and its release starts a new run.

        The policy's hold code may come from an on_exit_hold that is no longer true.
        """
        return self.status == Status.HELD and not (self.ended or self.has_shadow or self.hold_code == POLICY_HOLD_CODE)

    @property
    def has_final_handoff(self) -> bool:
        """Tell whether the last run is the final one and handed output off."""
        return self.ended and self.handed_off > 0

    @property
    def waits_in_factory(self) -> bool:
        """Tell whether a factory's completed job is in the queue only because of its output."""
        return self.in_factory and self.status == Status.COMPLETED and self.handed_off > 0 and not self.is_left_by_owner


@dataclass(frozen=True)
class HistoryRecord:
    """A job's ad in the history. The fields have the meaning of :class:`Job`'s.

    :param status: JobStatus. :param run: NumShadowStarts.
    :param given_up: the owner cancelled the output (StageOutState is Cancelled).
    :param failed: StageOutState says that the output failed or was lost.
    """

    status: int
    run: int
    executing_since: int = field(default=0, compare=False)
    transferred_at: int = field(default=0, compare=False)
    given_up: bool = field(default=False, compare=False)
    failed: bool = field(default=False, compare=False)
    reconnects: int = field(default=0, compare=False)
    owner: str = field(default="", compare=False)
    mail: MailRecipient = field(default=MailRecipient(), compare=False)

    @property
    def wants_nothing(self) -> bool:
        """Tell whether output that is not delivered yet must not be delivered."""
        return self.status == Status.REMOVED or self.given_up
