"""The table of reasons: why output was not handed off or not delivered, who can act, and what to do.

A refused hand-off has a short code that does not change; who refuses names it (:mod:`stageout.core.synchronous`). A
failed delivery has the name and number of its :class:`ErrorClass`, and held jobs have the number as their sub-code.
Refusals, hold reasons, `stageout explain CODE`, the web page and the reference have their words from here. Nothing is
found by these words, so they may change.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from stageout.core.errors import ErrorClass
from stageout.core.synchronous import FAILED, NOT_SAID

#: HoldReasonSubCode is this plus the error code: above anything that a plugin's exit status can make.
HOLD_SUBCODE_BASE = 20000
RERUN_ADVICE = "`condor_release` runs the job again"


class Actor(enum.Enum):
    """The person who can remove a cause."""

    OWNER = "owner of the job"
    ACCESS_POINT = "administrator of the access point"
    NODE = "administrator of the node"
    SERVER = "administrator of the server"
    NOBODY = "nobody"


class Way(enum.Enum):
    """The cheapest step that can help. The values are advice to the owner of output that waits on its node."""

    RETRY = f"`stageout retry` sends it again, `stageout redirect` to another URL; {RERUN_ADVICE}"
    REDIRECT = (
        "`stageout redirect` sends it to another URL, `stageout retry` to the same one; for a new run set "
        f"OutputDestination with `condor_qedit`, then {RERUN_ADVICE}"
    )
    RELEASE = RERUN_ADVICE


@dataclass(frozen=True)
class Cause:
    """One reason.

    :param name: code of a refusal, also the name of an attribute; or the name of an error class.
    :param happened: what it means, for the job's owner. :param steps: what to do, the cheapest step first.
    :param when: the steps can help; "" for now. :param kind: class of the error of a failed delivery.
    """

    name: str
    actor: Actor
    happened: str
    steps: str
    when: str = ""
    kind: ErrorClass | None = None

    @property
    def hold_subcode(self) -> int:
        """HoldReasonSubCode of jobs that are held for it, 0 for a refusal: it holds no job."""
        return HOLD_SUBCODE_BASE + self.kind.code if self.kind else 0

    @property
    def advice(self) -> str:
        """The next steps, the cheapest first, as the end of a sentence."""
        return f"{self.when}, {self.steps}" if self.when else self.steps

    @property
    def action(self) -> str:
        """The advice as a sentence."""
        return f"{self.advice[:1].upper()}{self.advice[1:]}."

    @property
    def action_while_tried(self) -> str:
        """The next step for output that the node still tries to send. The first one costs nothing."""
        when = f" {self.when}," if self.when else ""
        return (
            f"The node tries again by itself.{when[:2].upper()}{when[2:]} `stageout retry` tries at once, and "
            "`stageout redirect` sends it to another URL."
        )


def _failure(kind: ErrorClass, actor: Actor, happened: str, way: Way, when: str = "") -> Cause:
    return Cause(kind.name, actor, happened, steps=way.value, when=when, kind=kind)


#: All reasons. Those of refused hand-offs come first.
CAUSES: tuple[Cause, ...] = (
    # The access point has left the job out; JOB_TRANSFORM_StageOutWhy writes these codes.
    Cause(
        "NotAsked",
        Actor.OWNER,
        "StageOutAsync is false: the owner says so, or this access point asks jobs to opt in",
        "set `MY.StageOutAsync = true` in the submit file",
    ),
    Cause(
        "Routed",
        Actor.NOBODY,
        "a JobRouter or Condor-C made this job of another one, which is completed as soon as this one is",
        "nothing: if the upload fails, the other job is held with the reason and codes of this one",
    ),
    Cause(
        "DagNode",
        Actor.OWNER,
        "nodes of a DAG are handed off only with StageOutAsync = true",
        "set `MY.StageOutAsync = true` in the submit file, see docs/user/dags.md",
    ),
    Cause(
        "WorkflowJob",
        Actor.OWNER,
        "its workflow manager may take a completed job for delivered output, so such jobs are handed off "
        "only with StageOutAsync = true",
        "set `MY.StageOutAsync = true` in the submit file, see docs/user/workflow-managers.md",
    ),
    Cause(
        "MayRunAgain",
        Actor.OWNER,
        "the job has a cron schedule or an on_exit_remove, so HTCondor may run it again",
        "use `max_retries`, `retry_until` or `success_exit_code` instead",
    ),
    Cause(
        "Universe",
        Actor.OWNER,
        "only jobs of the vanilla and the java universe (containers are vanilla) are handed off",
        "submit it in the vanilla universe, see docs/administrator/kinds.md",
    ),
    Cause(
        "NotMarked",
        Actor.ACCESS_POINT,
        "the access point has not marked the job",
        "install condor_config.d/20-stageout-ap.conf on the access point, and "
        "condor_config.d/20-stageout-ep.conf (`STARTD_JOB_ATTRS`) on the node",
    ),
    # The node refuses.
    Cause(
        "SlotUser",
        Actor.NODE,
        "the job runs under an account that is not its owner's",
        "set `STAGEOUT_ACCOUNTS` with enough accounts, see docs/administrator/execute-point.md; or use "
        "the same accounts on both machines, and `UID_DOMAIN`",
    ),
    Cause(
        "NoAgent",
        Actor.ACCESS_POINT,
        "no notice of an agent of the access point has arrived lately",
        "run `stageout doctor` on the access point",
    ),
    Cause(
        "AgentKey",
        Actor.NODE,
        "the node does not trust the key of the access point's agent",
        "compare the keys, see docs/administrator/security.md",
    ),
    Cause(
        "SlotFull",
        Actor.NODE,
        "the data slot of the job's slot is full",
        "raise `STAGEOUT_DATA_SLOT_DEPTH`, or use a faster destination",
    ),
    Cause(
        "OwnerQuota",
        Actor.NODE,
        "the owner's part of the spool is full",
        "raise `STAGEOUT_OWNER_QUOTA_MB`",
    ),
    Cause(
        "SpoolFull",
        Actor.NODE,
        "the spool of the node is full",
        "raise `STAGEOUT_SPOOL_QUOTA_MB`, or give the spool a larger filesystem",
    ),
    Cause(
        "OtherFilesystem",
        Actor.NODE,
        "the files would have to be copied: no room, or too slow",
        "put the jobs' directories and the spool on the same filesystem, see docs/administrator/execute-point.md",
    ),
    Cause(
        "NotVerified",
        Actor.NODE,
        "the plugin does not verify uploads, as the node asks for",
        "use a plugin that verifies uploads, or change `STAGEOUT_REQUIRE_VERIFIED`",
    ),
    Cause(
        "Plugin",
        Actor.NODE,
        "the node cannot run the plugin later",
        "name the plugin in `FILETRANSFER_PLUGINS`",
    ),
    Cause(
        "Encrypted",
        Actor.NODE,
        "the job's directory is encrypted, the spool is not",
        "nothing, or change `ENCRYPT_EXECUTE_DIRECTORY`",
    ),
    Cause(
        "Checkpoint",
        Actor.NOBODY,
        "a checkpoint must arrive before the job goes on",
        "nothing: checkpoints are always sent at once",
    ),
    Cause(
        "PilotEnd",
        Actor.NODE,
        "the pilot ends too soon for a later delivery",
        "let pilots live longer, see docs/pilot/index.md",
    ),
    Cause(
        "OtherRun",
        Actor.NOBODY,
        "another run of the job has output on the node",
        "nothing: the plugin sends the output itself",
    ),
    Cause(
        "Busy",
        Actor.NOBODY,
        "the sandbox manager has too many hand-offs at once",
        "nothing: the plugin sends the output itself, and the next job may be handed off",
    ),
    Cause(
        "TooMany",
        Actor.OWNER,
        "the hand-off is above a limit of the node",
        "write fewer files, for example one archive, or use a shorter URL",
    ),
    Cause(
        "Credential",
        Actor.OWNER,
        "a credential that the upload needs cannot go along",
        "give the job the credential, see docs/user/credentials.md",
    ),
    Cause(
        "Stopping",
        Actor.NOBODY,
        "the sandbox manager of the node is stopping",
        "nothing: the manager is started again",
    ),
    Cause(
        "Report",
        Actor.NODE,
        "the sandbox manager cannot make its report",
        "run `stageout doctor` on the node (`manager-report`)",
    ),
    Cause(
        "Disk",
        Actor.NODE,
        "the spool's disk or the ledger takes nothing",
        "make room or mend the disk; `SandboxManagerLog` of the node says more",
    ),
    Cause(
        "Identity",
        Actor.OWNER,
        "GlobalJobId of the job is not its own: its owner or an administrator has changed it",
        "remove the job and submit it again",
    ),
    Cause(
        "StartdSilent",
        Actor.NODE,
        "the startd does not say whose job it is",
        "compare `STARTD_JOB_ATTRS` with condor_config.d/20-stageout-ep.conf, or raise `STAGEOUT_HANDOFF_TIMEOUT`",
    ),
    Cause(
        "Unidentified",
        Actor.NODE,
        "the sandbox manager cannot tell which job the plugin works for",
        "start manager and startd with the same `condor_master`",
    ),
    Cause(
        "Files",
        Actor.OWNER,
        "the files are not as they were offered",
        "let no program change the files after the end of the job",
    ),
    # No answer.
    Cause(
        "NoManager",
        Actor.NODE,
        "no sandbox manager serves the node",
        "install condor_config.d/20-stageout-ep.conf, and look for the manager with `condor_who -daemons`",
    ),
    Cause(
        "ManagerSlow",
        Actor.NODE,
        "the sandbox manager did not answer in time",
        "raise `STAGEOUT_HANDOFF_TIMEOUT`",
    ),
    Cause(
        "Version",
        Actor.NODE,
        "plugin and sandbox manager have different versions",
        "restart the manager after an upgrade, see docs/administrator/upgrade.md",
    ),
    Cause(
        NOT_SAID,
        Actor.NODE,
        "its plugin reports no reason: the node has no stageout, or SandboxManagerLog there has it (handoff-refused)",
        "look for `handoff-refused` in `SandboxManagerLog` of the node",
    ),
    Cause(
        FAILED,
        Actor.NODE,
        "the hand-off failed",
        "read the sentence beside the code; `SandboxManagerLog` of the node says more",
    ),
    # Deliveries that fail.
    _failure(
        ErrorClass.PLUGIN_BROKEN,
        Actor.NODE,
        "The transfer plugin does not work on that node.",
        Way.RETRY,
        "when the administrator of the node has mended that",
    ),
    _failure(
        ErrorClass.BAD_REQUEST, Actor.OWNER, "The plugin cannot do what the URL or an option asks for.", Way.REDIRECT
    ),
    _failure(ErrorClass.BAD_URL, Actor.OWNER, "The URL is wrong.", Way.REDIRECT),
    _failure(ErrorClass.NOT_ATTEMPTED, Actor.OWNER, "The plugin was stopped before it reached this file.", Way.RETRY),
    _failure(ErrorClass.NAME_NOT_RESOLVED, Actor.OWNER, "No host has the name in the URL.", Way.REDIRECT),
    _failure(
        ErrorClass.NAME_LOOKUP_FAILED,
        Actor.NODE,
        "The name server did not answer, in any attempt.",
        Way.RETRY,
        "when the name server answers again",
    ),
    _failure(
        ErrorClass.CONNECT_FAILED,
        Actor.SERVER,
        "No connection to the server was possible, in any attempt.",
        Way.RETRY,
        "when the server is up",
    ),
    _failure(
        ErrorClass.TLS_UNTRUSTED,
        Actor.SERVER,
        "The server's certificate is not trusted, or has expired.",
        Way.RETRY,
        "when that certificate is in order",
    ),
    _failure(
        ErrorClass.CREDENTIAL_MISSING,
        Actor.OWNER,
        "The upload needs a credential, and the job has none.",
        Way.RETRY,
        "when the job has the credential",
    ),
    _failure(
        ErrorClass.CREDENTIAL_REFUSED,
        Actor.OWNER,
        "The server refused the credential.",
        Way.RETRY,
        "when the credential is a good one",
    ),
    _failure(
        ErrorClass.CREDENTIAL_EXPIRED,
        Actor.OWNER,
        "The credential has expired.",
        Way.RETRY,
        "when the credential is renewed (one in the URL itself cannot be)",
    ),
    _failure(
        ErrorClass.PERMISSION_DENIED,
        Actor.SERVER,
        "You may not write to that place.",
        Way.RETRY,
        "when you may write there",
    ),
    _failure(
        ErrorClass.NOT_FOUND,
        Actor.OWNER,
        "A directory in the URL does not exist.",
        Way.RETRY,
        "when the directory is there",
    ),
    _failure(
        ErrorClass.CONFLICT,
        Actor.OWNER,
        "The name is taken by a directory, or by a file that must not be replaced.",
        Way.RETRY,
        "when the name is free",
    ),
    _failure(ErrorClass.TOO_LARGE, Actor.OWNER, "The server does not accept files of that size.", Way.REDIRECT),
    _failure(
        ErrorClass.NOT_SUPPORTED, Actor.OWNER, "Plugin or server does not support what the URL asks for.", Way.REDIRECT
    ),
    _failure(
        ErrorClass.LOCAL_FILE,
        Actor.OWNER,
        "An output file is missing on the node, or cannot be read.",
        Way.RELEASE,
        "when `transfer_output_files` is right",
    ),
    _failure(
        ErrorClass.SOURCE_CHANGED,
        Actor.OWNER,
        "A file changed after the job had ended.",
        Way.RELEASE,
        "when no other program writes to the file any more",
    ),
    _failure(ErrorClass.REQUEST_REJECTED, Actor.OWNER, "The server rejected the request.", Way.REDIRECT),
    _failure(
        ErrorClass.THROTTLED, Actor.SERVER, "The server asked for fewer requests, in every attempt.", Way.RETRY, "later"
    ),
    _failure(ErrorClass.SERVER_BUSY, Actor.SERVER, "The server was busy, in every attempt.", Way.RETRY, "later"),
    _failure(
        ErrorClass.SERVER_ERROR,
        Actor.SERVER,
        "The server reported a failure of its own, in every attempt.",
        Way.RETRY,
        "when the administrator of the server has mended that",
    ),
    _failure(ErrorClass.STALLED, Actor.OWNER, "The transfer made no progress, in every attempt.", Way.RETRY),
    _failure(ErrorClass.TIMED_OUT, Actor.OWNER, "The transfer took too long, in every attempt.", Way.RETRY),
    _failure(ErrorClass.CONNECTION_LOST, Actor.OWNER, "The connection broke, in every attempt.", Way.RETRY),
    _failure(
        ErrorClass.SIZE_MISMATCH,
        Actor.SERVER,
        "The file at the destination has another size than the file that was sent.",
        Way.RETRY,
        "when the administrator of the server knows the cause",
    ),
    _failure(
        ErrorClass.CONTENT_MISMATCH,
        Actor.SERVER,
        "The file at the destination has another digest than the file that was sent.",
        Way.RETRY,
        "when the administrator of the server knows the cause",
    ),
    _failure(
        ErrorClass.NOT_VERIFIED,
        Actor.OWNER,
        "The server does not confirm what it stored, and the pool requires that.",
        Way.REDIRECT,
    ),
    _failure(ErrorClass.NO_SPACE_LOCAL, Actor.NODE, "The node has no space.", Way.RETRY, "when the node has room"),
    _failure(
        ErrorClass.NO_SPACE_REMOTE, Actor.SERVER, "The destination has no space.", Way.RETRY, "when there is room"
    ),
    _failure(
        ErrorClass.QUOTA_EXCEEDED,
        Actor.OWNER,
        "Your quota at the destination is used up.",
        Way.RETRY,
        "when there is room",
    ),
    _failure(
        ErrorClass.DEADLINE, Actor.OWNER, "The transfer did not finish within the time that a plugin has.", Way.RETRY
    ),
    _failure(
        ErrorClass.UNKNOWN,
        Actor.OWNER,
        "Another failure, which the hold reason describes. Also: output that was lost in several runs "
        "(`STAGEOUT_MAX_RERUNS`).",
        Way.RETRY,
    ),
)
REFUSALS: Mapping[str, Cause] = {cause.name: cause for cause in CAUSES if cause.kind is None}
FAILURES: Mapping[ErrorClass, Cause] = {cause.kind: cause for cause in CAUSES if cause.kind is not None}


def sentence_of(code: str) -> str:
    """Return the meaning of a refusal's code; "" for a code that is not in the table."""
    return REFUSALS[code].happened if code in REFUSALS else ""


def named(text: str) -> Cause | None:
    """Find a reason by its name in any case, by its number or by its hold sub-code."""
    for cause in CAUSES:
        numbers = (str(cause.kind.code), str(cause.hold_subcode)) if cause.kind else ()
        if text.lower() == cause.name.lower() or text in numbers:
            return cause
    return None
