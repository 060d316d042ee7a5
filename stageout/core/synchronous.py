"""Reasons why the output of a job was not handed off: a table, each with a short code that does not change.

A code stands in the job's ad or in the result ads of its plugin, and is counted on its node. Sentences may change, and
nodes of an older version send sentences alone, so the code of a reason is found by words of its sentence.
"""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """One reason.

    :param code: also the name of an attribute. :param sentence: what it means, for the job's owner.
    :param words: what a sentence with this reason contains, besides ``sentence``.
    """

    code: str
    sentence: str
    words: tuple[str, ...] = ()


#: The reason of a plugin of another maker, which has no place for one in its reports.
NOT_SAID = "NotSaid"
_FAILED = "Failed"

#: The first whose words are found counts.
CAUSES = (
    # The access point has left the job out; JOB_TRANSFORM_StageOutWhy writes these codes.
    Cause("NotAsked", "StageOutAsync is false: the owner says so, or this access point asks jobs to opt in"),
    Cause("DagNode", "nodes of a DAG are handed off only with StageOutAsync = true"),
    Cause("MayRunAgain", "the job has a cron schedule or an on_exit_remove, so HTCondor may run it again"),
    Cause("Universe", "only jobs of the vanilla universe (containers are of it, too) are handed off"),
    Cause("NotMarked", "the access point has not marked the job", ("StageOutGuard is not true", "did not consent")),
    # The node refuses.
    Cause("SlotUser", "the job runs under an account that is not its owner's", (
        "an account that other owners may share", "an account that STAGEOUT_ACCOUNTS reserves",
        "a job does not run as root", "it could not read the output",
    )),
    Cause("NoAgent", "no agent of the access point was heard of lately", ("no stageout agent of schedd",)),
    Cause("AgentKey", "the node does not trust the key of the access point's agent", (
        "another key of", "STAGEOUT_AGENT_KEYS",
    )),
    Cause("SlotFull", "the data slot of the job's slot is full", ("STAGEOUT_DATA_SLOT_DEPTH",)),
    Cause("OwnerQuota", "the owner's part of the spool is full", ("STAGEOUT_OWNER_QUOTA_MB",)),
    Cause("SpoolFull", "the spool of the node is full", ("STAGEOUT_SPOOL_QUOTA_MB", "filesystem of the spool is full")),
    Cause("OtherFilesystem", "the files would have to be copied: no room, or too slow", (
        "cannot be linked into the spool",
    )),
    Cause("NotVerified", "the plugin does not verify uploads, as the node asks for", ("STAGEOUT_REQUIRE_VERIFIED",)),
    Cause("Plugin", "the node cannot run the plugin later", ("FILETRANSFER_PLUGINS", "no plugin of this node moves")),
    Cause("Encrypted", "the job's directory is encrypted, the spool is not", ("ENCRYPT_EXECUTE_DIRECTORY",)),
    Cause("Checkpoint", "a checkpoint must arrive before the job goes on", ("a checkpoint must be",)),
    Cause("PilotEnd", "the pilot ends too soon for a later delivery", ("the pilot ends in",)),
    Cause("OtherRun", "another run of the job has output on the node", (
        "is newer than this run", "a newer run of the job", "output of run", "output of this run",
    )),
    Cause("Busy", "the sandbox manager has too many hand-offs at once", (
        "is busy with", "on offer at once", "hand-offs waiting",
    )),
    Cause("TooMany", "the hand-off is above a limit of the node", (
        "of one hand-off", "has made", "a destination URL",
    )),
    Cause("Credential", "a credential that the upload needs cannot go along", (
        "credential", "past its end", "is empty or too large", "the token of", "X.509 proxy", "PluginData",
    )),
    Cause("Stopping", "the sandbox manager of the node is stopping", ("the sandbox manager is stopping",)),
    Cause("Report", "the sandbox manager cannot make its report", ("cannot make its report",)),
    Cause("Disk", "the spool's disk or the ledger takes nothing", ("the spool cannot take", "cannot record it")),
    Cause("StartdSilent", "the startd does not say whose job it is", (
        "the startd did not answer", "the startd cannot be asked", "the startd has not answered",
        "the startd does not say",
    )),
    Cause("Unidentified", "the sandbox manager cannot tell which job the plugin works for", (
        "does not descend from", "is expected", "does not say which slot", "has ended", "the startd has no slot",
        "this sandbox manager serves", "process namespace", "start both with", "ended during the hand-off",
    )),
    Cause("Files", "the files are not as they were offered", (
        "were offered", "were linked", "regular file", "belongs to uid", "cannot be read by its owner",
        "outside the scratch directory", "file of the job's own", "there is no file to hand off",
        "a file of this batch cannot be uploaded at all",
    )),
    # No answer.
    Cause("NoManager", "no sandbox manager serves the node", (
        "there is no sandbox manager", "the sandbox manager is not running",
    )),
    Cause("ManagerSlow", "the sandbox manager did not answer in time", (
        "the sandbox manager needed more than", "closed the connection before", "linked within", "not made within",
    )),
    Cause("Version", "plugin and sandbox manager have different versions", ("hand-off version", "was expected")),
    Cause(NOT_SAID, "its plugin does not report a reason; SandboxManagerLog of the node has it (refused)"),
    Cause(_FAILED, "the hand-off failed"),
)  # fmt: skip
_BY_CODE = {cause.code: cause for cause in CAUSES}


def code_of(reason: str) -> str:
    """The code of a sentence that says why."""
    found = (cause.code for cause in CAUSES if any(words in reason for words in (cause.sentence, *cause.words)))
    return next(found, _FAILED)


def sentence_of(code: str) -> str:
    """Return the meaning of a code; "" for a code that is not in the table."""
    return _BY_CODE[code].sentence if code in _BY_CODE else ""
