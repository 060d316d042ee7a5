"""The abilities of the plugin. Imported for every ``-classad``: nothing heavy here."""

from __future__ import annotations

from stageout import __version__
from stageout.plugin.abilities import Abilities

METHODS = ("globusonline", "globus")
_BATCH_FILES = 10000  # a task costs seconds however few files it has, and a user has three at a time

ABILITIES = Abilities(
    methods=METHODS,
    version=__version__,
    verifies=True,
    parallel=4,
    credentials=("globus",),
    batch_files=_BATCH_FILES,
)
