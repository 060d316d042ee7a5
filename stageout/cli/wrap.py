"""``stageout wrap``: makes front ends for other makers' transfer plugins."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from stageout.cli.exits import CommandError, Exit
from stageout.core import front_end

_TIMEOUT_S = 20.0


def run(options: argparse.Namespace) -> int:
    """Make the front ends and print the line of configuration that names them."""
    directory = Path(options.directory).absolute()
    os.umask(0o022)  # HTCondor's user and those of jobs must get there
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    made = {plugin: str(_make(directory, plugin)) for plugin in options.plugins}
    print("Put this line behind all others that set the list, then run condor_reconfig:\n")
    print(front_end.replaced(_listed() or list(made), made))
    return int(Exit.OK)


def _make(directory: Path, plugin: str) -> Path:
    source = Path(plugin)
    target = directory / source.name
    if not source.is_absolute():
        raise CommandError(f"{plugin}: write the path as FILETRANSFER_PLUGINS has it, from / on")
    if front_end.is_ours(_text(source)):
        raise CommandError(f"{plugin} hands off by itself")
    other = front_end.wrapped(_text(target)) or "something else" if target.exists() else plugin
    if other != plugin:
        raise CommandError(f"{target} is there, for {other}; a front end has its plugin's name: give --directory")
    if not front_end.write(target, plugin, _ask):
        raise CommandError(f"'{plugin} -classad' names no SupportedMethods; HTCondor does not use such a plugin")
    return target


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as stream:
            return stream.read(front_end.HEAD_BYTES).decode("utf-8", "surrogateescape")
    except OSError as problem:
        raise CommandError(f"{path}: {problem.strerror}") from None


def _ask(plugin: str, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            [plugin, "-classad"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.decode("utf-8", "surrogateescape")


def _listed() -> list[str]:
    """FILETRANSFER_PLUGINS of this machine; none where there are no bindings."""
    try:
        from stageout.core.config import condor_settings

        return condor_settings().condor("FILETRANSFER_PLUGINS").replace(",", " ").split()
    except ImportError:
        return []
