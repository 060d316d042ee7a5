"""Checks that every installation passes, from any kind of package."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path

from stageout import __version__

PROGRAMS = (
    "stageout", "stageout-sandbox-manager", "stageout-startd-cron", "stageout-schedd-agent", "stageout-policy-service",
    "stageout-router", "stageout-web", "stageout_curl_plugin", "gsiftp_plugin", "globusonline_plugin",
    "overlay_router_plugin", "stageout_dag_post",
)  # fmt: skip
FRAGMENTS = {path.name for path in (Path(__file__).resolve().parents[2] / "condor_config.d").iterdir()}

#: Imports every module; those of HTCondor's bindings and matplotlib are asked for only when they are needed.
IMPORT_ALL = """
import importlib, pkgutil
tops = ("stageout", "sandbox_manager", "schedd_agent", "policy_service", "overlay_router", "stageout_web")
names = [name for top in tops
         for _, name, _ in pkgutil.walk_packages(importlib.import_module(top).__path__, top + ".")
         if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
"""

#: Prints the directories that the demonstration's modules come from: the harness first, then the product.
ORIGINS = """
import importlib, pathlib
from tests.harness.demo import driver, embedded_run
from tests.harness.pool import install
print(pathlib.Path(driver.__file__).parents[3])
for name in ("stageout", "sandbox_manager", "schedd_agent", "policy_service", "overlay_router", "stageout_web"):
    print(pathlib.Path(importlib.import_module(name).__file__).parents[1])
assert install.find_checkout() is None
print(embedded_run.find_plugin(pathlib.Path("/nonexistent")).parents[1])
"""


def unpack_harness(sdist: Path, place: Path) -> None:
    """Unpack the tests' harness below a directory, and nothing else of the sdist."""
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            name = member.name.partition("/")[2]
            if name == "tests/__init__.py" or name.startswith("tests/harness/"):
                member.name = name
                archive.extract(member, place)


def version_lines(programs: Iterable[str] = PROGRAMS) -> list[str]:
    """Return what ``--version`` of the programs prints, one line each."""
    return [f"{name} {__version__}" for name in programs]
