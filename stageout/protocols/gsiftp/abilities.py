"""The abilities of the plugin: none on a node without globus-url-copy. Each ``-classad`` query imports this module."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stageout import __version__
from stageout.plugin.abilities import Abilities

PROGRAM = "globus-url-copy"
METHODS = ("gsiftp", "ftp")


def program_path(environment: Mapping[str, str]) -> str:
    """Return the path of globus-url-copy; "" when it is not installed."""
    for folder in environment.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, PROGRAM)  # noqa: PTH118 - pathlib is not worth its import time here
        if folder and os.access(path, os.X_OK):
            return path
    return ""


_FOUND = program_path(os.environ)
_MISSING = f"{PROGRAM} is not installed on this node (Debian's package globus-gass-copy-progs has it)"
ABILITIES = Abilities(
    methods=METHODS,
    version=__version__,
    verifies=True,
    parallel=4,
    multi_stream_methods=METHODS,
    proxy_methods=("gsiftp",),
    multi_stream_downloads=METHODS,
    missing_requirement="" if _FOUND else _MISSING,
    reads=(_FOUND,) if _FOUND else (),
)
