"""The fragment's expression knows the jobs of workflow managers, and takes no other job for one.

The ads are those that the managers of ``tests/pool/test_workflow_managers.py`` made, and for the others what their
sources write (docs/user/workflow-managers.md names them).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

classad2 = pytest.importorskip("classad2")

ROOT = Path(__file__).resolve().parents[2]
FRAGMENT = (ROOT / "condor_config.d/20-stageout-ap.conf").read_text()
PAGE = (ROOT / "docs/user/workflow-managers.md").read_text()
(_LINES,) = re.findall(r"^  STAGEOUT_WORKFLOW_JOBS = ((?:.*\\\n)*.*)\n", FRAGMENT, re.M)
EXPRESSION = _LINES.replace("\\\n", " ")

#: Manager -> what its jobs have.
MANAGERS: dict[str, dict[str, Any]] = {
    "Snakemake": {
        "Cmd": "/opt/venv/bin/python",
        "Args": "-m snakemake --snakefile /home/alice/Snakefile --target-jobs make: --mode remote",
    },
    "Snakemake with a wrapper": {
        "Cmd": "/home/alice/wrapper.sh",
        "Args": "--snakefile Snakefile --target-jobs make: --mode remote",
    },
    "law": {
        "Cmd": "/home/alice/jobfiles/tmpl6hkri0g/htcondor_wrapper_ed190f6b98.sh",
        "Args": "_0To1 ''",
        "Environment": "LAW_HTCONDOR_JOB_CLUSTER=5 LAW_HTCONDOR_JOB_PROCESS=0",
    },
    "Parsl": {"Cmd": "/bin/bash", "Args": "parsl.parsl.HighThroughputExecutor.block-0.1795740271.5185382.script"},
    "Parsl, arguments of the new syntax": {"Cmd": "/bin/bash", "Arguments": "parsl.parsl.condor.1795740271.51.script"},
    "Dask-jobqueue": {"Cmd": "/bin/sh", "DaskWorkerName": "htcondor--30.0--"},
    "Nextflow": {"Cmd": "/scratch/nextflow/0a/1b2c3d/.command.run"},
    "b2luigi": {"Cmd": "/home/alice/b2luigi/x=1/executable_wrapper.sh"},
    "DIRAC": {"Cmd": "/opt/dirac/DIRAC_1.sh", "Environment": "DIRAC_PILOT_STAMP=abc HTCONDOR_JOBID=1.0"},
    "Toil": {"Cmd": "/bin/sh", "IsToilJob": True, "ToilJobKilled": False},
    "HTMap": {"Cmd": "/home/alice/.htmap/run.py", "IsHTMapJob": True},
    "aCT": {"Cmd": "/opt/runpilot2-wrapper.sh", "ACTCluster": "ce.example.org"},
    "Harvester": {"Cmd": "/opt/runpilot2-wrapper.sh", "harvesterID": "CERN_central_A"},
    "WMAgent": {"Cmd": "/data/submit.sh", "WMAgent_AgentName": "vocms0000"},
}
OTHERS: list[dict[str, Any]] = [
    {},
    {"Cmd": "/home/alice/job.sh", "Args": "run.script", "Environment": "A=b"},
    {"Cmd": "/usr/bin/snakemake", "Args": "--cores 8 all"},
    {"Cmd": "/home/alice/command.run", "Args": "my.parsl.script", "JobBatchName": "parsl"},
]


def _is_of_manager(ad: dict[str, Any]) -> bool:
    """Evaluate the expression as the transform does."""
    return bool(classad2.ClassAd(ad | {"found": classad2.ExprTree(f"({EXPRESSION}) =?= true")}).eval("found"))


@pytest.mark.parametrize("ad", MANAGERS.values(), ids=MANAGERS)
def test_jobs_of_a_manager(ad: dict[str, Any]) -> None:
    assert _is_of_manager(ad)


@pytest.mark.parametrize("ad", OTHERS)
def test_other_jobs(ad: dict[str, Any]) -> None:
    assert not _is_of_manager(ad)


def test_each_term_is_there_for_a_manager() -> None:
    """Without it some job is no longer found."""
    terms = EXPRESSION.split(" || ")
    assert len(terms) == 9
    for term in terms:
        rest = " || ".join(other for other in terms if other != term)
        found = [bool(classad2.ClassAd(ad | {"x": classad2.ExprTree(rest)}).eval("x")) for ad in MANAGERS.values()]
        assert not all(found), term


@pytest.mark.parametrize("manager", sorted({name.partition(" ")[0].partition(",")[0] for name in MANAGERS}))
def test_each_manager_has_a_recipe(manager: str) -> None:
    assert f"\n## {manager}\n" in PAGE or f"\n| {manager} |" in PAGE


def test_the_page_has_each_marker() -> None:
    """Readers find the attribute beside a manager's name."""
    for marker in re.findall(r"\b(\w+) isnt undefined", EXPRESSION):
        assert f"`{marker}`" in PAGE
