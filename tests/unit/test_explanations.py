"""The advice about failed output: the cheapest step first, and no computation is thrown away in passing."""

from __future__ import annotations

import re

import pytest

from stageout.core.errors import ErrorClass
from stageout.core.reasons import FAILURES, Way

#: A new run would make the same output, or the bytes on the node are not those of the run.
_NEEDS_A_RUN = {ErrorClass.LOCAL_FILE, ErrorClass.SOURCE_CHANGED}


@pytest.mark.parametrize("kind", ErrorClass, ids=lambda kind: kind.name)
def test_the_cheapest_step_comes_first(kind: ErrorClass) -> None:
    said = FAILURES[kind].action
    commands = re.findall(r"`(stageout \w+|condor_\w+)`", said)
    assert commands[-1] == "condor_release" and "`condor_release` runs the job again" in said
    if kind in _NEEDS_A_RUN:
        assert FAILURES[kind].steps == Way.RELEASE.value
    else:
        assert {"stageout retry", "stageout redirect"} <= set(commands[:2]), said
    assert re.match(r"[A-Z`]", said) and said.endswith(".")
