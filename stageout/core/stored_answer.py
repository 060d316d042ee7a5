"""Stored answers of plugins to ``-classad``, which a plugin prints without Python.

HTCondor asks each registered plugin for every job and direction. ``NAME.answer`` beside a plugin is a piece of shell
that the head of ``plugins/*_plugin`` runs. It prints the answer while the status of each file and the value of each
variable on which the answer depends are the recorded ones. The sandbox manager writes it, into directories only where
nobody else may write, and a plugin runs no piece but root's or that of its own owner.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Callable

from stageout.core import durable
from stageout.core.classad_parser import parse_old
from stageout.core.front_end import HEAD_BYTES, signature

#: Runs a plugin with arguments in this environment, and returns what it prints.
Ask = Callable[[str, Sequence[str], Mapping[str, str]], str]

#: All that answers read of the environment, and what the search for modules and the interpreter reads of it.
VARIABLES = (
    *(f"{method}_proxy" for method in ("http", "https", "ftp", "file", "dav", "davs")),
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
)
SOURCES = "StageOutSources"
"""Attribute of the answer to ``-classad -sources``: the files on which the answer depends, separated by blanks."""

_MARK = '"$0.answer"'
_PLAIN = re.compile(r"[\w/.+,:@%=-]+", re.ASCII)
_MODE = 0o644
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CannotStore(Exception):
    """An answer is not stored; the text says why."""


def is_asked(plugin: Path) -> bool:
    """Tell whether a plugin prints a stored answer. :raises OSError: it cannot be read."""
    with open(plugin, "rb") as stream:
        return is_asked_in(stream.read(HEAD_BYTES).decode("utf-8", "replace"))


def is_asked_in(head: str) -> bool:
    """Tell whether a plugin prints a stored answer. :param head: beginning of its file."""
    return _MARK in head


def path_of(plugin: Path) -> Path:
    """Return the path of a plugin's stored answer."""
    return plugin.with_name(f"{plugin.name}.answer")


def is_fresh(plugin: Path, environment: Mapping[str, str]) -> bool:
    """Tell whether the plugin, in this environment, prints its stored answer."""
    try:
        text = path_of(plugin).read_text("utf-8", "surrogateescape")
        sources = text.partition("\n")[0].split()[1:]
        return text.startswith(_conditions(sources, _file_states(plugin, sources), environment))
    except OSError:
        return False


def trouble(plugin: str, text: str, stat: Callable[[str], os.stat_result]) -> str:
    """Return why a plugin does not print its stored answer, "" if it does in the environment where it was made.

    :param text: of the answer, from its beginning. :param stat: as os.stat. :raises OSError: there is no answer.
    """
    answer, own = stat(f"{plugin}.answer"), stat(plugin)
    if answer.st_uid not in (0, own.st_uid) or answer.st_mode & 0o777 != _MODE:
        return "belongs to somebody else, or others may write it"
    sources = text.partition("\n")[0].split()[1:]
    try:
        seen = "\n".join(_status(stat(path)) for path in (plugin, *sources))
    except OSError as problem:
        return f"is out of date: {problem.filename} is gone"
    if not text.startswith(f"# {' '.join(sources)}\n{_test_of(seen)} &&\n"):
        return "is out of date: the plugin, its interpreter or one of its modules has changed"
    return ""


def write(plugin: Path, environment: Mapping[str, str], ask: Ask) -> None:
    """Store the answer that the plugin's Python gives in this environment. Blocks until it has answered, twice.

    :raises CannotStore: others may write to the directory, or the plugin does not answer.
    :raises OSError: the answer cannot be written.
    """
    _check(plugin.parent)
    told = parse_old(ask(str(plugin), ("-classad", "-sources"), environment)).text(SOURCES)
    sources = told.split()
    if not all(_PLAIN.fullmatch(path) for path in (str(plugin), *sources)):
        raise CannotStore("a path has a blank or another special character")
    seen = _file_states(plugin, sources)  # before the answer: of a file that changes meanwhile nothing is believed
    printed = ask(str(plugin), ("-classad", "-sources"), environment)
    ad = parse_old(printed)
    if not ad.text("SupportedMethods") or ad.text(SOURCES) != told:
        raise CannotStore(f"it does not say what it depends on, but {printed[-200:]!r}")
    lines = printed.splitlines(keepends=True)
    answer = "".join(line for line in lines if not line.startswith(f"{SOURCES} = "))
    text = f"{_conditions(sources, seen, environment)}    printf %s {shlex.quote(answer)} && exit 0\n"
    durable.write_file("plugin-answer", path_of(plugin), text.encode("utf-8", "surrogateescape"), _MODE)


def _check(directory: Path) -> None:
    facts = directory.stat()
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & _OTHERS_WRITE:
        raise CannotStore(f"others may write to {directory}")


def _file_states(plugin: Path, sources: Sequence[str]) -> str:
    """Ask for the status of the files, as the plugin asks ``stat`` for it. :raises OSError: one is missing."""
    return "\n".join(_status(Path(path).stat()) for path in (str(plugin), *sources))


def _status(found: os.stat_result) -> str:
    return f"{found.st_uid} {stat.S_IMODE(found.st_mode):o} {signature(found)}"


def _conditions(sources: Sequence[str], seen: str, environment: Mapping[str, str]) -> str:
    tests = [_test_of(seen)]
    tests += [f'[ "${name}" = {shlex.quote(environment.get(name, ""))} ]' for name in VARIABLES]
    return f"# {' '.join(sources)}\n" + "".join(f"{test} &&\n" for test in tests)


def _test_of(seen: str) -> str:
    return f'[ "$own" = {shlex.quote(seen)} ]'
