"""Result ads: convert the result of a file to the attributes that HTCondor keeps, with exactly the right literal
types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stageout import __version__
from stageout.core.classads import unparse_ad
from stageout.core.errors import Advice, ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.plugin.pace import Pace
from stageout.plugin.requests import Item
from stageout.plugin.text import Scrubber, recorded
from stageout.plugin.urls import host_of

Ad = dict[str, Any]
RETRYABLE_STATUS = 11
FAILED_STATUS = 1
PROVISIONAL = TransferFailure(ErrorClass.NOT_ATTEMPTED, "the plugin was stopped before this file was finished")
_ELEMENTS_KEPT = 5
_ELEMENT_CHARS, _FEW_ELEMENTS = 100, 3
_CUSTODY = "StageOutCustody"
_SHORT_CHARS = 120


class Record:
    """The result of one file.

    :param failed_attempts: before the last one. :param result: None without a result.
    :param moved_bytes: over the network, all attempts together.
    :param start_s: wall clock; 0 if the transfer did not begin. :param end_s: wall clock; 0 likewise.
    :ivar pace: measures the transfer rate.
    """

    __slots__ = ("end_s", "failed_attempts", "item", "moved_bytes", "pace", "result", "start_s")

    def __init__(
        self,
        item: Item,
        result: Outcome | TransferFailure | None = None,
        failed_attempts: Sequence[TransferFailure] = (),
        moved_bytes: int = 0,
        start_s: float = 0.0,
        end_s: float = 0.0,
    ) -> None:
        self.item = item
        self.result = result
        self.failed_attempts = list(failed_attempts)
        self.moved_bytes = moved_bytes
        self.start_s = start_s
        self.end_s = end_s
        self.pace = Pace()

    @property
    def failure(self) -> TransferFailure | None:
        """Return the failure of the file; None when it arrived."""
        if self.result is None:
            return PROVISIONAL
        return self.result if isinstance(self.result, TransferFailure) else None


class AdWriter:
    """Writer of the result ads of one call.

    :param upload: direction. :param plugin_version: for ads about failures of the plugin itself.
    :param facts: scalars for every DeveloperData.
    """

    def __init__(self, upload: bool, plugin_version: str, scrubber: Scrubber) -> None:
        self._type = "upload" if upload else "download"
        self._version = plugin_version
        self._scrubber = scrubber
        self.facts: dict[str, Any] = {}

    def ad(self, record: Record) -> Ad:
        """Make the complete result ad of one file."""
        ad = self._head(record.item, record.failure is None, record.item.method)
        ad["TransferStartTime"] = int(record.start_s)
        ad["TransferEndTime"] = int(record.end_s)
        result = record.result
        if isinstance(result, Outcome):
            ad["TransferFileBytes"] = int(result.size_bytes)
            ad["TransferTotalBytes"] = int(max(result.size_bytes, result.transferred_bytes))
        else:
            failure = record.failure or PROVISIONAL
            ad["TransferFileBytes"], ad["TransferTotalBytes"] = 0, int(record.moved_bytes)
            ad["TransferError"] = self._scrubber.message(str(failure))
        connection_s = record.result.connection_s if record.result else 0.0
        ad["ConnectionTimeSeconds"] = float(connection_s or max(0.0, record.end_s - record.start_s))
        errors = [*record.failed_attempts[-_ELEMENTS_KEPT:], *([record.failure] if record.failure else [])]
        if errors:
            ad["TransferErrorData"] = [self._error_ad(failure, record.item) for failure in errors]
        ad["DeveloperData"] = self._developer(record)
        return ad

    def taken_over(self, item: Item, size_bytes: int, receipt: Mapping[str, Any], when_s: float) -> Ad:
        """Make the result ad of a file that the node's sandbox manager has accepted."""
        ad = self._head(item, True, "stageout")
        ad.update(TransferStartTime=int(when_s), TransferEndTime=int(when_s), ConnectionTimeSeconds=0.0)
        ad.update(TransferFileBytes=size_bytes, TransferTotalBytes=size_bytes)
        ad["DeveloperData"] = {"StageOutReceipt": dict(receipt)}
        return ad

    def _head(self, item: Item, success: bool, protocol: str) -> Ad:
        return {
            "TransferSuccess": success,
            "TransferFileName": item.file_name,
            "TransferUrl": item.shown_url,
            "TransferProtocol": protocol,
            "TransferType": self._type,
        }

    def _error_ad(self, failure: TransferFailure, item: Item) -> Ad:
        row = failure.kind.value
        server = self._scrubber.scrub(failure.server or host_of(item.shown_url))
        ad: Ad = {
            "ErrorType": row.error_type,
            "ErrorCode": row.code,
            "ErrorString": self._scrubber.message(str(failure)),
            "Retryable": math.ceil(failure.retry_after_s or 0) if failure.kind.retryable else -1,
        }
        if row.error_type == "Parameter":
            ad.update(PluginVersion=self._version, PluginLaunched=True)
        elif row.error_type == "Resolution":
            ad["FailedName"] = server
        else:
            ad["FailedServer"] = server
        if failure.intermediate:
            ad.update(IntermediateServer=server, IntermediateServerErrorType=failure.intermediate)
        if row.failure_type:
            ad["FailureType"] = row.failure_type
        if row.error_type == "Authorization":
            ad["ShouldRefresh"] = row.advice is Advice.NEEDS_CREDENTIAL
        return ad

    def _developer(self, record: Record) -> Ad:
        facts: Ad = {"StageOutVersion": __version__, **self.facts}
        host = host_of(record.item.shown_url)
        if host:
            facts["TransferHostName"] = host
        result, own = record.result, {}
        if result is not None:
            own = result.developer
            attempts = len(record.failed_attempts) + (1 if record.start_s else 0)
            facts["StageOutAttempts"] = facts["TransferTries"] = attempts  # the second is HTCondor's own name
            facts["StageOutSeconds"] = round(max(0.0, record.end_s - record.start_s), 3)
            steady = record.pace.bytes_per_s()
            if steady is not None:
                facts["StageOutBytesPerSecond"] = round(steady)
        if isinstance(result, Outcome):
            facts["StageOutVerified"] = result.verified
            facts["StageOutDigests"] = " ".join(f"{name}:{value}" for name, value in sorted(result.digests.items()))
        elif record.failure:
            facts["StageOutErrorCode"] = record.failure.kind.code
        for name, value in own.items():
            if name.isascii() and name.isidentifier() and isinstance(value, (str, int, float)):
                facts.setdefault(name, self._scrubber.message(value) if isinstance(value, str) else value)
        return facts


def exit_status(failures: Sequence[TransferFailure]) -> int:
    """Return 0 when nothing failed, 11 when all failures are retryable, else 1."""
    if not failures:
        return 0
    return RETRYABLE_STATUS if all(failure.kind.retryable for failure in failures) else FAILED_STATUS


def fitted(ad: Ad, limit_bytes: int) -> str:
    """Write the ad in at most ``limit_bytes``. Leave out the least useful attributes first, but never a receipt.

    :raises ValueError: not even the shortest ad fits.
    """
    smaller = dict(ad)
    for step in _STEPS:
        step(smaller)
        text = unparse_ad(smaller, recorded)
        if len(text) <= limit_bytes:
            return text
    raise ValueError(f"no room for a result ad in {limit_bytes} bytes")


def least_bytes(ad: Ad) -> int:
    """Compute the length of the shortest form of an ad that :func:`fitted` makes, with room for numbers that are not
    final.
    """
    smaller = {**ad, "TransferError": "x" * _SHORT_CHARS, "TransferTotalBytes": 10**18}
    for step in _STEPS:
        step(smaller)
    return len(unparse_ad(smaller, recorded))


def _short_errors(ad: Ad) -> None:
    """Keep all attempts, with short texts. TransferError has the whole text of the last one."""
    if "TransferErrorData" in ad:
        errors = ad["TransferErrorData"]
        ad["TransferErrorData"] = [{**error, "ErrorString": error["ErrorString"][:_ELEMENT_CHARS]} for error in errors]


def _few_errors(ad: Ad) -> None:
    if "TransferErrorData" in ad:
        ad["TransferErrorData"] = ad["TransferErrorData"][-_FEW_ELEMENTS:]


def _one_error(ad: Ad) -> None:
    if "TransferErrorData" in ad:
        ad["TransferErrorData"] = ad["TransferErrorData"][-1:]


def _own_facts_only(ad: Ad) -> None:
    if "DeveloperData" in ad:
        kept = {name: value for name, value in ad["DeveloperData"].items() if name.startswith("StageOut")}
        ad["DeveloperData"] = kept


def _short_texts(ad: Ad) -> None:
    if "TransferError" in ad:
        ad["TransferError"] = ad["TransferError"][:_SHORT_CHARS]
    for element in ad.get("TransferErrorData", []):
        element["ErrorString"] = element["ErrorString"][:_SHORT_CHARS]


def _no_developer_data(ad: Ad) -> None:
    receipt = ad.pop("DeveloperData", {}).get(_CUSTODY)
    if receipt:  # without it the file would count as delivered
        ad["DeveloperData"] = {_CUSTODY: receipt}


def _least(ad: Ad) -> None:
    for name in ("TransferErrorData", "TransferStartTime", "TransferEndTime", "TransferFileBytes", "TransferType"):
        ad.pop(name, None)
    ad.pop("ConnectionTimeSeconds", None)
    if "TransferError" in ad:  # escapes make it longer than its characters
        plain = ad["TransferError"].encode("ascii", "replace").decode()
        ad["TransferError"] = plain.replace('"', "'").replace("\\", "/")


def _as_it_is(ad: Ad) -> None:
    del ad


_STEPS = (_as_it_is, _short_errors, _few_errors, _one_error, _own_facts_only, _short_texts, _no_developer_data, _least)
