"""One task of the Transfer service from submission to end: recorded, watched, its lease renewed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from stageout.core.errors import Advice, ErrorClass, TransferFailure
from stageout.protocols.globusonline import failures, plan
from stageout.protocols.globusonline.journal import Entry, Journal
from stageout.protocols.globusonline.plan import Pair
from stageout.protocols.globusonline.service import Service, Stopped
from stageout.protocols.globusonline.settings import GlobusSettings
from stageout.protocols.globusonline.trouble import GiveUp, Look, Trouble

_FIRST_POLL_S = 1.0
_QUEUED_POLLS = 2  # factor by which a queued task is queried less often
_EVENTS = 20
_RENEWALS = 3  # per lease
_PATH = "https://app.globus.org/activity/"
_RATE_FROM_BYTES = 10e6
#: The rate that a task is expected to reach before one was measured: a slow collection's, so that it gets the time.
_USUAL_BYTES_S = 20e6

Log = Callable[..., None]


@dataclass
class Ended:
    """The end of a task.

    :param cause: why it did not transfer all files; None when the service reports success.
    :param lasting: the cause is permanent and may affect some of the files only.
    :param arrived: rows of ``task_successful_transfers``. :param skipped: error code of each skipped source.
    """

    task: str
    cause: TransferFailure | None = None
    lasting: bool = False
    arrived: dict[Pair, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[Pair, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class TaskRun:
    """Executor of tasks, one after the other.

    :param log: writes a line into the plugin's log.
    """

    def __init__(self, service: Service, journal: Journal, settings: GlobusSettings, log: Log) -> None:
        self._service = service
        self._journal = journal
        self._settings = settings
        self._log = log

    # ---- 1. submitted ------------------------------------------------------------------------------------------------

    def submit(self, document: dict[str, Any]) -> Entry:
        """Record and submit a task. Lost answers do not create a second task.

        :raises TransferFailure: the service refuses it. :raises Stopped: the plugin has to end.
        """
        submission = self._service.ask("asking for a submission id", lambda client: client.get_submission_id())
        entry = self._journal.begin(str(submission["value"]), document)
        return self.submit_again(entry)

    def submit_again(self, entry: Entry) -> Entry:
        """Submit a recorded document again. The service recognizes the submission id and returns the same task."""
        body = {**entry.document, "submission_id": entry.submission, "deadline": _iso(self._settings.lease_s)}
        try:
            reply = self._service.ask("submitting the task", lambda client: client.submit_transfer(body))
        except TransferFailure as failure:
            twin = self._twin(entry) if failure.developer.get("GlobusCode") == "Conflict" else ""
            if not twin:
                if failure.kind.advice is Advice.NEEDS_PERSON:
                    self._journal.close(entry)
                raise
            reply = {"task_id": twin, "code": "adopted"}
        self._journal.submitted(entry, str(reply["task_id"]))
        self._log("submitted", task=entry.task, submission=entry.submission, answer=reply["code"],
                  files=len(entry.document["DATA"]))  # fmt: skip
        return entry

    def _twin(self, entry: Entry) -> str:
        """Find a running task of this user that moves the same files, if there is one, after the record was lost."""
        wanted: dict[str, str | list[str]] = {"status": "ACTIVE", "label": f"={entry.document['label']}"}
        tasks = self._service.ask("looking for the same task", lambda client: client.task_list(filter=wanted, limit=20))
        for task in tasks["DATA"]:
            between = (task["source_endpoint_id"], task["destination_endpoint_id"])
            if task["label"] == entry.document["label"] and between == entry.between:
                return str(task["task_id"])
        return ""

    # ---- 2. watched --------------------------------------------------------------------------------------------------

    def finish(self, entry: Entry, size_bytes: int) -> Ended:
        """Watch a task to its end. Its record stays until the caller has settled its files.

        :param size_bytes: total size, 0 if unknown.
        :raises TransferFailure: the service does not know the task, or does not answer for as long as a lease.
        :raises Stopped: the plugin has to end. The task is cancelled, or left to the next call.
        """
        try:
            shown, reason = self._watch(entry, size_bytes)
            return self._result(entry, shown, reason)
        except Stopped:
            self._leave(entry)
            raise
        except TransferFailure as failure:
            if failure.kind is ErrorClass.NOT_FOUND:
                self._journal.close(entry)
            raise

    def _leave(self, entry: Entry) -> None:
        """Cancel the task. If only this call's time is over and the next call has the record, let the task continue."""
        if self._journal.is_lasting and self._service.time_limit.has_run_out:
            body = {"DATA_TYPE": "task", "deadline": _iso(self._settings.lease_s)}
            done = self._service.last_word(lambda client: client.update_task(entry.task, body))
            self._log("left to the next call", task=entry.task, renewed=done)
            return
        self._journal.close(entry)
        done = self._service.last_word(lambda client: client.cancel_task(entry.task))
        self._log("cancelled", task=entry.task, done=done)

    def _watch(self, entry: Entry, size_bytes: int) -> tuple[Any, GiveUp | None]:
        trouble, lease = Trouble(self._settings), _Lease(self._settings, self._rate(entry), size_bytes, entry)
        poll_s, faults = min(_FIRST_POLL_S, self._settings.poll_s), 0
        reason: GiveUp | None = None
        while True:
            shown = self._ask(entry)
            if shown["status"] not in ("ACTIVE", "INACTIVE"):
                return shown, reason
            if reason is None:
                is_queued = shown["nice_status"] == "Queued"
                codes = self._codes(entry, shown["faults"] - faults)
                faults = shown["faults"]
                reason = trouble.see(_look(shown, is_queued, codes))
                if reason is not None:
                    self._log("hopeless", task=entry.task, code=reason.code, waited_s=round(reason.waited_s))
                    self._service.ask("cancelling the task", lambda client: client.cancel_task(entry.task))
                    continue
            self._renew(entry, lease, shown)
            self._service.time_limit.sleep(poll_s * (_QUEUED_POLLS if shown["nice_status"] == "Queued" else 1))
            poll_s = min(2 * poll_s, self._settings.poll_s)

    def _ask(self, entry: Entry) -> Any:
        return self._service.ask(
            "asking about the task", lambda client: client.get_task(entry.task), self._settings.lease_s
        )

    def _codes(self, entry: Entry, new: int) -> tuple[str, ...]:
        if new <= 0:
            return ()
        query = {"filter": "is_error:1"}
        events = self._service.ask(
            "reading the task's errors",
            lambda client: client.task_event_list(entry.task, limit=min(new, _EVENTS), query_params=query),
        )
        return tuple(event["code"] for event in events["DATA"])

    def _renew(self, entry: Entry, lease: _Lease, shown: Any) -> None:
        deadline = lease.due(time.monotonic(), shown)
        if deadline is None:
            return
        body = {"DATA_TYPE": "task", "deadline": deadline}
        try:
            self._service.ask("renewing the lease", lambda client: client.update_task(entry.task, body), 10.0)
        except TransferFailure as failure:  # the next query shows whether the task is over
            self._log("lease not renewed", task=entry.task, problem=failure)

    def _rate(self, entry: Entry) -> float:
        return self._journal.rate_bytes_s(entry.between) or _USUAL_BYTES_S

    # ---- 3. over -----------------------------------------------------------------------------------------------------

    def _result(self, entry: Entry, shown: Any, reason: GiveUp | None) -> Ended:
        ended = Ended(entry.task, facts=_facts(entry, shown))
        doing = "reading the task's result"
        for row in self._service.rows(doing, entry.task, "task_successful_transfers"):
            ended.arrived[row["source_path"], row["destination_path"]] = row
        for row in self._service.rows(doing, entry.task, "task_skipped_errors"):
            ended.skipped[row["source_path"], row["destination_path"]] = row["error_code"]
        if shown["status"] != "SUCCEEDED":
            ended.cause, ended.lasting = self._cause(entry, shown, reason)
        else:
            self._learn(entry, shown)
        self._log("over", task=entry.task, status=shown["status"], arrived=len(ended.arrived),
                  skipped=len(ended.skipped), faults=shown["faults"])  # fmt: skip
        for (source, _), code in list(ended.skipped.items())[:_EVENTS]:
            self._log("skipped", task=entry.task, source=source, code=code)
        return ended

    def _cause(self, entry: Entry, shown: Any, reason: GiveUp | None) -> tuple[TransferFailure, bool]:
        fatal = shown.get("fatal_error") or {}
        code = reason.code if reason else str(fatal.get("code", ""))
        fault = reason.fault if reason else failures.fault_of(code)
        kind, words = fault.kind, failures.words_of(fault.kind)
        if reason is None and code == failures.CANCELED:
            ours = not self._journal.is_open(entry)
            kind = ErrorClass.NOT_ATTEMPTED if ours else ErrorClass.PERMISSION_DENIED
            words = "another transfer of this job's owner ended it" if ours else "a person has cancelled it at Globus"
        elif not words:
            words = f"nothing has moved for {reason.waited_s:.0f} s" if reason else str(fatal.get("description", ""))
        text = f"{code or 'the task stands still'}: {words} [task {entry.task}, {_PATH}{entry.task}]"
        return TransferFailure(kind, text, failures.SERVER, developer=_facts(entry, shown)), fault.lasts

    def _learn(self, entry: Entry, shown: Any) -> None:
        moved, rate = shown["bytes_transferred"], shown.get("effective_bytes_per_second")
        if moved >= _RATE_FROM_BYTES and rate:
            self._journal.learn_rate(entry.between, float(rate))


class _Lease:
    """The task's deadline: soon, and extended while the plugin watches the task, within limits by its size."""

    def __init__(self, settings: GlobusSettings, rate_bytes_s: float, size_bytes: int, entry: Entry) -> None:
        self._lease_s = settings.lease_s
        self._size_bytes = size_bytes
        self._files = len(entry.document["DATA"])
        self._allowed_s = plan.allowed_s(size_bytes, self._files, rate_bytes_s)
        self._start_s: float | None = None
        self._renew_s = 0.0

    def due(self, now_s: float, shown: Any) -> str | None:
        """Return the new deadline when it is time to renew, else None."""
        if self._start_s is None or shown["nice_status"] == "Queued":
            self._start_s = now_s
        if now_s < self._renew_s:
            return None
        self._renew_s = now_s + self._lease_s / _RENEWALS
        elapsed_s = now_s - self._start_s
        moved = shown["bytes_transferred"]
        if moved and elapsed_s:
            left = max(0, self._size_bytes - moved)
            self._allowed_s = max(self._allowed_s, elapsed_s + plan.allowed_s(left, self._files, moved / elapsed_s))
        return _iso(min(self._lease_s, max(1.0, self._allowed_s - elapsed_s)))


def _look(shown: Any, is_queued: bool, codes: tuple[str, ...]) -> Look:
    moved = (shown["files_transferred"], shown["files_skipped"], shown["bytes_transferred"])
    return Look(time.monotonic(), moved, is_queued, bool(shown["is_paused"]), shown["status"] == "INACTIVE", codes)


def _facts(entry: Entry, shown: Any) -> dict[str, Any]:
    return {
        "GlobusTask": entry.task,
        "GlobusSubmission": entry.submission,
        "GlobusFaults": int(shown["faults"]),
        "GlobusStatus": str(shown["nice_status"] or shown["status"]),
    }


def _iso(seconds: float) -> str:
    """Write a future time as the service expects it, always with a time zone."""
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
