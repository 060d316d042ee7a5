"""``stageout completion``: print a shell completion script, generated from the parser."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from stageout.cli.exits import Exit
from stageout.cli.shells import SCRIPTS, Command, Option

DESCRIPTION = """\
Print the script that completes commands and options in a shell. The script starts no program when you press Tab.

  bash  stageout completion bash > ~/.local/share/bash-completion/completions/stageout
  zsh   stageout completion zsh > DIR/_stageout, where DIR is in $fpath
  fish  stageout completion fish > ~/.config/fish/completions/stageout.fish

The Debian package and the RPM install all three."""

#: Metavariables of values that are files.
_FILES = frozenset({"FILE", "FILE|JOB|CODE", "DIR", "PATH", "KEYFILE", "PLUGIN"})


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("shell", choices=sorted(SCRIPTS), help="shell that reads the script")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    print(script(options.shell), end="")
    return int(Exit.OK)


def script(shell: str) -> str:
    """Return the script for a shell. :param shell: "bash", "fish" or "zsh"."""
    from stageout.cli.main import build_parser

    return SCRIPTS[shell](commands_of(build_parser()))


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """Return the commands of the parser, in the order of the help."""
    (found,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {action.dest: action.help or "" for action in found._choices_actions}
    names = tuple(found.choices)
    return [_command(name, helps[name], command, names) for name, command in found.choices.items()]


class _Words(NamedTuple):
    """The words and files that positional arguments accept."""

    choices: tuple[str, ...]
    takes_files: bool


def _command(name: str, short: str, command: argparse.ArgumentParser, names: tuple[str, ...]) -> Command:
    shown = [action for action in command._actions if action.option_strings and action.help != argparse.SUPPRESS]
    words = _words([action for action in command._actions if not action.option_strings])
    choices = names if name == "help" else words.choices
    return Command(name, short, tuple(map(_option, shown)), choices, words.takes_files)


def _words(positionals: list[argparse.Action]) -> _Words:
    choices = tuple(str(choice) for action in positionals for choice in action.choices or ())
    return _Words(choices, any(action.metavar in _FILES for action in positionals))


def _option(action: argparse.Action) -> Option:
    takes_value = action.nargs != 0
    choices = tuple(map(str, action.choices or ()))
    short = (action.help or "").partition(" (")[0].replace("%(default)s", str(action.default))
    return Option(tuple(action.option_strings), short, takes_value, choices, action.metavar in _FILES)
