"""``--version`` of every command: the answer, and the modules that it loads."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from stageout import __version__
from stageout.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
_PLUGINS = [path.name for path in sorted((ROOT / "plugins").glob("*_plugin"))]
#: All that may be loaded besides the modules of an interpreter that does nothing.
_LOADED = {"__future__", "stageout", "stageout.programs"}
_COLLECTIONS = {"_collections", "_operator", "collections", "itertools", "keyword", "operator", "reprlib"}
_LOADED_BY_PLUGINS = {
    "__future__", "collections.abc", "stageout", "stageout.plugin", "stageout.plugin.abilities", "stageout.protocols",
    *_COLLECTIONS,
}  # fmt: skip
_REPORT = """
import os, sys
before = set(sys.modules)
def report():
    print(*sorted(set(sys.modules) - before), file=sys.stderr, flush=True)
end = os._exit
os._exit = lambda status: (report(), end(status))
sys.argv = {argv!r}
sys.path.insert(0, {root!r})
"""


def _entries() -> dict[str, str]:
    """Return the entries of the console scripts, by program."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup.get("options.entry_points", "console_scripts").split("\n")
    return {name.strip(): entry.strip() for name, _, entry in (line.partition("=") for line in lines) if name}


def _loaded(argv: list[str], code: str) -> tuple[str, set[str]]:
    """Run code in a process of its own. Return its answer, and the modules that it loaded."""
    begin = _REPORT.format(argv=argv, root=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", begin + code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip(), set(done.stderr.split())


def test_every_console_script_has_an_entry_here() -> None:
    assert _entries().keys() == PROGRAMS.keys()
    assert {entry.partition(":")[0] for entry in _entries().values()} == {"stageout.programs"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_version_is_said_without_the_product(program: str) -> None:
    module, _, function = _entries()[program].partition(":")
    code = f"from {module} import {function}\nstatus = {function}()\nreport()\nsys.exit(status)\n"
    answer, loaded = _loaded([program, "--version"], code)
    assert answer == f"{program} {__version__}"
    assert loaded <= _LOADED


@pytest.mark.parametrize("plugin", _PLUGINS)
def test_a_plugin_says_its_version_without_its_protocol(plugin: str) -> None:
    path = ROOT / "plugins" / plugin
    answer, loaded = _loaded([str(path), "--version"], path.read_text())
    assert answer == f"{plugin} {__version__}"
    assert {name for name in loaded if not name.startswith("stageout.protocols.")} <= _LOADED_BY_PLUGINS
    assert {name.rpartition(".")[2] for name in loaded if name.count(".") == 3} <= {"abilities"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_entry_runs_the_program(program: str) -> None:
    _, _, function = _entries()[program].partition(":")
    code = (
        f"import sys; sys.argv = [{program!r}, '--no-such-option']; from stageout.programs import {function} as run; "
    )
    done = subprocess.run([sys.executable, "-c", f"{code}sys.exit(run())"], capture_output=True, text=True, timeout=60,
                          cwd=ROOT, check=False)  # fmt: skip
    assert done.returncode in (2, 64)
    assert program in done.stderr
