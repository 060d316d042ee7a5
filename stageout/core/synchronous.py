"""Reasons why the output of a job was not handed off: a table, each with a short code that does not change.

A code goes with its sentence from the place where the reason arises: in the manager's answer to the plugin, in the
result ads of the plugin, or in the job's ad. It is counted on its node. Sentences may change, and nothing is found by
their words.
"""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """One reason.

    :param code: also the name of an attribute. :param sentence: what it means, for the job's owner.
    """

    code: str
    sentence: str


#: The reason of a third-party plugin, which has no place for one in its reports.
NOT_SAID = "NotSaid"
#: The reason for which there is no other code, and that of a plugin or manager that sends no codes.
FAILED = "Failed"

CAUSES = (
    # The access point has left the job out; JOB_TRANSFORM_StageOutWhy writes these codes.
    Cause("NotAsked", "StageOutAsync is false: the owner says so, or this access point asks jobs to opt in"),
    Cause("Routed", "a JobRouter or Condor-C made this job of another one, which is completed as soon as this one is"),
    Cause("DagNode", "nodes of a DAG are handed off only with StageOutAsync = true"),
    Cause(
        "WorkflowJob",
        "its workflow manager may take a completed job for delivered output, so such jobs are handed off only with "
        "StageOutAsync = true",
    ),
    Cause("MayRunAgain", "the job has a cron schedule or an on_exit_remove, so HTCondor may run it again"),
    Cause("Universe", "only jobs of the vanilla and the java universe (containers are vanilla) are handed off"),
    Cause("NotMarked", "the access point has not marked the job"),
    # The node refuses.
    Cause("SlotUser", "the job runs under an account that is not its owner's"),
    Cause("NoAgent", "no notice of an agent of the access point has arrived lately"),
    Cause("AgentKey", "the node does not trust the key of the access point's agent"),
    Cause("SlotFull", "the data slot of the job's slot is full"),
    Cause("OwnerQuota", "the owner's part of the spool is full"),
    Cause("SpoolFull", "the spool of the node is full"),
    Cause("OtherFilesystem", "the files would have to be copied: no room, or too slow"),
    Cause("NotVerified", "the plugin does not verify uploads, as the node asks for"),
    Cause("Plugin", "the node cannot run the plugin later"),
    Cause("Encrypted", "the job's directory is encrypted, the spool is not"),
    Cause("Checkpoint", "a checkpoint must arrive before the job goes on"),
    Cause("PilotEnd", "the pilot ends too soon for a later delivery"),
    Cause("OtherRun", "another run of the job has output on the node"),
    Cause("Busy", "the sandbox manager has too many hand-offs at once"),
    Cause("TooMany", "the hand-off is above a limit of the node"),
    Cause("Credential", "a credential that the upload needs cannot go along"),
    Cause("Stopping", "the sandbox manager of the node is stopping"),
    Cause("Report", "the sandbox manager cannot make its report"),
    Cause("Disk", "the spool's disk or the ledger takes nothing"),
    Cause("Identity", "GlobalJobId of the job is not its own: its owner or an administrator has changed it"),
    Cause("StartdSilent", "the startd does not say whose job it is"),
    Cause("Unidentified", "the sandbox manager cannot tell which job the plugin works for"),
    Cause("Files", "the files are not as they were offered"),
    # No answer.
    Cause("NoManager", "no sandbox manager serves the node"),
    Cause("ManagerSlow", "the sandbox manager did not answer in time"),
    Cause("Version", "plugin and sandbox manager have different versions"),
    Cause(
        NOT_SAID,
        "its plugin reports no reason: the node has no stageout, or SandboxManagerLog there has it (handoff-refused)",
    ),
    Cause(FAILED, "the hand-off failed"),
)
_BY_CODE = {cause.code: cause for cause in CAUSES}


class Reason(str):
    """A sentence that says why, with its code; empty where nothing speaks against the hand-off."""

    code: str

    def __new__(cls, code: str, sentence: str) -> Reason:
        """Make one out of a code of the table and a sentence."""
        made = super().__new__(cls, sentence)
        made.code = code
        return made


NO_REASON = Reason("", "")


class NotTaken(Exception):
    """The manager does not take a hand-off. Each subclass has the code of most of its reasons.

    :param sentence: for the job's owner. :param code: another one than that of the class.
    """

    code = FAILED

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code or (sentence.code if isinstance(sentence, Reason) else self.code)


def sentence_of(code: str) -> str:
    """Return the meaning of a code; "" for a code that is not in the table."""
    return _BY_CODE[code].sentence if code in _BY_CODE else ""
