"""The child process that queries the schedd for the web page."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import classad2
import pytest

from stageout_web.queue_child import _answer


class _Schedd:
    def query(self, constraint: str, projection: list[str], limit: int) -> list[Any]:
        return [classad2.ClassAd('[ClusterId = 7; ProcId = 0; JobStatus = 5; HoldReason = "no\\377"]')]


def test_a_job_with_text_that_is_not_utf_8_is_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "htcondor2", SimpleNamespace(Schedd=_Schedd))
    answer = _answer({"op": "job", "cluster": 7, "proc": 0})
    assert answer == {"jobs": [{"ClusterId": 7, "ProcId": 0, "JobStatus": 5}]}
