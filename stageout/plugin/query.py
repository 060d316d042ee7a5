"""The answer to ``-classad``. Every job waits for it, so it imports only the ClassAd writer."""

from __future__ import annotations

import os
import sys

from stageout.core.classads import unparse_old
from stageout.plugin.abilities import Abilities

_STDOUT = 1


def query_ad(abilities: Abilities) -> dict[str, object]:
    """Make the attributes that HTCondor reads, and those of ``StartdAttrs``, which it copies into the slot ads.

    ``StartdAttrs`` is absent when it would be empty: any value but a list of names makes the slot advertise no file
    transfer at all.
    """
    ad: dict[str, object] = {
        "MultipleFileSupport": True,
        "ProtocolVersion": 4,
        "PluginType": "FileTransfer",
        "PluginVersion": abilities.version,
        "SupportedMethods": "" if abilities.missing_requirement else ",".join(abilities.methods),
    }
    if abilities.verifies:
        ad["StageOutVerifies"] = True  # the sandbox manager reads it (STAGEOUT_REQUIRE_VERIFIED); others ignore it
    if abilities.batch_files:
        ad["StageOutBatchFiles"] = abilities.batch_files  # the sandbox manager reads it
    ad["StageOutConcurrency"] = True  # the sandbox manager reads it: the plugin supports STAGEOUT_CONCURRENCY
    if abilities.multi_stream_methods:
        # the sandbox manager reads it: uploads support STAGEOUT_PARALLELISM
        ad["StageOutInParts"] = ",".join(abilities.multi_stream_methods)
    if abilities.multi_stream_downloads:
        ad["StageOutSplitsDownloads"] = ",".join(abilities.multi_stream_downloads)  # estimator and profiler read it
    if abilities.deletes:
        ad["StageOutDeletes"] = ",".join(abilities.deletes)  # 'stageout check' reads it
    if abilities.startd_attributes:
        ad["StartdAttrs"] = ",".join(abilities.startd_attributes)
        ad.update(abilities.startd_attributes)
    return ad


def answer(abilities: Abilities, sources: bool = False) -> int:
    """Print the ad and return the exit status.

    :param sources: add the files on which the ad depends (:mod:`stageout.core.stored_answer`).
    """
    ad = query_ad(abilities)
    if sources:
        ad["StageOutSources"] = " ".join(_sources(abilities))
    os.write(_STDOUT, unparse_old(ad).encode("utf-8", "surrogateescape"))
    return 0


def _sources(abilities: Abilities) -> list[str]:
    """List the interpreter, the files that select it, all modules outside its library, and the files in the
    abilities.
    """
    own = os.path.dirname(os.__file__) + "/"
    files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name != "__main__"}
    modules = {path for path in files if path and ("-packages/" in path or not path.startswith(own))}
    command = os.path.join(os.path.dirname(sys.argv[0]), "stageout")
    chosen = [command] if os.path.exists(command) else []
    return sorted({sys.executable, *chosen, *modules, *abilities.reads})
