"""The answer to ``-classad``: in every job's way, so it loads nothing but the ClassAd writer."""

from __future__ import annotations

import os

from stageout.core.classads import unparse_old
from stageout.plugin.abilities import Abilities

_STDOUT = 1


def query_ad(abilities: Abilities) -> dict[str, object]:
    """The attributes that HTCondor reads, and those of ``StartdAttrs``, which it copies into the slot ads.

    ``StartdAttrs`` is left out when there are none: anything but a list of names there makes the slot advertise no
    file transfer at all.
    """
    ad: dict[str, object] = {
        "MultipleFileSupport": True,
        "ProtocolVersion": 4,
        "PluginType": "FileTransfer",
        "PluginVersion": abilities.version,
        "SupportedMethods": "" if abilities.missing_requirement else ",".join(abilities.methods),
    }
    if abilities.verifies:
        ad["StageOutVerifies"] = True  # read by the sandbox manager (STAGEOUT_REQUIRE_VERIFIED); others ignore it
    if abilities.batch_files:
        ad["StageOutBatchFiles"] = abilities.batch_files  # likewise
    ad["StageOutConcurrency"] = True  # likewise: STAGEOUT_CONCURRENCY is heeded
    if abilities.multi_stream_methods:
        ad["StageOutInParts"] = ",".join(abilities.multi_stream_methods)  # likewise: uploads heed STAGEOUT_PARALLELISM
    if abilities.multi_stream_downloads:
        ad["StageOutSplitsDownloads"] = ",".join(abilities.multi_stream_downloads)  # read by estimator and profiler
    if abilities.deletes:
        ad["StageOutDeletes"] = ",".join(abilities.deletes)  # read by 'stageout check'
    if abilities.startd_attributes:
        ad["StartdAttrs"] = ",".join(abilities.startd_attributes)
        ad.update(abilities.startd_attributes)
    return ad


def answer(abilities: Abilities) -> int:
    """Print the ad and return the exit status."""
    os.write(_STDOUT, unparse_old(query_ad(abilities)).encode())
    return 0
