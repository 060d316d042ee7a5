"""Which tests call a function of the product: seen when they run, and kept in ``out/reached`` for the next time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

#: Python imports it at its start, where it lies on the path.
_TRACING = Path(__file__).with_name("tracing") / "sitecustomize.py"
_SHARED = "(setup)"
#: Files that run together: what they say is kept then.
_AT_ONCE = 12


class Caller(NamedTuple):
    """A test that calls the function. :param seconds: that it took, with the notes."""

    name: str
    seconds: float


class Reached:
    """The functions that tests call.

    :param place: a copy of the checkout, where tests run. :param kept: where notes are kept. :param folders: of the
        product.
    """

    def __init__(self, place: Path, kept: Path, folders: Sequence[str]) -> None:
        self._place = place
        self._kept = kept
        self._folders = folders
        self._known: dict[str, dict[str, list[Caller]]] = {}
        self._new: set[str] = set()

    def look(self, files: Iterable[str]) -> None:
        """Learn what the tests in these files call: from what is kept, or they run once."""
        self._learn([name for name in files if name not in self._known and not self._read(name)])

    def look_again(self, files: Iterable[str]) -> None:
        """Let these tests run, unless they did since the start: what is kept is of an earlier product."""
        self._learn([name for name in files if name not in self._new])

    def _learn(self, files: Sequence[str]) -> None:
        for begin in range(0, len(files), _AT_ONCE):
            self._run(files[begin : begin + _AT_ONCE])
        for name in files:
            self._new.add(name)
            self._read(name)

    def tests(self, file: str, function: str, among: Iterable[str]) -> dict[str, list[Caller]]:
        """Return the tests that call a function, by their files, the shortest first."""
        found = {name: self._known.get(name, {}).get(f"{file} {function}", []) for name in among}
        return {name: tests for name, tests in found.items() if tests}

    def _read(self, name: str) -> bool:
        try:
            content = json.loads(self._path(name).read_text())
        except FileNotFoundError:
            return False
        if content["text"] != self._text(name):
            return False
        known: dict[str, list[Caller]] = {}
        for test, (seconds, numbers) in content["tests"].items():
            for number in numbers:
                known.setdefault(content["functions"][number], []).append(Caller(test, seconds))
        for tests in known.values():
            tests.sort(key=lambda one: one.seconds)
        self._known[name] = known
        return True

    def _path(self, name: str) -> Path:
        return self._kept / f"{name.replace('/', '.')}.json"

    def _text(self, name: str) -> str:
        return sha256((self._place / name).read_bytes()).hexdigest()

    def _run(self, files: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="stageout-reached-") as directory:
            notes, results = Path(directory, "notes"), Path(directory, "results.xml")
            Path(directory).chmod(0o755)
            notes.mkdir()
            notes.chmod(0o1777)  # programs may have become other users
            hook, settings = self._place / _TRACING.name, self._place / "traced"
            shutil.copy(_TRACING, hook)
            settings.write_text("\n".join([str(notes), *self._folders]))
            environment = {**os.environ, "PYTHONPATH": str(self._place)}
            command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-o", "junit_family=xunit1", f"--junitxml={results}", *files]
            try:
                subprocess.run(command, cwd=self._place, env=environment, stdout=subprocess.DEVNULL, check=False)
            finally:
                hook.unlink()
                settings.unlink()
            if not results.exists():
                print(f"pytest did not end, nothing is known of {', '.join(files)}", flush=True)
                return
            seconds = _seconds(results)
            called: dict[str, set[str]] = {}
            for path in notes.glob("[0-9]*"):
                words = iter(path.read_bytes().decode(errors="replace").split("\0"))
                for test, file, function in zip(words, words, words):
                    name, _, phase = test.rpartition(" ")
                    # The first test makes things that the others use, too.
                    called.setdefault(name.partition("::")[0] if phase == _SHARED else name, set()).add(
                        f"{file} {function}"
                    )
        self._kept.mkdir(parents=True, exist_ok=True)
        for file in files:
            shared = called.get(file, set())
            tests = {name: shared | called.get(name, set()) for name in seconds if name.partition("::")[0] == file}
            functions = sorted(set().union(*tests.values()))
            numbers = {function: number for number, function in enumerate(functions)}
            content = {
                "text": self._text(file),
                "functions": functions,
                "tests": {
                    name: (seconds[name], sorted(numbers[one] for one in found)) for name, found in tests.items()
                },
            }
            self._path(file).write_text(json.dumps(content))


def _seconds(results: Path) -> dict[str, float]:
    """Return the tests that ran, and how long."""
    cases = ElementTree.parse(results).iter("testcase")
    return {f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0)) for case in cases}
