"""What the curl plugin says of itself; imports nothing heavy, for the ``-classad`` query."""

from __future__ import annotations

from stageout import __version__
from stageout.plugin import Abilities

ABILITIES = Abilities(
    methods=("http", "https", "ftp", "file", "dav", "davs"), version=__version__, verifies=True, parallel=4
)
