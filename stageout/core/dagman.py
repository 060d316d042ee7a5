"""Removals by DAGMan: nodes whose program had ended before still count as completed."""

from __future__ import annotations

import re

#: How DAGMan begins RemoveReason. LeaveJobInQueue in ``condor_config.d/20-stageout-ap.conf`` has the same expression.
REASON = "^(DAG Abort|DAG Limit|DAG Removed|Node Error|Startup Error|Removed by DAGMan)"
#: How the schedd begins RemoveReason of a DAGMan job that it removes because the DAG of that job has left the queue. It
#: replaces the reason that DAGMan gave, and skips nodes whose program has ended (TerminationPending).
_WITH_ITS_DAG = "removed because <OtherJobRemoveRequirements = DAGManJobId "
_REMOVED = 3


def is_with_its_dag(remove_reason: str) -> bool:
    """Return True for the RemoveReason of a sub-DAG that ended because the DAG above it ended, for whatever reason."""
    return remove_reason.startswith(_WITH_ITS_DAG) or is_by_dagman(remove_reason)


def is_by_dagman(remove_reason: str) -> bool:
    """Return True for the RemoveReason of a job that DAGMan removed: its DAG failed, reached a limit or was removed."""
    return re.search(REASON, remove_reason) is not None


def is_kept_node(status: int, is_node: bool, has_ended: bool, remove_reason: str) -> bool:
    """Return True when DAGMan removed a node whose program had ended: the queue keeps it like a completed job.

    :param status: JobStatus. :param is_node: it has a DAGManJobId. :param has_ended: TerminationPending.
    """
    return status == _REMOVED and is_node and has_ended and is_by_dagman(remove_reason)
