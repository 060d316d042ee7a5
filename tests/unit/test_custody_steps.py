"""Death of a custodian before and after each of its durable steps, and a start behind it. The process really dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_custody_http import Site

_LABELS = ("kept-recover", "kept-epoch", "kept-row", "kept-file", "kept-take")
_LATE = ("kept-cancel", "kept-end", "kept-drop", "kept-forget")
_ROOT = Path(__file__).resolve().parents[2]


def main(place: Path) -> None:
    """Take two operations into custody; one is cancelled, and both end. Each answer is printed."""
    site = Site(place)
    first, second = site.asks(1), site.asks(2)
    for ask in (first, second):
        site.bring(ask)
        print(f"{ask.identity.seq} {site.complete(ask)}", flush=True)
    print(f"2 {site.cancel(second)}", flush=True)
    for ask, state in ((first, "done"), (second, "cancelled")):
        if site.state(ask) in ("custody", "cancelling"):
            site.try_once(ask, state)
        print(f"{ask.identity.seq} {site.state(ask)}", flush=True)
    site.now = 30_000
    site.custodian.expire()
    print("forgotten", flush=True)
    site.stop()


def _run(place: Path, faults: str) -> tuple[int, list[str]]:
    code = f"import pathlib; from tests.unit.test_custody_steps import main; main(pathlib.Path({str(place)!r}))"
    environment = {**os.environ, "STAGEOUT_FAULTS": faults}
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
@pytest.mark.parametrize("label", _LABELS + _LATE)
def test_what_was_answered_holds(tmp_path: Path, label: str, when: str) -> None:
    code, said = _run(tmp_path, f"{label}={when}")
    assert code == -9
    site = Site(tmp_path)
    for ask in (site.asks(1), site.asks(2)):
        answers = [line.partition(" ")[2] for line in said if line.startswith(f"{ask.identity.seq} ")]
        stored = site.table.find(ask.identity)
        if "forgotten" in said or not answers or (label == "kept-forget" and stored is None):
            continue
        assert stored is not None
        state = site.state(ask)
        if answers[-1] == "custody":
            assert state in ("custody", "done", "cancelling", "cancelled")
            assert site.has_bytes(ask) or state in ("done", "cancelled")
        elif answers[-1] == "cancelling":
            assert state in ("cancelling", "cancelled")
        else:
            assert state == answers[-1]
    site.stop()
    code, said = _run(tmp_path, "")
    assert code == 0 and said[-1] == "forgotten", "the same calls again end as if nobody had died"


def test_nobody_dies_without_a_fault(tmp_path: Path) -> None:
    code, said = _run(tmp_path, "")
    assert code == 0
    assert said == ["1 custody", "2 custody", "2 cancelling", "1 done", "2 cancelled", "forgotten"]
