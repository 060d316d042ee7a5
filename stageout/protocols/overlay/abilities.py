"""The abilities of the plugin. Imported for every ``-classad``."""

from __future__ import annotations

from stageout import __version__
from stageout.plugin.abilities import Abilities

METHODS = ("overlay",)
ABILITIES = Abilities(
    methods=METHODS,
    version=__version__,
    verifies=True,
    parallel=4,
    multi_stream_methods=METHODS,
    deletes=METHODS,
    job_attributes=("StageOutPriority", "StageOutDeadline", "JobPrio"),
)
