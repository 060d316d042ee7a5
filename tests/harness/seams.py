"""``make seams``: take each part out of a scratch copy of the repository, and run the unit tests of the core there.

Tests that import the part are left out, also those that import it by a module beside them. So are tests that name it
(:data:`_NAMING`), and tests of other things than the core (:data:`_OTHERS`). Without streams the default of
``STAGEOUT_TUNING`` is ``fixed``, as an administrator has to set it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.parts import PARTS, copy_without, modules_of

#: Tests of the overlay and of the web page, and those that read all texts of the repository.
_OTHERS = (
    "overlay_*", "web_*", "documents", "drawn_mutants", "golden", "language", "layout", "man_pages", "markdown",
    "mutants", "seams",
)  # fmt: skip
#: Part -> words in the names of tests that start it, and tests that use it by its name.
_WORDS = {
    "streams": "policy_service or policy-service",
    "web": "stageout_web or stageout-web",
    "kit": "conformance",
}
_NAMING: dict[str, tuple[str, ...]] = {
    "streams": (
        "test_cli_main.py::test_every_command_prints_json",
        "test_cli_main.py::test_json_of_commands_that_make_files",
        "test_manager_daemon.py::test_a_report_has_the_servers_with_output_that_waits_or_moves",
        "test_manager_streams.py::test_the_daemon_sends_within_a_real_services_grant_and_gives_it_back",
        "test_metrics.py::test_the_library_is_loaded_only_where_metrics_are_on",
        "test_trust_table.py::test_no_attribute_of_ours_is_in_the_table_for_nothing",
    ),
    "web": (),
    "kit": (),
}


def main(parts: Sequence[str]) -> int:
    """Run the core's tests without each part. :returns: 0 if all pass."""
    failed = []
    for part in parts or list(PARTS):
        with tempfile.TemporaryDirectory(prefix=f"stageout-without-{part}-") as folder:
            tree = Path(folder)
            tree.chmod(0o755)  # plugins of jobs' users read it
            copy_without(part, tree)
            _commit(tree)
            left_out = needing(tree, modules_of(part))
            if part == "streams":
                _fix_tuning(tree)
            print(f"seams: without {part}: {len(left_out)} files of tests left out", flush=True)
            command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "tests/unit"]
            command += [word for name in _OTHERS for word in ("--ignore-glob", f"*/test_{name}.py")]
            command += ["-k", f"not ({_WORDS[part]})"]
            command += [word for name in sorted(left_out) for word in ("--ignore", name)]
            command += [word for name in _NAMING[part] for word in ("--deselect", f"tests/unit/{name}")]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            if subprocess.run(command, cwd=tree, env=environment, check=False).returncode:
                failed.append(part)
    print(f"seams: {'failed without ' + ', '.join(failed) if failed else 'the core needs no part'}")
    return 1 if failed else 0


def needing(tree: Path, modules: Sequence[str]) -> set[str]:
    """Return the unit tests that import one of these modules, directly or by modules beside them."""
    texts = [*tree.glob("tests/**/*.py"), *tree.glob("docs/_ext/*.py"), *tree.glob("benchmarks/**/*.py")]
    imported = {path: set(_imports(path)) for path in texts}
    needed = {path for path, names in imported.items() if any(_is_in(name, modules) for name in names)}
    while True:
        names = {path.stem for path in needed if not path.name.startswith("test_")}
        more = {path for path in imported if any(name.split(".")[-1] in names for name in imported[path])}
        if more <= needed:
            break
        needed |= more
    return {
        path.relative_to(tree).as_posix()
        for path in needed
        if path.parent == tree / "tests/unit" and path.name.startswith("test_")
    }


def _imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, and the names from them: each may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _commit(tree: Path) -> None:
    """Make the copy a repository: tests ask git for the files and for what has changed."""
    who = ["-c", "user.name=seams", "-c", "user.email=seams@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "Leave a part out"]):
        subprocess.run(["git", *words], cwd=tree, check=True)


def _fix_tuning(tree: Path) -> None:
    config = tree / "stageout/core/config.py"
    before = config.read_text()
    after = before.replace('"STAGEOUT_TUNING",\n            "crowding",', '"STAGEOUT_TUNING",\n            "fixed",')
    assert after != before
    config.write_text(after)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
