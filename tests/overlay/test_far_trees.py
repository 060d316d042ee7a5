"""Trees over a long way: they cost a few round trips, not one for each directory or name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.overlay import sameness
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

_ROUND_TRIP_S = 0.1
_DIRECTORIES, _FILES_EACH = 300, 3
#: A third of what one round trip for each directory takes.
_ENOUGH_S = _DIRECTORIES * _ROUND_TRIP_S / 3

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="makes network namespaces: needs root and TUN"
)


class _Far:
    """A router at the far end of a long link, and commands at the near one."""

    def __init__(self, area: WideArea, router: RouterProcess) -> None:
        self._area, self._router = area, router
        self.root, self.url = router.root, f"overlay://{area.far_address}:{router.port}/tree"

    def __call__(self, *words: str) -> tuple[dict[str, Any], float]:
        """The last object that a command prints, and how many seconds it took."""
        options = ["--key", str(self._router.key_file("site")), "--json"]
        command = [*self._area.near, sys.executable, "-m", "stageout.cli.main", *words, *options]
        start_s = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        took_s = time.monotonic() - start_s
        return json.loads(done.stdout.splitlines()[-1]), took_s


@pytest.fixture
def far(tmp_path: Path) -> Iterator[_Far]:
    with WideArea(Link(50e6, _ROUND_TRIP_S)) as area:
        settings = {"STAGEOUT_ROUTER_HOST": area.far_address}
        with RouterProcess(tmp_path / "router", settings, wrapper=area.far) as router:
            yield _Far(area, router)


def _make(place: Path, modified_ago_s: float) -> None:
    """Directories in directories, each with files."""
    made = [place]
    for number in range(1, _DIRECTORIES):
        made.append(made[(number - 1) // 10] / f"d{number}")
    then_s = time.time() - modified_ago_s
    for directory in made:
        directory.mkdir()
        for number in range(_FILES_EACH):
            (directory / f"f{number}").write_text(f"{directory.name}/{number}")
            os.utime(directory / f"f{number}", (then_s, then_s))


def _below(place: Path) -> dict[str, str]:
    return {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}


def test_a_tree_costs_a_few_round_trips(far: _Far, tmp_path: Path) -> None:
    _make(far.root / "tree", modified_ago_s=2 * sameness.MARGIN_S)
    files = _DIRECTORIES * _FILES_EACH
    back = tmp_path / "back"
    total, took_s = far("get", "-r", far.url, str(back))
    assert (total["files"], total["failed"]) == (files, 0)
    assert took_s < _ENOUGH_S
    assert _below(back) == _below(far.root / "tree")
    total, took_s = far("get", "-r", far.url, str(back), "--update")
    assert (total["files"], total["unchanged"]) == (0, files)
    assert took_s < _ENOUGH_S
    for path in (far.root / "tree").rglob("f*"):  # as if they had been sent after they were made
        os.utime(path, (time.time() + 3600,) * 2)
    total, took_s = far("put", "-r", str(back), far.url, "--update")
    assert (total["files"], total["unchanged"]) == (0, files)
    assert took_s < _ENOUGH_S
    removed, took_s = far("rm", "-r", far.url)
    assert removed["outcome"] == "done" and not (far.root / "tree").exists()
    assert took_s < _ENOUGH_S
