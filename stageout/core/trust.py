"""Everything that agent, manager, plugins, web page and commands read: who may write it, and what a lie there does.

A test compares the table with the code: an attribute that is read and not listed here is an error, so nothing is
decided from it. The table is the source of ``docs/reference/trust.md``, and tests compare with it the lists in the
fragment of the access point. The doctor asks it for names. Plugins and hand-offs do not load this module.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple


class Part(enum.Enum):
    """A part of the product that reads; ``HTCONDOR`` stands for expressions of the fragments."""

    AGENT = "agent"
    MANAGER = "manager"
    PLUGIN = "plugins"
    PAGE = "web page"
    COMMAND = "commands"
    HTCONDOR = "HTCondor"


class Kind(enum.Enum):
    """The place of a value. The values are names of sections of the reference."""

    JOB = "job"
    SLOT = "slot"
    SCRATCH = "scratch"
    PLUGIN = "plugin"
    RECORD = "record"
    HISTORY = "history"
    COLLECTOR = "collector"
    ANSWER = "answer"
    MESSAGE = "message"
    FILE = "file"
    ENVIRONMENT = "environment"


class AtSubmission(enum.Enum):
    """Treatment of a value of a submit file by the access point."""

    OTHERS = "no attribute of ours"
    WISH = "kept: a wish of the owner"
    SET = "replaced by the access point"
    DELETED = "deleted by the access point"


class Source(NamedTuple):
    """Values that the same parties may write, and about which a lie does the same.

    :param writers: who may write them. :param when_false: what follows when they are false.
    :param is_protected: PROTECTED_JOB_ATTRS has them: after submission only superusers of the queue write them.
    """

    kind: Kind
    names: tuple[str, ...]
    readers: tuple[Part, ...]
    writers: str
    when_false: str
    at_submission: AtSubmission = AtSubmission.OTHERS
    is_protected: bool = False


_AGENT, _MANAGER, _PLUGIN = Part.AGENT, Part.MANAGER, Part.PLUGIN
_PAGE, _COMMAND, _HTCONDOR = Part.PAGE, Part.COMMAND, Part.HTCONDOR
_SHOWN = (_AGENT, _PAGE, _COMMAND)

_SCHEDD_ONLY = "the schedd"
_OWNER_TOO = "the schedd and the shadow; the owner of the job, too"
_OWNER = "the owner of the job"
_OUR_AGENT = "the agent"
_TRANSFORM = "the job transforms of the access point"
_STARTD = "the startd"
_JOB_USER = "any process of the job's user on the node"
_RECORDED = "the shadow, which copies what a plugin or a process of the job's user wrote"
_ANY_DAEMON = "any daemon of the pool"
_THIS_JOB = "Only decisions about this job and its own output can be wrong."

_JOB: tuple[Source, ...] = (
    Source(
        Kind.JOB, ("ClusterId", "ProcId", "Owner", "User"), _SHOWN, _SCHEDD_ONLY,
        "HTCondor refuses every change. Output is found by the number of the job and by `User`.",
    ),
    Source(
        Kind.JOB, ("GlobalJobId",), _SHOWN, "the schedd; without `SECURE_JOB_ATTRS` the owner of the job, too",
        "The agent compares it with the schedd's name and the number of the job. It refuses a job with another name. "
        "The time at its end only tells jobs of the same user apart.",
    ),
    Source(
        Kind.JOB, ("NumShadowStarts",), _SHOWN, _OWNER_TOO,
        "Output of another run of the same job counts, or the job runs again. Runs of another user are not found by "
        "it.",
    ),
    Source(
        Kind.JOB,
        ("JobStatus", "TerminationPending", "OnExitHold", "HoldReasonCode", "HoldReasonSubCode", "RemoveReason"),
        _SHOWN, _OWNER_TOO, f"Its output is sent, cancelled or waits like that of a job in this state. {_THIS_JOB}",
    ),
    Source(
        Kind.JOB,
        ("CompletionDate", "EnteredCurrentStatus", "JobCurrentStartExecutingDate", "JobCurrentFinishTransferOutputDate",
         "TransferOutFinished", "ShadowBday", "NumJobCompletions", "NumJobReconnects"),
        _SHOWN, _OWNER_TOO,
        "Times and counts tell runs of the same job apart, and are shown. A false one makes the own job run again, or "
        "wait.",
    ),
    Source(
        Kind.JOB, ("TransferOutputStats", "STAGEOUTFilesCountLastRun", "STAGEOUTSizeBytesLastRun"),
        (_AGENT, _COMMAND, _HTCONDOR), _OWNER_TOO,
        "The job waits for output that does not exist until `STAGEOUT_LEASE` ends, or leaves the queue before its own "
        "output arrived.",
    ),
    Source(
        Kind.JOB, ("HoldReason", "NumHolds", "NumHoldsByReason", "TransferringOutput", "RemoteHost"), _SHOWN,
        _OWNER_TOO, "They are shown, without control characters, or the agent counts holds in the own ad.",
    ),
    Source(
        Kind.JOB, ("RemotePool", "LastRemotePool"), (_AGENT,), _OWNER_TOO,
        "The agent waits for a report of the own pool only, or also of the pools in `FLOCK_TO`. No other pool is "
        "asked.",
    ),
    Source(
        Kind.JOB, ("JobPrio",), (_AGENT,), _OWNER_TOO,
        "It orders output of the same owner on a node. It raises no limit.",
    ),
    Source(
        Kind.JOB, ("DAGManJobId",), (_AGENT, _COMMAND, _HTCONDOR), _OWNER_TOO,
        "Output of the own job is treated as that of a node of a DAG, and the job is removed if the named DAG was. A "
        "DAG's nodes are only the jobs with the `User` of its DAGMan job, so no message, sum or `stageout wait` of "
        "another user counts the job.",
    ),
    Source(
        Kind.JOB, ("RoutedBy", "SubmitterGlobalJobId"), (_AGENT, _COMMAND, _HTCONDOR),
        "the JobRouter or the gridmanager; the owner of the job, too",
        "The own output is transferred before the job ends, or it is delivered although a JobRouter removed the job.",
    ),
    Source(
        Kind.JOB,
        ("Args", "Arguments", "Cmd", "Environment", "DaskWorkerName", "IsToilJob", "IsHTMapJob", "ACTCluster",
         "harvesterID", "WMAgent_AgentName"),
        (_HTCONDOR,), f"{_OWNER}, most often through a workflow manager",
        "`STAGEOUT_WORKFLOW_JOBS` finds the jobs of workflow managers by them. The own output is transferred before "
        "the job ends, or the own workflow goes on before its output has arrived.",
    ),
    Source(
        Kind.JOB, ("JobUniverse", "QDate", "TotalSubmitProcs"), (_AGENT, _PAGE, _HTCONDOR), _OWNER_TOO,
        "Messages about the own cluster have wrong sums.",
    ),
    Source(
        Kind.JOB, ("JobNotification", "NotifyUser", "UidDomain"), (_AGENT,), _OWNER_TOO,
        "Messages about the own jobs go to that address, as HTCondor's own mail does.",
    ),
    Source(
        Kind.JOB, ("JobMaterializeLimit", "JobMaterializeNextProcId", "JobMaterializePaused"),
        (_AGENT, _COMMAND, _HTCONDOR), _OWNER_TOO,
        "The own factory makes jobs earlier or later. The schedd obeys its limits on jobs of an owner in any case.",
    ),
    Source(
        Kind.JOB, ("OutputDestination", "TransferOutput", "TransferOutputRemaps", "TransferPlugins"),
        (_COMMAND, _HTCONDOR), _OWNER_TOO,
        "They are the owner's choice. `stageout explain` describes, and the transforms select, what the job says.",
    ),
    Source(
        Kind.JOB, ("OAuthServicesNeeded", "x509userproxy", "x509UserProxyExpiration"), (_AGENT, _COMMAND), _OWNER_TOO,
        "The agent reads a proxy with the rights of the owner's account, and only tokens in the owner's own directory.",
    ),
    Source(
        Kind.JOB, ("LeaveJobInQueue",), (_COMMAND,), f"{_TRANSFORM}; the owner of the job, too",
        "The own job leaves the queue early, as with condor_rm, or stays there. The doctor checks only that it is "
        "open.",
    ),
    # Attributes of stageout.
    Source(
        Kind.JOB, ("StageOutAsync",), (_COMMAND, _HTCONDOR), f"{_OWNER} at submission; {_TRANSFORM}",
        "It is the owner's wish: the own output is handed off, or transferred before the job ends.",
        AtSubmission.WISH, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutFallback", "StageOutPriority", "StageOutDeadline"), (_COMMAND,), _OWNER,
        "They are the owner's wishes about the own output: a second destination, a priority, a time.",
        AtSubmission.WISH,
    ),
    Source(
        Kind.JOB, ("StageOutUserLeave",), (_AGENT, _COMMAND, _HTCONDOR), f"{_OWNER} at submission; {_TRANSFORM}",
        "It means what `leave_in_queue` of the owner means: the own job stays in the queue. The transform cannot "
        "delete it, because jobs of a factory have it from their cluster.",
        AtSubmission.WISH, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutRequest",), _SHOWN,
        f"{_OWNER} after submission, or the web page for a reader with this right; the agent clears it",
        "It is a request about the own output, and names the run. In a submit file it would be about no run, so it is "
        "deleted there.",
        AtSubmission.DELETED,
    ),
    Source(
        Kind.JOB, ("StageOutRequestBy",), (_PAGE,), "the web page",
        "Only a superuser of the queue can change it. It is shown.",
        AtSubmission.DELETED, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutGuard",), _SHOWN, _TRANSFORM,
        "Only a superuser of the queue can change it. The agent looks at no job without it.",
        AtSubmission.SET, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutAgentKey",), (_COMMAND,), _TRANSFORM,
        "Only a superuser of the queue can change it. A node that knows the access point's key refuses another one.",
        AtSubmission.DELETED, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutState", "StageOutRun", "StageOutReruns", "StageOutUntold"),
        (*_SHOWN, _HTCONDOR), _OUR_AGENT,
        "Only a superuser of the queue can change them. They decide when the job leaves the queue, and whether it runs "
        "again.",
        AtSubmission.DELETED, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutManager", "StageOutKeys", "StageOutCustody"), (_AGENT, _COMMAND), _OUR_AGENT,
        "Only a superuser of the queue can change them. They name the managers and routers whose reports and receipts "
        "count for the job.",
        AtSubmission.DELETED, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutKeptUntil",), (_AGENT, _HTCONDOR), _OUR_AGENT,
        "Only a superuser of the queue can change it. A job stays in the queue until then.",
        AtSubmission.DELETED, is_protected=True,
    ),
    Source(
        Kind.JOB,
        ("StageOutReason", "StageOutBytesLeft", "StageOutFilesLeft", "StageOutAttempts", "StageOutNextAttempt",
         "StageOutStats", "StageOutRefused"),
        _SHOWN, _OUR_AGENT, "Only a superuser of the queue can change them. They are shown and summed up.",
        AtSubmission.DELETED, is_protected=True,
    ),
    Source(
        Kind.JOB, ("Bytes", "Files", "Seconds", "Attempts", "VerifiedBy", "Hosts", "DeliveredAt"), (_AGENT, _COMMAND),
        "the agent, in `StageOutStats`", "As for `StageOutStats`.",
    ),
    Source(
        Kind.JOB, ("StageOutSynchronousCode",), (_COMMAND,), _TRANSFORM,
        "Only a superuser of the queue can change it. It is shown as the reason of a synchronous transfer.",
        AtSubmission.DELETED, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutWorkflow",), (_HTCONDOR,), _TRANSFORM,
        "Only a superuser of the queue can change it. It says whether `STAGEOUT_WORKFLOW_JOBS` is true of the job, and "
        "counts at the submission only.",
        AtSubmission.SET, is_protected=True,
    ),
    Source(
        Kind.JOB, ("StageOutRetryDelay",), (_HTCONDOR, _PLUGIN), f"{_TRANSFORM}; {_OWNER} after submission",
        "The own job waits for another time before it runs again, or its failed transfers have the other exit status.",
        AtSubmission.DELETED,
    ),
)  # fmt: skip

_SLOT: tuple[Source, ...] = (
    Source(
        Kind.SLOT, ("Name", "SlotID", "DSlotId", "DSlotID"), (_MANAGER, _PAGE), _STARTD,
        "The manager asks the startd of its own node. Root of the node can write everything there.",
    ),
    Source(
        Kind.SLOT, ("JobId", "RemoteScheddName", "RemoteUser"), (_MANAGER, _COMMAND), "the startd, from the claim",
        "No job and no owner can change them. The manager makes the identity of the job from them.",
    ),
    Source(
        Kind.SLOT, ("AccountingGroup",), (_MANAGER,), "the schedd, which takes the group from the submit file",
        "Records of the own files show another group. No limit depends on it.",
    ),
    Source(
        Kind.SLOT, ("State", "Activity"), (_COMMAND,), _STARTD, "The doctor checks a slot that has no job, or none.",
    ),
    Source(
        Kind.SLOT, ("GlobalJobId",), (_MANAGER, _COMMAND),
        "the access point; without `SECURE_JOB_ATTRS` the owner, too",
        "The manager compares it with `RemoteScheddName` and `JobId`. If they differ, the transfer is synchronous.",
    ),
    Source(
        Kind.SLOT, ("NumShadowStarts",), (_MANAGER, _COMMAND), "the access point; the owner of the job, too",
        "Output of another run of the same user's job is replaced. The agent confirms only the run that it knows.",
    ),
    Source(
        Kind.SLOT, ("StageOutGuard", "StageOutAgentKey", "StageOutSynchronousCode"), (_MANAGER, _COMMAND),
        "the access point",
        "A job can change them on its node only if `CHIRP_DELAYED_UPDATE_PREFIX` allows it, which the doctor reports. "
        "Without `StageOutGuard` the transfer is synchronous.",
    ),
    Source(
        Kind.SLOT,
        ("StageOutAsync", "StageOutFallback", "OutputDestination", "CheckpointDestination", "EncryptExecuteDirectory",
         "JobPrio"),
        (_MANAGER, _COMMAND), "the owner of the job, at the access point",
        "They concern the own output: whether it is handed off, where it may go, in which order it is sent.",
    ),
    Source(
        Kind.SLOT, ("SlotMergeConstraint",), (_MANAGER,), "the program that the startd runs",
        "It is text for the startd. Nothing is decided from it.",
    ),
)  # fmt: skip

_SCRATCH: tuple[Source, ...] = (
    Source(
        Kind.SCRATCH,
        ("GlobalJobId", "OutputDestination", "CheckpointDestination", "OriginalOut", "OriginalErr", "Environment",
         "TransferInput", "StageOutRetryDelay", "ProjectName", "JobPrio", "StageOutPriority", "StageOutDeadline"),
        (_PLUGIN,), f"the starter, in `.job.ad`; {_JOB_USER}",
        "The plugin runs with the rights of the job's user: it sends the own output elsewhere, or in another way. The "
        "manager does not believe it, and asks the startd.",
    ),
    Source(
        Kind.SCRATCH, ("Machine",), (_PLUGIN,), f"the starter, in `.machine.ad`; {_JOB_USER}",
        "The name is written into the plugin's own result. Settings there change the own transfer only.",
    ),
    Source(
        Kind.SCRATCH, ("StageOutSpool",), (_PLUGIN,), f"the starter, in `.machine.ad`; {_JOB_USER}",
        "The own output is transferred synchronously, or goes to a process of the same user. A listener of other users "
        "than root, the startd's and the job's own gets nothing.",
    ),
    Source(
        Kind.SCRATCH, ("Url", "LocalFileName", "PluginData", "StageOutDestination"), (_PLUGIN,),
        f"the starter or the manager, in the plugin's input; {_JOB_USER} while the job has its slot",
        "The plugin opens the files with the rights of the job's user. A hand-off of a file of another user is "
        "refused.",
    ),
)  # fmt: skip

_PLUGINS: tuple[Source, ...] = (
    Source(
        Kind.PLUGIN,
        ("SupportedMethods", "MultipleFileSupport", "ProtocolVersion", "PluginVersion", "StartdAttrs",
         "StageOutVerifies", "StageOutBatchFiles", "StageOutConcurrency", "StageOutInParts",
         "StageOutSplitsDownloads", "StageOutDeletes"),
        (_MANAGER, _COMMAND), "the plugin, which the administrator has registered",
        "A plugin that the administrator installed is trusted with the output that it sends.",
    ),
    Source(
        Kind.PLUGIN,
        ("TransferUrl", "TransferFileName", "TransferSuccess", "TransferError", "TransferErrorData", "TransferProtocol",
         "TransferType", "TransferFileBytes", "TransferTotalBytes", "TransferStartTime", "TransferEndTime",
         "ConnectionTimeSeconds", "DeveloperData", "ErrorType", "ErrorString", "FailureType", "Retryable",
         "StageOutErrorCode", "StageOutVerified", "StageOutDigests", "StageOutSeconds", "StageOutBytesPerSecond",
         "StageOutAttempts", "StageOutCustody", "Streams", "Routes", "Packed", "ShouldRefresh", "FailedName",
         "FailedServer", "RedirectedTo", "LibcurlReturnCode", "TransferHTTPStatusCode", "TransferTries",
         "TransferHostName", "TransferLocalMachineName", "GlobusCode"),
        (_MANAGER, _PLUGIN, _COMMAND), "the plugin's process, under the account of the files' owner",
        "The manager believes a plugin about the files of its batch only. Where `STAGEOUT_REQUIRE_VERIFIED` is set, a "
        "file without the destination's confirmation is no success.",
    ),
)  # fmt: skip

_RECORDS: tuple[Source, ...] = (
    Source(
        Kind.RECORD, ("RunInstanceId", "EpochWriteDate"), (_AGENT,), "the shadow, in the file of the job",
        "The last line of a record is the shadow's. A text of a job can only look like records of the same job, "
        "because each job has a file of its own.",
    ),
    Source(
        Kind.RECORD, ("GlobalJobId", "NumShadowStarts", "RemoteHost"), (_AGENT, _COMMAND), _RECORDED,
        "Records are found by the number of the job and compared with its owner. Those of another job are not used.",
    ),
    Source(
        Kind.RECORD,
        ("OutputPluginResultList", "DeveloperData", "StageOutReceipt", "Ticket", "ManagerName", "ManagerKey", "Files",
         "Bytes"),
        (_AGENT, _PLUGIN, _COMMAND), _RECORDED,
        "A false receipt names no ticket that a manager has signed for this owner's run, so nothing is confirmed by "
        "it.",
    ),
    Source(
        Kind.RECORD,
        ("TransferUrl", "TransferFileName", "TransferFileBytes", "TransferTotalBytes", "TransferProtocol",
         "TransferSuccess", "TransferError", "StageOutSynchronous", "StageOutSynchronousCode"),
        (_COMMAND,), _RECORDED, "`stageout history` shows them in the rows of the own job, without control characters.",
    ),
)  # fmt: skip

_HISTORY: tuple[Source, ...] = (
    Source(
        Kind.HISTORY,
        ("Owner", "GlobalJobId", "ClusterId", "ProcId", "NumShadowStarts", "AcctGroup", "RecordWriteDate",
         "StageOutState", "StageOutReason", "StageOutFiles", "StageOutFileNumber", "StageOutPlugin", "StageOutManager",
         "StageOutManagerKey", "StageOutAcceptedAt", "StageOutEndedAt", "StageOutBytesPerSecond", "StageOutErrorCode",
         "StageOutErrorClass", "StageOutAttempts", "TransferUrl", "TransferFileName", "TransferFileBytes",
         "TransferError", "TransferHostName", "TransferStartTime", "TransferEndTime"),
        (_AGENT, _PAGE, _COMMAND), "the agent, in `stageout_history`, from a signed report",
        "A manager can report false figures about output that it took over itself, but no other owner and no other "
        "job.",
    ),
)  # fmt: skip

_COLLECTOR: tuple[Source, ...] = (
    Source(
        Kind.COLLECTOR, ("StageOutPayload", "StageOutSignature"), (_AGENT, _MANAGER, _PAGE, _COMMAND), _ANY_DAEMON,
        "A message counts only with the signature of the key that its sender has for this run or this access point.",
    ),
    Source(
        Kind.COLLECTOR, ("MyType", "Name", "StageOutManager", "StageOutSchedd", "StageOutBucket", "StageOutVersion"),
        (_AGENT, _MANAGER, _PAGE, _COMMAND), _ANY_DAEMON,
        "They select messages, and their content must agree with the signed text. Another daemon can hide messages.",
    ),
    Source(
        Kind.COLLECTOR,
        ("LastHeardFrom", "MyCurrentTime", "StageOutSentAt", "StageOutHeartbeat", "MonitorSelfAge", "MyAddress"),
        (_AGENT, _MANAGER, _PAGE, _COMMAND), f"the collector and the startd; {_ANY_DAEMON}",
        "A daemon counts as heard of or as silent. Output is lost only after `STAGEOUT_LEASE` without a signed report, "
        "or after the short lease that the last signed report promises.",
    ),
    Source(
        Kind.COLLECTOR,
        ("Machine", "CondorVersion", "DynamicSlot", "SlotID", "DSlotID", "HasFileTransferPluginMethods",
         "StageOutAccept", "StageOutDataSlots",
         "StageOutDataSlotsFree", "StageOutDraining", "StageOutHandoffs", "StageOutSynchronous",
         "StageOutSpoolMB", "StageOutSpoolFreeMB", "StageOutBytesAtRisk", "StageOutJobsAtRisk"),
        (_MANAGER, _PAGE, _COMMAND, _HTCONDOR), f"the node's manager and plugins, through its startd; {_ANY_DAEMON}",
        "They are shown, or a node takes jobs or none. No output is confirmed, sent or deleted by them.",
    ),
    Source(
        Kind.COLLECTOR, ("AllusersRunning", "AllusersIdle", "AllusersHeld", "Running"), (_PAGE,), _SCHEDD_ONLY,
        "The page shows wrong counts.",
    ),
)  # fmt: skip

_ANSWERS: tuple[Source, ...] = (
    Source(
        Kind.ANSWER,
        ("Manager", "Uid", "AgentKeys", "Key", "Schedd", "Learnt", "Refused", "Ad", "Problem", "BytesAtRisk",
         "CredentialSources", "HandoffsTried", "HandoffsRefused", "HandoffRefusals", "HandoffsCopied",
         "HandoffBytesCopied", "HandoffCopyMs", "Reason", "Count", "MissingPlugins", "ReportAge", "ReportProblem",
         "UnknownOutput", "SpoolProblem", "StageOutBytesAtRisk", "StageOutManager"),
        (_COMMAND,), "the manager, at the socket below its spool, which belongs to it alone",
        "The commands show them. Nothing else is decided from them.",
    ),
    Source(
        Kind.ANSWER, ("IsReady",), (_COMMAND,), "condor_master, through `condor_who`",
        "The doctor names daemons, or does not.",
    ),
)  # fmt: skip

_MESSAGES: tuple[Source, ...] = (
    Source(
        Kind.MESSAGE, ("StageOutManager",), (_AGENT, _PAGE, _COMMAND), "the manager that holds the signing key",
        "A manager is believed about runs for which it has a receipt in the records of the access point. About others "
        "it can only make the agent ask.",
    ),
    Source(
        Kind.MESSAGE, ("StageOutAgent", "StageOutOrders", "StageOutOrderBucket"), (_MANAGER, _PAGE, _COMMAND),
        "the agent that holds the signing key", "An agent can give orders only about jobs of its own access point.",
    ),
    Source(
        Kind.MESSAGE, ("StageOutRenewal",), (_AGENT, _MANAGER), "the manager that holds the signing key",
        "The agent sends a credential only to the manager that the receipt of the run names, for a job in the queue.",
    ),
    Source(
        Kind.MESSAGE, ("StageOutPolicy", "StageOutRouter"), (_PAGE,), _ANY_DAEMON,
        "They are not signed. The page shows wrong figures of a policy service or router.",
    ),
    Source(
        Kind.MESSAGE, ("hand-off",), (_MANAGER,), "any process on the node",
        "The manager takes user and process from the kernel, and the job from the startd. It takes only regular files "
        "of that user in the scratch directory of the slot.",
    ),
    Source(
        Kind.MESSAGE, ("answer to a hand-off",), (_PLUGIN,), "the manager of the node",
        "The plugin believes the socket below the spool, which only the manager's user can make.",
    ),
    Source(
        Kind.MESSAGE, ("query of a command",), (_MANAGER,), "any local user",
        "The manager takes the user from the kernel, and shows sandboxes of this user only. Root sees all.",
    ),
    Source(
        Kind.MESSAGE, ("answer of a policy service",), (_MANAGER,), "the service of `STAGEOUT_POLICY_URL`",
        "It changes how many files move at once, within the limits of the node.",
    ),
    Source(
        Kind.MESSAGE, ("answer of a router",), (_AGENT, _PLUGIN), "the router that proved the shared key",
        "A router is trusted with the files that it takes into custody. Without TLS so is the network.",
    ),
    Source(
        Kind.MESSAGE, ("request of a browser",), (_PAGE,), "anybody who reaches the port",
        "It changes nothing but requests of users who may. It shows names of files only to readers with a token.",
    ),
)  # fmt: skip

_FILES: tuple[Source, ...] = (
    Source(
        Kind.FILE, (".job.ad", ".machine.ad", ".condor_creds", ".x509_proxy"), (_PLUGIN, _MANAGER),
        f"the starter; {_JOB_USER}",
        "They serve the own transfer. The manager copies them with the rights of the job's user.",
    ),
    Source(
        Kind.FILE, ("-infile", "-outfile"), (_PLUGIN, _MANAGER, _HTCONDOR), _JOB_USER,
        "The own transfer succeeds or fails. Results are matched with the files of the batch.",
    ),
    Source(
        Kind.FILE, ("stageout_agent_runs",), (_AGENT,), "the shadow",
        "One file for each job, so a text of a job cannot look like records of another one.",
    ),
    Source(
        Kind.FILE, ("epoch_history",), (_AGENT, _COMMAND), "the shadow, with texts of jobs",
        "The agent only looks whether it has grown. Commands show its records and compare their `GlobalJobId`.",
    ),
    Source(
        Kind.FILE, ("history",), (_AGENT, _COMMAND), "the schedd, with the last ad of the job",
        "As for the attributes of the job: its number and its user are the schedd's.",
    ),
    Source(
        Kind.FILE, ("job event log",), (_COMMAND,), _OWNER_TOO, "`stageout wait` of its owner ends early or late.",
    ),
    Source(
        Kind.FILE,
        ("stageout_agent", "stageout_agent_key", "stageout_agent_seen", "stageout_agent_tls", "stageout_agent_custody",
         "stageout_agent_failures", "stageout_agent_watched", "stageout_history"),
        (_AGENT, _COMMAND, _PAGE), "the agent's user",
        "A person who can write below `SPOOL` controls the queue, too.",
    ),
    Source(
        Kind.FILE, ("ledger", "manager_key", "sandboxes", "run"), (_MANAGER, _PLUGIN), "the manager's user",
        "Root of the node, or the pilot's user, can forge what this node reports about the runs that it took over.",
    ),
    Source(
        Kind.FILE, ("HTCondor's configuration",), (_AGENT, _MANAGER, _PAGE, _COMMAND), "the administrator",
        "The administrator is trusted with everything on this machine.",
    ),
)  # fmt: skip

_ENVIRONMENT: tuple[Source, ...] = (
    Source(
        Kind.ENVIRONMENT, ("_CONDOR_JOB_AD", "_CONDOR_MACHINE_AD", "_CONDOR_CREDS", "X509_USER_PROXY"),
        (_PLUGIN, _COMMAND), "the starter, the manager, or the user of the command",
        "They name files that the plugin opens with the rights of the job's user.",
    ),
    Source(
        Kind.ENVIRONMENT,
        ("STAGEOUT_MOVER", "STAGEOUT_SPOOL", "STAGEOUT_HANDOFF_TIMEOUT", "STAGEOUT_PLUGIN_LIFETIME_S", "LC_CTYPE",
         "http_proxy", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"),
        (_PLUGIN,), "the starter or the manager; since HTCondor 25.8.2 the owner of the job, too",
        "The own transfer takes another way, waits longer, or is synchronous. The manager identifies the plugin "
        "itself.",
    ),
    Source(
        Kind.ENVIRONMENT, ("STAGEOUT_FAULTS",), (_AGENT, _MANAGER, _PLUGIN), "the user that starts the process",
        "Tests stop a process at a step. A job can stop only its own plugin, as with a signal.",
    ),
    Source(
        Kind.ENVIRONMENT, ("NO_COLOR", "TERM", "BEARER_TOKEN", "BEARER_TOKEN_FILE", "XDG_RUNTIME_DIR"), (_COMMAND,),
        "the user of the command", "The command works for this user with another look or another token.",
    ),
)  # fmt: skip

SOURCES: tuple[Source, ...] = (
    *_JOB, *_SLOT, *_SCRATCH, *_PLUGINS, *_RECORDS, *_HISTORY, *_COLLECTOR, *_ANSWERS, *_MESSAGES, *_FILES,
    *_ENVIRONMENT,
)  # fmt: skip


def names_of(*kinds: Kind) -> frozenset[str]:
    """Return all names of these kinds."""
    return frozenset(name for source in SOURCES if source.kind in kinds for name in source.names)


def deleted_at_submission() -> tuple[str, ...]:
    """Return the attributes whose value in a submit file the transform deletes, in the order of the table."""
    return tuple(name for source in SOURCES if source.at_submission is AtSubmission.DELETED for name in source.names)


def protected_attributes() -> frozenset[str]:
    """Return the attributes that PROTECTED_JOB_ATTRS has."""
    return frozenset(name for source in SOURCES if source.is_protected for name in source.names)


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that one of HTCondor's patterns matches: ``*`` stands for any text, and case does not count."""
    found = [re.compile(".*".join(map(re.escape, pattern.split("*"))), re.I | re.S) for pattern in patterns]
    return [name for name in names if any(pattern.fullmatch(name) for pattern in found)]
