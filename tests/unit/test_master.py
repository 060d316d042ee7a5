"""The message to condor_master that a daemon is alive."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from stageout.condor import limits, master
from stageout.core.config import mapping_settings


@pytest.mark.parametrize(
    ("values", "silence_s"),
    [
        ({}, 3600),
        ({"NOT_RESPONDING_TIMEOUT": "7200"}, 7200),
        ({"NOT_RESPONDING_TIMEOUT": "20"}, 300),
        ({"NOT_RESPONDING_TIMEOUT": " "}, 3600),
        ({"X_NOT_RESPONDING_TIMEOUT": "20", "NOT_RESPONDING_TIMEOUT": "7200"}, 20),
        ({"X_NOT_RESPONDING_TIMEOUT": "0"}, 1),
        ({"X_NOT_RESPONDING_TIMEOUT": "soon"}, 3600),
        ({"X_NOT_RESPONDING_TIMEOUT": "60 * 60", "NOT_RESPONDING_TIMEOUT": "7200"}, 7200),
    ],
)
def test_the_time_out_is_that_of_htcondor(values: dict[str, str], silence_s: int) -> None:
    assert master.silence_s(mapping_settings(values), "X") == silence_s


def test_only_a_child_of_a_daemon_has_a_master() -> None:
    assert master.has_master({"CONDOR_INHERIT": "1 <h:1>"}) and not master.has_master({"PATH": "/bin"})


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; sys.exit(0)", ""),
        ("import sys; print('refused'); sys.exit(1)", "refused"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import time; time.sleep(600)", "no answer within 1 s"),
    ],
)
def test_the_process_that_sends_is_bounded(code: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*_: Any) -> list[str]:
        return [sys.executable, "-c", code]

    monkeypatch.setattr(master, "module_command", command)
    monkeypatch.setattr(limits, "ALIVE_S", 1.0 if "600" in code else 60.0)
    assert asyncio.run(master._tell(60)) == problem
