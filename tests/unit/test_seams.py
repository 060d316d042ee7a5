"""Parts that can be left out: the core imports, starts and delivers in a copy of the tree without one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stageout.daemon import EXIT_NO_RESTART
from tests.harness.parts import PARTS, copy_without, modules_of
from tests.harness.seams import needing

#: Prints the modules of the core that cannot be imported.
_IMPORT_ALL = """
import importlib, importlib.util, pathlib, sys
present = [name for name in sys.argv[2:] if importlib.util.find_spec(name)]
assert not present, present
for top in ("stageout", "sandbox_manager", "schedd_agent"):
    for path in sorted(pathlib.Path(top).rglob("*.py")):
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        if name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(name)
        except ImportError as problem:
            print(name, problem)
for module in (importlib.import_module(top) for top in ("stageout", "sandbox_manager", "schedd_agent")):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""

#: A hand-off to a daemon of the manager, and its delivery.
_DELIVER = """
from daemon_site import accepted, served
from manager_site import made, run
from tests.polling import until

with made({"STAGEOUT_TUNING": "fixed"}) as site:
    async def story():
        async with served(site) as node:
            await accepted(node, "copy://h/ok/a", "copy://h/ok/b")
            await until(lambda: node.collector.last() == {"1.0": "Released"}, node.collector.last)
    run(story())
    print(*sorted(site.delivered()))
"""

_START_ADAPTIVE = """
from daemon_site import Served
from manager_site import made

with made({"STAGEOUT_TUNING": "crowding"}) as site:
    Served(site)
"""

_ASK_POLICY = """
from daemon_site import Served
from manager_site import made

with made({"STAGEOUT_TUNING": "fixed", "STAGEOUT_POLICY_URL": "https://policy:9620"}) as site:
    Served(site)
"""


def _python(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree), str(tree / "tests/unit")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_core_needs_no_part(part: str, tmp_path: Path) -> None:
    copy_without(part, tmp_path)
    done = _python(tmp_path, "-c", _IMPORT_ALL, str(tmp_path), *modules_of(part))
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_a_manager_delivers_without_the_part(part: str, tmp_path: Path) -> None:
    copy_without(part, tmp_path)
    done = _python(tmp_path, "-c", _DELIVER)
    assert (done.stdout.strip(), done.returncode) == ("a b", 0), done.stderr


@pytest.fixture(scope="module")
def without_streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("without-streams")
    copy_without("streams", path)
    return path


def test_the_other_commands_are_completed_without_streams(without_streams: Path) -> None:
    done = _python(without_streams, "-m", "stageout.cli.main", "completion", "bash")
    assert done.returncode == 0, done.stderr
    assert "redirect" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-c", _START_ADAPTIVE], "set STAGEOUT_TUNING = fixed, or install all of stageout"),
        (["-c", _ASK_POLICY], "remove STAGEOUT_POLICY_URL, or install all of stageout"),
        (["-m", "stageout.cli.main", "estimate", "x"], "needs the Python module stageout.cli.estimate"),
        (["-m", "stageout.cli.main", "profile", "x"], "needs the Python module stageout.cli.profile"),
    ],
)
def test_what_needs_a_part_that_is_missing_says_so(without_streams: Path, words: Sequence[str], says: str) -> None:
    done = _python(without_streams, *words)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("part", "program", "module"),
    [("streams", "stageout-policy-service", "policy_service"), ("web", "stageout-web", "stageout_web")],
)
def test_a_daemon_that_is_missing_says_so_and_is_not_started_again(
    part: str, program: str, module: str, tmp_path: Path
) -> None:
    copy_without(part, tmp_path)
    function = program.partition("-")[2].replace("-", "_")
    done = _python(tmp_path, "-c", f"import sys; from stageout.programs import {function}; sys.exit({function}())")
    assert (done.stdout, done.returncode) == ("", EXIT_NO_RESTART)
    assert done.stderr == (
        f"{program} needs the Python module {module}, which is not installed: install all of stageout\n"
    )


def test_tests_of_a_part_are_found_through_the_modules_that_they_share(tmp_path: Path) -> None:
    folder = tmp_path / "tests/unit"
    folder.mkdir(parents=True)
    texts = {
        "page_site": "from stageout_web.daemon import main",
        "test_page": "from page_site import main",
        "test_rows": "import stageout_web",
        "test_core": "from stageout.core import log",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    assert needing(tmp_path, modules_of("web")) == {"tests/unit/test_page.py", "tests/unit/test_rows.py"}
