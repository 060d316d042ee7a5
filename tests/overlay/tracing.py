"""System calls of a router that change names or bring data to the disk, as strace shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_CALL = re.compile(r"^(\w+)\((.*)\)\s+= 0$")
_UNFINISHED, _RESUMED = " <unfinished ...>", re.compile(r"^<\.\.\. \w+ resumed>")
_PATH = re.compile(r'\d+<([^>]*)>|"([^"]*)"')


class Call(NamedTuple):
    """One system call that changed names or brought data to the disk: its name, and the paths in it."""

    name: str
    paths: tuple[str, ...]


class Trace:
    """Watches a router's system calls. :param home: where its notes lie."""

    def __init__(self, home: Path) -> None:
        self._path = home / "trace"
        calls = "trace=fsync,fdatasync,syncfs,rename,renameat,renameat2,link,linkat"
        # -D: the router is the child of its starter, who ends it by its pid.
        self.wrapper = ("strace", "-D", "-f", "-y", "-q", "-q", "-s", "4096", "-o", str(self._path), "-e", calls)

    def calls(self) -> list[Call]:
        """All that have returned without an error."""
        found = (_CALL.match(line) for line in _joined(self._path.read_text(errors="replace").splitlines()))
        return [Call(one[1], tuple(a or b for a, b in _PATH.findall(one[2]))) for one in found if one]


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Calls in the order of their ends: strace divides one during which another thread made a call."""
    begun: dict[str, str] = {}
    for line in lines:
        thread, call = line.split(maxsplit=1)
        if call.endswith(_UNFINISHED):
            begun[thread] = call[: -len(_UNFINISHED)]
        elif _RESUMED.match(call):
            yield begun.pop(thread) + _RESUMED.sub("", call)
        else:
            yield call


def first(calls: Sequence[Call], names: Sequence[str], part: str, begin: int = 0) -> int:
    """Index of the first of these calls with a path that ends so."""
    found = [at for at in range(begin, len(calls)) if calls[at].name in names and _ends(calls[at], part)]
    assert found, f"none of {names} for {part}: {calls}"
    return found[0]


def _ends(call: Call, part: str) -> bool:
    return any(re.search(f"{part}$", path) for path in call.paths)
