"""The reason why a job's output was not handed off, from the job's ad and the records of its transfers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stageout.cli.jobs import Job
from stageout.core.classads import ClassAd
from stageout.core.reasons import sentence_of
from stageout.core.synchronous import FAILED, NOT_SAID


class Why(NamedTuple):
    """The code of the reason, and the reason; both empty if unknown, or if all output was handed off."""

    code: str = ""
    reason: str = ""


def why(job: Job, records: Iterable[ClassAd]) -> Why:
    """Return the reason why the job's transfer is, or was, synchronous.

    :param records: OUTPUT records of the job's id. Ids start again when a queue is recreated.
    """
    if job.is_misnamed:
        return Why("Identity", sentence_of("Identity"))
    if job.left_out:
        return Why(job.left_out, sentence_of(job.left_out))
    own = [ad for ad in records if ad.text("GlobalJobId", job.global_id) == job.global_id]
    files = results(max(own, key=lambda ad: ad.integer("NumShadowStarts"), default=ClassAd()))
    if not job.synchronous or not files:
        return Why()
    return next((known for known in map(said, files) if known.code), Why(NOT_SAID, sentence_of(NOT_SAID)))


def results(record: ClassAd) -> Sequence[ClassAd]:
    """Return the result ads of the plugins in an OUTPUT record."""
    found = record.get("OutputPluginResultList")
    return [item for item in found if isinstance(item, ClassAd)] if isinstance(found, list) else []


def said(result: ClassAd) -> Why:
    """Return the reason that a plugin reports for one file; "" without a reason."""
    extra = result.get("DeveloperData")
    if not isinstance(extra, ClassAd) or not extra.text("StageOutSynchronous"):
        return Why()
    return Why(extra.text("StageOutSynchronousCode") or FAILED, extra.text("StageOutSynchronous"))
