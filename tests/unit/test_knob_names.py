"""Names of knobs: the prefix of a daemon comes first, and names that are none count for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_machine import Fake

from stageout.cli.doctor import config
from stageout.cli.doctor.findings import Level
from stageout.core.config import KNOBS, mapping_settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_prefix_of_a_local_name_comes_first(tmp_path: Path) -> None:
    pytest.importorskip("htcondor2")
    file = tmp_path / "condor_config"
    file.write_text(
        "STAGEOUT_DELIVERY_TIMEOUT = 100\nEP2.STAGEOUT_DELIVERY_TIMEOUT = 200\nSTAGEOUT_URGENT_WINDOW = 300\n"
    )
    code = (
        "from stageout.condor.configuration import condor_settings\n"
        "for name in ('', 'EP2'):\n"
        "    found = condor_settings(name)\n"
        "    print(found.count('STAGEOUT_DELIVERY_TIMEOUT'), found.count('STAGEOUT_URGENT_WINDOW'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("_CONDOR_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "CONDOR_CONFIG": str(file)}, cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["100", "300", "200", "300"]


@pytest.mark.parametrize(
    "name", ["STAGEOUT_GIVE_UP", "STAGEOUT_RETRY_FIRST", "STAGEOUT_URGENT", "STAGEOUT_AGENT_FRESH"]
)
def test_a_name_that_is_no_knob_has_no_effect_and_the_doctor_says_so(name: str) -> None:
    read = mapping_settings({name: "77"})
    assert all(read.text(knob.name) == str(knob.default) for knob in KNOBS.values())
    machine = Fake()
    machine.values[name] = "77"
    (finding,) = (item for item in config.settings(machine) if item.level is not Level.OK)
    assert finding.text == f"{name} is set, but nothing reads it"
