"""The process that queries the schedd for the page: a question per line on stdin, an answer per line on stdout.

It queries, and writes the requests of readers. HTCondor's bindings hold the interpreter while they wait, so the page
itself does not load them.
"""

from __future__ import annotations

import sys
from typing import Any

from stageout.condor.ads import decoded
from stageout.condor.bindings import CondorError
from stageout.condor.schedd import Schedd
from stageout.core.children import answer_lines
from stageout.core.classads import quote

#: Attributes of a job that the page shows.
JOB_ATTRIBUTES = (
    "ClusterId", "ProcId", "GlobalJobId", "Owner", "User", "JobStatus", "QDate", "JobCurrentStartExecutingDate",
    "CompletionDate", "EnteredCurrentStatus", "NumShadowStarts", "HoldReason", "HoldReasonCode", "HoldReasonSubCode",
    "StageOutState", "StageOutReason", "StageOutBytesLeft", "StageOutFilesLeft", "StageOutNextAttempt", "StageOutGuard",
    "StageOutRequest", "StageOutRequestBy", "StageOutRefused",
)  # fmt: skip


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    answers = {"job": _jobs, "counts": lambda _: _counts(), "request": _request}
    return answers[question["op"]](question)


def _counts() -> dict[str, Any]:
    """Return the number of jobs in each status. All come with the query for those that transfer output."""
    ad = Schedd().summary("JobStatus == 6")
    names = {"running": "AllusersRunning", "idle": "AllusersIdle", "held": "AllusersHeld", "transferring": "Running"}
    return {"counts": {name: int(ad.get(attribute, 0)) for name, attribute in names.items()}}


def _jobs(question: dict[str, Any]) -> dict[str, Any]:
    """Return the job with this id, if it is in the queue."""
    wanted = f"ClusterId == {int(question['cluster'])} && ProcId == {int(question['proc'])}"
    ads = Schedd().query(wanted, list(JOB_ATTRIBUTES), limit=1)
    plain = (bool, int, float, str)
    read = [decoded(ad, JOB_ATTRIBUTES, lambda ad, attribute: None) for ad in ads]
    return {"jobs": [{name: value for name, value in ad.items() if isinstance(value, plain)} for ad in read]}


def _request(question: dict[str, Any]) -> dict[str, Any]:
    """Write a request into a job that has none, and first who asks for it."""
    job = f"ClusterId == {int(question['cluster'])} && ProcId == {int(question['proc'])}"
    run, user = f"NumShadowStarts == {int(question['run'])}", f"User =?= {quote(question['user'])}"
    free = f"{job} && {run} && {user} && StageOutRequest is undefined"
    schedd = Schedd()
    if not schedd.query(free, ["ClusterId"], limit=1):
        return {"refused": "the job has left the queue, runs again, or has another request that waits for its answer"}
    try:
        schedd.edit(free, "StageOutRequestBy", quote(question["by"]), is_logged=True)
        schedd.edit(free, "StageOutRequest", quote(question["request"]))
    except CondorError as problem:
        return {"refused": f"the schedd refuses it: {problem}. Is the user of stageout-web in QUEUE_SUPER_USERS?"}
    found = schedd.query(job, ["StageOutRequest"], limit=1)
    is_written = bool(found) and found[0].get("StageOutRequest") in (question["request"], None)
    return {"refused": "" if is_written else "another request was written meanwhile"}


if __name__ == "__main__":
    sys.exit(answer_lines(_answer))
