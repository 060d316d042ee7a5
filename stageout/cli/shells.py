"""Completion scripts for bash, zsh and fish. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple


class Option(NamedTuple):
    """An option of a command.

    :param names: with their dashes. :param short: its short help. :param choices: its allowed values; empty: any.
    :param takes_files: the value is a file.
    """

    names: tuple[str, ...]
    short: str
    takes_value: bool
    choices: tuple[str, ...]
    takes_files: bool


class Command(NamedTuple):
    """A command. :param choices: allowed positional arguments. :param takes_files: other arguments are files."""

    name: str
    short: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]
    takes_files: bool


_HEAD = "# Completion of stageout for {shell}, printed by 'stageout completion {shell}'.\n"

_BASH = """\
_stageout() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words= files=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{values}
    *)
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
        ;;
    esac
    [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [ -n "$files" ] && [ "${{word:0:1}}" != - ]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -f -- "$word"))
    fi
}}
complete -F _stageout stageout
"""


def bash(commands: Sequence[Command]) -> str:
    """Return the script for bash 4 and later."""
    values = []
    for command in commands:
        for option in filter(lambda option: option.takes_value, command.options):
            pattern = "|".join(f'"{command.name} {name}"' for name in option.names)
            values.append(f"    {pattern}) {_bash_words(option.choices, option.takes_files)} ;;")
    options = [
        f"        {command.name}) {_bash_words([*command.choices, *_names(command)], command.takes_files)} ;;"
        for command in commands
    ]
    names = " ".join(command.name for command in commands)
    return _HEAD.format(shell="bash") + _BASH.format(
        commands=names, values="\n".join(values), options="\n".join(options)
    )


def _names(command: Command) -> list[str]:
    return [name for option in command.options for name in option.names]


def _bash_words(words: Iterable[str], files: bool) -> str:
    return " ".join(filter(None, [f'words="{" ".join(words)}"', "files=1" if files else ""]))


_ZSH = """\
#compdef stageout
{head}
_stageout() {{
    local -a commands
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe -t commands command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{options}
    esac
}}

_stageout "$@"
"""


def zsh(commands: Sequence[Command]) -> str:
    """Return the function for zsh, a file named ``_stageout``."""
    described = [f"        {_quoted(f'{command.name}:{command.short}')}" for command in commands]
    options = []
    for command in commands:
        specs = [spec for option in command.options for spec in _zsh_option(option)]
        specs.append(_quoted("*:argument:" + _zsh_values(command.choices, command.takes_files)))
        options.append(f"    {command.name}) _arguments {' '.join(specs)} ;;")
    head = _HEAD.format(shell="zsh").rstrip()
    return _ZSH.format(head=head, commands="\n".join(described), options="\n".join(options))


def _zsh_option(option: Option) -> list[str]:
    text = option.short.replace("[", "(").replace("]", ")")
    value = f":value:{_zsh_values(option.choices, option.takes_files)}" if option.takes_value else ""
    return [_quoted(f"{name}[{text}]{value}") for name in option.names]


def _zsh_values(choices: Sequence[str], files: bool) -> str:
    return f"({' '.join(choices)})" if choices else "_files" if files else " "


def fish(commands: Sequence[Command]) -> str:
    """Return the script for fish."""
    lines = [_HEAD.format(shell="fish").rstrip(), "complete -c stageout -f"]
    for command in commands:
        shown = _fish_quoted(command.short)
        lines.append(f"complete -c stageout -n __fish_use_subcommand -a {command.name} -d {shown}")
    for command in commands:
        start = f"complete -c stageout -n '__fish_seen_subcommand_from {command.name}'"
        if command.choices:
            lines.append(f"{start} -a {_fish_quoted(' '.join(command.choices))}")
        if command.takes_files:
            lines.append(f"{start} -F")
        lines += [f"{start} {_fish_option(option)}" for option in command.options]
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    words = [f"{_fish_kind(name)} {name.lstrip('-')}" for name in option.names]
    if option.takes_value:
        words.append("-rF" if option.takes_files else "-x")
    if option.choices:
        words.append(f"-a {_fish_quoted(' '.join(option.choices))}")
    return " ".join([*words, "-d", _fish_quoted(option.short)])


def _fish_kind(name: str) -> str:
    """Return the switch of ``complete`` for long options, for short ones, and for long ones with one dash."""
    if name.startswith("--"):
        return "-l"
    return "-s" if len(name) == 2 else "-o"


def _quoted(text: str) -> str:
    """Quote a word for a POSIX shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "fish": fish, "zsh": zsh}
