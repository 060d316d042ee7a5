"""One record for each file whose delivery has ended, in the history of files, before its manager may forget it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schedd_agent.model import GOOD_ENDS, ReportedSandbox, SendOrder
from schedd_agent.receipts import Receipts, ids_of
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.errors import ErrorClass
from stageout.core.history import HistoryFile
from stageout.core.states import State
from stageout.model.run import manager_identity
from stageout.wire.custody import FILES_SHOWN, FileReport, JobKey, SandboxReport

RECORD_TYPE = "StageOutFile"
#: Records that one pass appends at most, because orders wait for them.
_MOST_AT_ONCE = 5000
#: Most characters of a text in a record, because a report may hold anything and the history has a limited size.
_TEXT_CHARS = 400
_URL_CHARS = 4096
#: Output of these was never to arrive.
_NOT_RECORDED = frozenset({State.SUPERSEDED})


def key_of(ad: Mapping[str, Any]) -> Hashable:
    """Return the identity of a record: its sandbox, and its place in the sandbox's report."""
    place = ad.get("StageOutFileNumber", ad.get("StageOutState"))
    manager = manager_identity(str(ad.get("StageOutManager")), str(ad.get("StageOutManagerKey", "")))
    return ad.get("GlobalJobId"), ad.get("Owner"), ad.get("NumShadowStarts"), manager, place


@dataclass
class FileRecorder:
    """Writer of the records.

    :param receipts: names the managers that took a run's output over. Only their reports are recorded.
    :param has_receipts: False on an access point without records of hand-offs: all managers are believed.
    :param problem: reason why the last append failed, "" when it did not.
    """

    history: HistoryFile
    receipts: Receipts
    clock: Clock
    has_receipts: bool = True
    problem: str = field(init=False, default="")

    def record(
        self, forgets: Sequence[tuple[JobKey, SendOrder]], reported: Mapping[JobKey, Sequence[ReportedSandbox]]
    ) -> set[tuple[JobKey, SendOrder]]:
        """Record the files of sandboxes that managers are about to forget. On return the records are on the disk.

        :param forgets: job and FORGET order. :returns: those that must wait, because their records are not stored.
        """
        found: list[tuple[tuple[JobKey, SendOrder], list[dict[str, Any]]]] = []
        late: set[tuple[JobKey, SendOrder]] = set()
        count = 0
        for job, send in forgets:
            items = [
                item for item in reported.get(job, ())
                if (item.manager, item.sandbox.number) == (send.manager, send.run)
            ]  # fmt: skip
            if count >= _MOST_AT_ONCE and items:
                late.add((job, send))
                continue
            ads = self._ads(items)
            count += len(ads)
            found.append(((job, send), ads))
        if self._append([ad for _, ads in found for ad in ads]):
            return late
        return late | {order for order, ads in found if ads}

    def record_failed(self, items: Iterable[ReportedSandbox]) -> bool:
        """Record the files of sandboxes that failed after their jobs had left the queue. Return False on an error."""
        return self._append(self._ads(items))

    def _ads(self, items: Iterable[ReportedSandbox]) -> list[dict[str, Any]]:
        now = int(self.clock.wall_s())
        found: list[dict[str, Any]] = []
        for item in items:
            owner = self._owner(item)
            if owner is not None and item.sandbox.state not in _NOT_RECORDED:
                found += records_of(item, owner, now)
        return found

    def _owner(self, item: ReportedSandbox) -> str | None:
        """Return the owner of output; None when no record of the access point names its manager."""
        sandbox = item.sandbox
        if not self.has_receipts:
            return sandbox.owner
        record = self.receipts.record_with(sandbox.run.key, item.manager_name, item.key, sandbox.tickets)
        return None if record is None else record.owner

    def _append(self, ads: Sequence[Mapping[str, Any]]) -> bool:
        problem = ""
        try:
            if ads:
                self.history.append(ads)
        except OSError as error:
            problem = str(error)
        if problem and problem != self.problem:
            log.error("history-append-failed", problem=problem, advice="make room in SPOOL; managers keep the records")
        elif self.problem and ads and not problem:
            log.event("history-append-recovered")
        self.problem = problem if ads else self.problem
        return not problem


def records_of(item: ReportedSandbox, owner: str, now: int) -> list[dict[str, Any]]:
    """Return a record for each file in the report, then those for all files that it does not list.

    :param now: wall clock, seconds.
    """
    sandbox = replace(item.sandbox, files=item.sandbox.files[:FILES_SHOWN])
    item = replace(item, sandbox=sandbox)
    common = _known(_sandbox_attributes(item, owner))
    files = [
        {**common, "StageOutFileNumber": number, **_file_attributes(file, sandbox), "RecordWriteDate": now}
        for number, file in enumerate(sandbox.files)
    ]
    return [*files, *({**common, **rest, "RecordWriteDate": now} for rest in _rest(sandbox))]


def _sandbox_attributes(item: ReportedSandbox, owner: str) -> dict[str, Any]:
    sandbox = item.sandbox
    cluster, proc = ids_of(sandbox.job)
    return {
        "MyType": RECORD_TYPE,
        "GlobalJobId": sandbox.job,
        "ClusterId": cluster,
        "ProcId": proc,
        "NumShadowStarts": sandbox.number,
        "Owner": owner,
        "AcctGroup": sandbox.group,
        "StageOutManager": item.manager_name,
        "StageOutManagerKey": item.key,
        "StageOutTickets": ",".join(sandbox.tickets),
        "StageOutAcceptedAt": sandbox.accepted_at,
        "StageOutConfirmedAt": sandbox.confirmed_at,
        "StageOutEndedAt": sandbox.ended_at,
    }


def _file_attributes(file: FileReport, sandbox: SandboxReport) -> dict[str, Any]:
    state = _end_of(file, sandbox)
    scheme, _, place = file.url.partition("://")
    rate = file.size_bytes * 1000 // file.transfer_ms if file.transfer_ms > 0 else 0
    return {
        "StageOutFiles": 1,
        "StageOutState": state,
        "TransferFileBytes": file.size_bytes,
        "TransferSuccess": state == State.DELIVERED,
        **_known({
            "TransferFileName": file.name,
            "TransferUrl": file.url,
            "TransferProtocol": scheme if place else "",
            "TransferHostName": place.partition("/")[0],
            "TransferStartTime": file.began_at,
            "TransferEndTime": file.ended_at,
            "TransferError": file.error,
            "StageOutErrorCode": file.error_code,
            "StageOutErrorClass": ErrorClass.from_code(file.error_code).name if file.error_code else "",
            "StageOutReason": sandbox.reason if state != State.DELIVERED or _is_elsewhere(file, sandbox) else "",
            "StageOutAttempts": file.attempts,
            "StageOutPlugin": file.plugin,
            "StageOutVerified": file.verified,
            "StageOutDigests": file.digest,
            "StageOutStreams": file.streams,
            "StageOutRoute": file.route,
            "StageOutBytesPerSecond": rate,
        }),
    }  # fmt: skip


def _is_elsewhere(file: FileReport, sandbox: SandboxReport) -> bool:
    """Tell whether the reason of a delivered run is about this file: it is at the fallback, or on the node."""
    if file.url.partition("://")[0].rpartition("+")[2].lower() == "file":
        return True
    return bool(sandbox.fallback and sandbox.fallback_note) and file.url.startswith(f"{sandbox.fallback.rstrip('/')}/")


def _end_of(file: FileReport, sandbox: SandboxReport) -> str:
    """Return the state in which a file ended. A file keeps its failure, whatever became of its sandbox afterwards."""
    if sandbox.state in GOOD_ENDS or file.state == State.DELIVERED:
        return State.DELIVERED.value
    return file.state if file.state == State.FAILED else sandbox.state


def _rest(sandbox: SandboxReport) -> Iterator[dict[str, Any]]:
    """Yield the sums of the files that the report does not list: those delivered, and those not."""
    listed = [(file.size_bytes, _end_of(file, sandbox) == State.DELIVERED) for file in sandbox.files]
    files = sandbox.files_total + sandbox.files_dropped - len(listed)
    size = sandbox.bytes_total + sandbox.bytes_dropped - sum(size for size, _ in listed)
    left = left_bytes = 0
    if sandbox.state not in GOOD_ENDS:
        listed_left = [size for size, delivered in listed if not delivered]
        left = min(files, sandbox.files_left + sandbox.files_dropped - len(listed_left))
        left_bytes = min(size, sandbox.bytes_left + sandbox.bytes_dropped - sum(listed_left))
    delivered = State.DELIVERED.value
    for state, count, count_bytes in (
        (delivered, files - left, size - left_bytes), (sandbox.state, left, left_bytes)
    ):  # fmt: skip
        if count > 0:
            yield {
                "StageOutFiles": count, "StageOutState": state, "TransferFileBytes": max(0, count_bytes),
                "TransferSuccess": state == delivered,
                **_known({"StageOutReason": "" if state == delivered else sandbox.reason}),
            }  # fmt: skip


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes without those that are unknown. Long texts are cut."""
    kept = ("ProcId", "NumShadowStarts")
    return {name: _cut(name, value) for name, value in attributes.items() if value or name in kept}


def _cut(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    return value[: _URL_CHARS if name == "TransferUrl" else _TEXT_CHARS]
