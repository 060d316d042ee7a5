"""Programs and their command lines, as the reference and the man pages show them: read from the parsers of argparse."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

#: Program -> module and function whose parser it uses.
PROGRAMS = {
    "stageout": ("stageout.cli.main", "build_parser"),
    "stageout-sandbox-manager": ("sandbox_manager.daemon", "main"),
    "stageout-schedd-agent": ("schedd_agent.daemon", "main"),
    "stageout-router": ("overlay_router.daemon", "main"),
    "stageout-policy-service": ("policy_service.daemon", "main"),
    "stageout-web": ("stageout_web.daemon", "main"),
}

_STATUSES = re.compile(r"^exit status: (.+?)(?:\n\n|\Z)", re.M | re.S)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Block(NamedTuple):
    """A paragraph, or lines of program text that keep their ends."""

    text: str
    is_program: bool


class Argument(NamedTuple):
    """An option or a positional argument."""

    names: tuple[str, ...]
    #: Values of an option, such as ``[MB_S]``; "" for none.
    value: str
    #: A sentence.
    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    """One command line: a program, or one of its commands."""

    name: str
    #: Words of the usage behind the name, such as ``[-n SCHEDD]``.
    usage: tuple[str, ...]
    description: tuple[Block, ...]
    arguments: tuple[Argument, ...]
    #: Exit status and its meaning, where the description names them.
    statuses: tuple[tuple[str, str], ...]


class _Seen(Exception):
    """Carry a parser out of a program that was about to use it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser of a program's command line, without running the program."""
    module, name = PROGRAMS[program]
    function: Callable[..., object] = getattr(importlib.import_module(module), name)

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Seen(parser)

    try:
        with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
            made = function()
    except _Seen as seen:
        return seen.parser
    assert isinstance(made, argparse.ArgumentParser)
    return made


def parsers_of_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a program's commands, by name."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the short help of a program's commands, by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {item.dest: item.help or "" for action in found for item in action._choices_actions}


def command(parser: argparse.ArgumentParser) -> Command:
    """Return what a parser says about its command line."""
    text = "\n\n".join(part.strip() for part in (parser.description, parser.epilog) if part)
    found = _STATUSES.search(text)
    statuses = re.split(r",\s+(?=\d+ )", " ".join(found[1].split())) if found else []
    text = _STATUSES.sub("\n\n", text)
    return Command(
        parser.prog,
        tuple(_usage(parser)),
        tuple(_blocks(text)),
        tuple(_arguments(parser)),
        tuple((code, meaning) for code, _, meaning in (status.partition(" ") for status in statuses)),
    )


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Words of the usage; brackets and the values of an option are not divided."""
    plain = " ".join(_COLOUR.sub("", parser.format_usage()).split())
    plain = plain.removeprefix("usage: ").removeprefix(parser.prog).strip()
    depth, word = 0, ""
    for letter in plain:
        depth += (letter in "([") - (letter in ")]")
        if letter == " " and not depth:
            yield word
            word = ""
        else:
            word += letter
    if word:
        yield word


def _blocks(text: str) -> Iterator[Block]:
    """Paragraphs in their order; lines that are set in are program text."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = paragraph.splitlines()
        while lines:
            is_program = lines[0].startswith("  ")
            count = next((at for at, line in enumerate(lines) if line.startswith("  ") != is_program), len(lines))
            run, lines = lines[:count], lines[count:]
            if is_program:
                yield Block("\n".join(line[2:] for line in run), is_program=True)
            else:
                yield Block(" ".join(run), is_program=False)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[Argument]:
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help == argparse.SUPPRESS:
            continue
        value = _values(action) if action.option_strings and action.nargs != 0 else ""
        names = tuple(action.option_strings) or (_metavar(action)[0],)
        text = (action.help or "").replace("%(default)s", str(action.default))
        yield Argument(names, value, sentence(text) if text else "Required.")


def _metavar(action: argparse.Action) -> tuple[str, ...]:
    if action.metavar is not None:
        return action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
    if action.choices:
        return ("{" + ",".join(map(str, action.choices)) + "}",)
    return (action.dest.upper() if action.option_strings else action.dest,)


def _values(action: argparse.Action) -> str:
    """Values of an option, as its usage shows them."""
    names = _metavar(action)
    if action.nargs == argparse.OPTIONAL:
        return f"[{names[0]}]"
    if action.nargs in (argparse.ONE_OR_MORE, argparse.ZERO_OR_MORE):
        more = names[1] if len(names) > 1 else names[0]
        first = f"{names[0]} [{more} ...]"
        return first if action.nargs == argparse.ONE_OR_MORE else f"[{first}]"
    return " ".join(names)


def sentence(text: str) -> str:
    """Return a description as a sentence: with a capital letter, unless it begins with a name, and a full stop."""
    if re.match(r"[a-z]+(?=[\s,;:.]|$)(?!://)", text):
        text = text[:1].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) else ".")
