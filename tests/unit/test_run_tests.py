"""The runner of the project's tests: a failure beside other tests counts only if it fails again, alone."""

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
        ("once", "", 0, "PASSED ONLY ALONE, mend them: test_it.py::test_once"),
        ("once", "1", 1, "1 failed"),
        ("always", "", 1, "run again, alone: test_it.py::test_once"),
        ("four", "", 1, "4 failed. No more than 3 tests are run again."),
        ("broken", "", 2, "nothing_of_this_name"),
        ("unlike", "", 1, "No more than 3 tests are run again."),
    ],
)
def test_failures_are_run_again_once(tmp_path: Path, kind: str, strict: str, status: int, says: str) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS[kind])
    done = subprocess.run(
        [_RUNNER, "-n", "2" if kind == "unlike" else "0", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "STRICT": strict},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, says in done.stdout) == (status, True), done.stdout
    assert ("PASSED ONLY ALONE" in done.stdout) is (kind == "once" and not strict)
