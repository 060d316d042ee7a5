"""The runner of the project's tests: a test may fail once beside others, if it passes alone, and is recorded then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_RUNNER = Path(__file__).parents[2] / "tools" / "run-tests"
#: Fails in its first run only.
_ONCE = "import pathlib\ndef test_once():\n    seen = pathlib.Path('seen')\n    was = seen.exists()\n    seen.touch()\n"
_TESTS = {
    "once": _ONCE + "    assert was\n",
    "always": _ONCE + "    assert False\n",
    "four": "import pytest\n@pytest.mark.parametrize('a', range(4))\ndef test_four(a):\n    assert False\n",
    "broken": "import nothing_of_this_name\n",
    # A test whose name differs between processes: pytest-xdist names the process as failed, and no test.
    "unlike": "import os, pytest\n@pytest.mark.parametrize('a', [os.getpid()])\ndef test_unlike(a):\n    pass\n",
    "passes": "def test_passes():\n    pass\n",
}


@pytest.mark.parametrize(
    ("kind", "strict", "status", "says"),
    [
        ("passes", "", 0, "1 passed"),
        ("once", "", 0, "PASSED ONLY ALONE"),
        ("once", "1", 1, "1 failed"),
        ("always", "", 1, "run again, alone: test_it.py::test_once"),
        ("four", "", 1, "4 failed. No more than 3 tests are run again."),
        ("broken", "", 2, "nothing_of_this_name"),
        ("unlike", "", 1, "No more than 3 tests are run again."),
    ],
)
def test_failures_are_run_again_once(tmp_path: Path, kind: str, strict: str, status: int, says: str) -> None:
    done = _run(tmp_path, kind, strict)
    assert (done.returncode, says in done.stdout) == (status, True), done.stdout
    passed_alone = kind == "once" and not strict
    assert ("PASSED ONLY ALONE" in done.stdout) is passed_alone
    assert (tmp_path / "out/only-alone.txt").exists() is passed_alone


def test_the_second_failure_of_a_test_counts(tmp_path: Path) -> None:
    assert _run(tmp_path, "once").returncode == 0
    assert (tmp_path / "out/only-alone.txt").read_text() == "test_it.py::test_once\n"
    (tmp_path / "seen").unlink()
    done = _run(tmp_path, "once")
    assert (done.returncode, "no second chance: test_it.py::test_once" in done.stdout) == (1, True), done.stdout


@pytest.mark.parametrize(("listed", "status"), [("once", 1), ("another", 0), ("onc", 0)])
def test_a_listed_test_has_no_second_chance(tmp_path: Path, listed: str, status: int) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/only-alone.txt").write_text(f"# why\ntest_it.py::test_{listed}\n")
    assert _run(tmp_path, "once").returncode == status


def test_the_committed_list_names_tests_that_exist() -> None:
    lines = (_RUNNER.parents[1] / "tests/only-alone.txt").read_text().splitlines()
    for name in (line for line in lines if not line.startswith("#")):
        path, _, test = name.partition("::")
        function = test.rpartition("::")[2].partition("[")[0]
        assert f"def {function}(" in (_RUNNER.parents[1] / path).read_text(), f"{name} is gone: delete its line"


def _run(directory: Path, kind: str, strict: str = "") -> subprocess.CompletedProcess[str]:
    (directory / "test_it.py").write_text(_TESTS[kind])
    return subprocess.run(
        [_RUNNER, "-n", "2" if kind == "unlike" else "0", "--rootdir", directory, directory / "test_it.py"],
        cwd=directory,
        env={**os.environ, "PYTHON": sys.executable, "STRICT": strict},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
