"""Checks that every installation passes, from any kind of package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stageout import __version__

PROGRAMS = (
    "stageout", "stageout-sandbox-manager", "stageout-startd-cron", "stageout-schedd-agent", "stageout-policy-service",
    "stageout-router", "stageout_curl_plugin", "curl_plugin", "gsiftp_plugin", "globusonline_plugin",
    "overlay_router_plugin",
)  # fmt: skip
FRAGMENTS = {path.name for path in (Path(__file__).resolve().parents[2] / "condor_config.d").iterdir()}

#: Imports every module; those of HTCondor's bindings and matplotlib are asked for only when they are needed.
IMPORT_ALL = """
import importlib, pkgutil
names = [name for top in ("stageout", "sandbox_manager", "schedd_agent", "policy_service", "overlay_router")
         for _, name, _ in pkgutil.walk_packages(importlib.import_module(top).__path__, top + ".")
         if not name.endswith("__main__") and not name.startswith("stageout.testing")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
"""


def version_lines(programs: Iterable[str] = PROGRAMS) -> list[str]:
    """Return what ``--version`` of the programs prints, one line each."""
    return [f"{name} {__version__}" for name in programs]
