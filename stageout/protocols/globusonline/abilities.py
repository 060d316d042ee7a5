"""The abilities of the plugin. Each ``-classad`` query imports this module, so it imports nothing slow."""

from __future__ import annotations

from stageout import __version__
from stageout.plugin.abilities import Abilities

METHODS = ("globusonline", "globus")
_BATCH_FILES = 10000  # a task costs seconds for any number of files, and a user may have three at a time

ABILITIES = Abilities(
    methods=METHODS,
    version=__version__,
    verifies=True,
    parallel=4,
    credentials=("globus",),
    batch_files=_BATCH_FILES,
)
