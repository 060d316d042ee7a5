"""The process that queries the schedd for the page: a question per line on stdin, an answer per line on stdout.

It only queries. HTCondor's bindings hold the interpreter while they wait, so the page itself does not load them.
"""

from __future__ import annotations

import sys
from typing import Any

from stageout.core.children import answer_lines
from stageout.core.condor_ads import decoded

#: Attributes of a job that the page shows.
JOB_ATTRIBUTES = (
    "ClusterId", "ProcId", "GlobalJobId", "Owner", "User", "JobStatus", "QDate", "JobCurrentStartExecutingDate",
    "CompletionDate", "EnteredCurrentStatus", "NumShadowStarts", "HoldReason", "HoldReasonCode", "HoldReasonSubCode",
    "StageOutState", "StageOutReason", "StageOutBytesLeft", "StageOutFilesLeft", "StageOutNextAttempt", "StageOutGuard",
)  # fmt: skip


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    return _jobs(question) if question["op"] == "job" else _counts()


def _counts() -> dict[str, Any]:
    """Return the number of jobs in each status. All come with the query for those that transfer output."""
    import htcondor2

    found = htcondor2.Schedd().query("JobStatus == 6", [], opts=htcondor2.QueryOpt.SummaryOnly)
    ad = found[0] if found else {}
    names = {"running": "AllusersRunning", "idle": "AllusersIdle", "held": "AllusersHeld", "transferring": "Running"}
    return {"counts": {name: int(ad.get(attribute, 0)) for name, attribute in names.items()}}


def _jobs(question: dict[str, Any]) -> dict[str, Any]:
    """Return the job with this id, if it is in the queue."""
    import htcondor2

    wanted = f"ClusterId == {int(question['cluster'])} && ProcId == {int(question['proc'])}"
    ads = htcondor2.Schedd().query(wanted, list(JOB_ATTRIBUTES), limit=1)
    plain = (bool, int, float, str)
    read = [decoded(ad, JOB_ATTRIBUTES, lambda ad, attribute: None) for ad in ads]
    return {"jobs": [{name: value for name, value in ad.items() if isinstance(value, plain)} for ad in read]}


if __name__ == "__main__":
    sys.exit(answer_lines(_answer))
