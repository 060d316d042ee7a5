"""``stageout wrap``: make front ends for third-party transfer plugins."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from stageout.cli.arguments import add_json
from stageout.cli.exits import CommandError, Exit
from stageout.cli.results import tell
from stageout.core import front_end

_TIMEOUT_S = 20.0

DESCRIPTION = """\
Make a front end for each PLUGIN: an executable of the same name that hands uploads off to the sandbox manager. It
answers -classad with the recorded answer of the plugin, and runs the plugin for all other calls. The command prints the
line of configuration that names the front ends instead of their plugins. The sandbox manager renews a front end when
its plugin changes.

exit status: 0 all were made, 1 one cannot be made"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("plugins", metavar="PLUGIN", nargs="+", help="path of a plugin, as in FILETRANSFER_PLUGINS")
    command.add_argument(
        "--directory", metavar="DIR", default="/usr/local/libexec/stageout",
        help="directory of the front ends (default: %(default)s)",
    )  # fmt: skip
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Make the front ends and print the line of configuration that names them."""
    directory = Path(options.directory).absolute()
    os.umask(0o022)  # HTCondor's user and job users must be able to read it
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    made = {plugin: str(_make(directory, plugin)) for plugin in options.plugins}
    line = front_end.replaced(_listed() or list(made), made)
    if options.json:
        tell({"front_ends": [{"plugin": plugin, "path": path} for plugin, path in made.items()], "setting": line})
    else:
        print(f"Put this line behind all others that set the list, then run condor_reconfig:\n\n{line}")
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
    """Return FILETRANSFER_PLUGINS of this machine; empty if the bindings are missing."""
    from stageout.condor.bindings import BindingsMissing
    from stageout.condor.configuration import condor_settings

    try:
        return condor_settings().condor("FILETRANSFER_PLUGINS").replace(",", " ").split()
    except BindingsMissing:
        return []
