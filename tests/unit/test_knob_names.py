"""Former names of knobs count for one release; the daemon's log and the doctor name the new ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_machine import Fake

from stageout.cli.doctor import config
from stageout.cli.doctor.findings import Level
from stageout.core.config import KNOBS, RENAMED, ConfigError, former_names, mapping_settings

ROOT = Path(__file__).resolve().parents[2]


def test_former_names_are_no_knobs_any_more() -> None:
    assert set(RENAMED.values()) <= set(KNOBS)
    assert not set(RENAMED) & set(KNOBS)


@pytest.mark.parametrize(("former", "name"), RENAMED.items())
def test_a_former_name_counts_unless_the_new_one_is_set(former: str, name: str) -> None:
    assert mapping_settings({former: "77"}).count(name) == 77
    assert mapping_settings({former: "77", name: ""}).count(name) == 77
    assert mapping_settings({former: "77", name: "88"}).count(name) == 88
    assert mapping_settings({former: ""}).count(name) == KNOBS[name].default


def test_an_error_gives_the_name_that_is_set() -> None:
    with pytest.raises(ConfigError, match=r"^STAGEOUT_GIVE_UP = soon: write a number"):
        mapping_settings({"STAGEOUT_GIVE_UP": "soon"}).number("STAGEOUT_DELIVERY_TIMEOUT")
    with pytest.raises(ConfigError, match=r"^STAGEOUT_DELIVERY_TIMEOUT = 1: must be at least 60"):
        mapping_settings({"STAGEOUT_DELIVERY_TIMEOUT": "1"}).number("STAGEOUT_DELIVERY_TIMEOUT")


def test_the_prefix_of_a_local_name_works_for_both(tmp_path: Path) -> None:
    pytest.importorskip("htcondor2")
    file = tmp_path / "condor_config"
    file.write_text(
        "STAGEOUT_GIVE_UP = 100\nEP2.STAGEOUT_GIVE_UP = 200\n"
        "STAGEOUT_URGENT_WINDOW = 300\nEP2.STAGEOUT_URGENT_WINDOW = 400\nEP2.STAGEOUT_URGENT = 500\n"
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
    assert done.stdout.split() == ["100", "300", "200", "400"]


def test_the_sentences_say_what_to_do() -> None:
    assert former_names(mapping_settings({"STAGEOUT_AGENT_TIMEOUT": "9"})) == []
    (renamed,) = former_names(mapping_settings({"STAGEOUT_AGENT_FRESH": "9"}))
    assert renamed.startswith("STAGEOUT_AGENT_FRESH is now STAGEOUT_AGENT_TIMEOUT: rename it")
    (idle,) = former_names(mapping_settings({"STAGEOUT_AGENT_FRESH": "9", "STAGEOUT_AGENT_TIMEOUT": "9"}))
    advice = "give its value to STAGEOUT_AGENT_TIMEOUT, with the same prefix, or delete STAGEOUT_AGENT_FRESH"
    assert idle.endswith(f"because STAGEOUT_AGENT_TIMEOUT is set: {advice}")


def test_the_doctor_names_old_and_new() -> None:
    machine = Fake()
    machine.values.update({"STAGEOUT_GIVE_UP": "5000", "EP2.STAGEOUT_RETRY_FIRST": "5"})
    plain, local = (item for item in config.settings(machine) if item.level is not Level.OK)
    assert (plain.level, local.level) == (Level.WARN, Level.WARN)
    assert plain.text == "STAGEOUT_GIVE_UP is now STAGEOUT_DELIVERY_TIMEOUT"
    assert local.remedy.startswith("rename it to EP2.STAGEOUT_RETRY_INITIAL_DELAY")
