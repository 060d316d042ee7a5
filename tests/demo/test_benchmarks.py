"""The form of the benchmarks: what is written, when a goal counts as met, and that plots can be drawn from it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


common = _load("common")


def test_goals_and_ratios() -> None:
    good = common.Figure("a", 0.3, "s", "b", 0.6, goal=0.3)
    assert good.as_json() == {
        "what": "a",
        "value": 0.3,
        "unit": "s",
        "peer": "b",
        "peer_value": 0.6,
        "ratio": 0.5,
        "goal": 0.3,
        "met": True,
        "noise": None,
    }
    assert common.Figure("a", 0.31, "s", goal=0.3).met is False
    assert common.Figure("a", 0.31, "1/s", goal=0.3, more=True).met is True
    assert common.Figure("a", 1, "s").as_json()["met"] is None


@pytest.mark.parametrize(("percent", "value"), [(95, 19), (100, 20), (5, 1), (50, 10)])
def test_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert common.percentile(list(range(20, 0, -1)), percent) == value


def test_a_missed_goal_is_written_and_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [common.Figure("held", 0.4, "s", "stock", 22.0, goal=0.3), common.Figure("ratio", 1.05, "", goal=1.1)]
    target = tmp_path / "out" / "name.json"
    status = common.main("name", lambda quick: figures if quick else [], ["--quick", "--json", str(target)])
    assert status == 1
    assert "NO" in capsys.readouterr().out
    content = json.loads(target.read_text())
    assert set(content) == {"name", "machine", "figures"}
    assert [figure["met"] for figure in content["figures"]] == [False, True]
    subprocess.run([sys.executable, str(BENCHMARKS / "plot.py"), str(target.parent)], check=True, capture_output=True)
    assert target.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_has_the_same_command_line(path: Path) -> None:
    if path.stem in {"common", "plot"}:
        return
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, check=True)
    assert "--quick" in done.stdout
