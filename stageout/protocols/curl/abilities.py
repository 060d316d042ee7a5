"""The abilities of the plugin. Each ``-classad`` query imports this module, so it imports nothing slow."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stageout import __version__
from stageout.plugin.abilities import Abilities

METHODS = ("http", "https", "ftp", "file", "dav", "davs")


def proxies(environment: Mapping[str, str]) -> dict[str, object]:
    """Make the ``<method>_proxy`` attributes for the slot ads. Leave out a proxy that needs a password."""
    found = {f"{method}_proxy": environment.get(f"{method}_proxy", "") for method in METHODS}
    return {name: value for name, value in found.items() if value and "@" not in value}


ABILITIES = Abilities(
    methods=METHODS,
    version=__version__,
    verifies=True,
    parallel=4,
    startd_attributes=proxies(os.environ),
    proxy_methods=("https", "davs"),
    multi_stream_downloads=("http", "https", "dav", "davs"),
    deletes=METHODS,
    one_status=True,
)
