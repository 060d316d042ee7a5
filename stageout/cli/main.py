"""Entry of the ``stageout`` command: parse the command line and load only the subcommand that runs."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import stageout
from stageout.cli.exits import CommandError, Exit, signals_end_it
from stageout.core.errors import StageoutError, TransferFailure

_DESCRIPTION = """\
Show and control the delivery of job output that was handed off when the job ended.
JOB is a cluster (1234) or a job of it (1234.0), as condor_q shows them."""

#: Name -> module and short help, in the order of the help. The module has DESCRIPTION, ``add_arguments`` and ``run``.
COMMANDS: dict[str, tuple[str, str]] = {
    "status": ("stageout.cli.status", "show the delivery of job output, and why output waits"),
    "top": ("stageout.cli.top", "show a live table of what is being delivered"),
    "wait": ("stageout.cli.wait", "wait until output is delivered (for scripts and DAGs)"),
    "retry": ("stageout.cli.retry", "send failed and waiting files again at once, with fresh attempts"),
    "cancel": ("stageout.cli.cancel", "stop delivering a job's output and delete it"),
    "pause": ("stageout.cli.pause", "stop sending a job's output until 'stageout resume'"),
    "resume": ("stageout.cli.resume", "continue the delivery after 'stageout pause'"),
    "redirect": ("stageout.cli.redirect", "send failed and waiting files to another URL"),
    "history": ("stageout.cli.history", "show jobs that have left the queue, with the end of their output"),
    "explain": ("stageout.cli.explain", "explain how output will be delivered, before the job is submitted"),
    "check": ("stageout.cli.check", "try a destination: write, read and delete a small file"),
    "estimate": ("stageout.cli.estimate", "estimate streams, rate and duration of a transfer"),
    "profile": ("stageout.cli.profile", "measure rate, CPU and memory of a server"),
    "doctor": ("stageout.cli.doctor.report", "check the installation and print what to correct"),
    "wrap": ("stageout.cli.wrap", "make a front end that adds the hand-off to another plugin"),
    "plugin": ("stageout.cli.plugin_new", "write a new transfer plugin from a template"),
    "put": ("stageout.overlay.cli.put", "send files to a router of the overlay"),
    "ask": ("stageout.overlay.cli.ask", "ask a custodian of the overlay for the state of a file"),
    "get": ("stageout.overlay.cli.get", "fetch a file from a router of the overlay"),
    "ls": ("stageout.overlay.cli.ls", "list a directory at a router of the overlay"),
    "stat": ("stageout.overlay.cli.stat", "show kind, size and time of a name at a router"),
    "rm": ("stageout.overlay.cli.rm", "remove files and directories at a router"),
    "mkdir": ("stageout.overlay.cli.mkdir", "make directories at a router"),
    "mv": ("stageout.overlay.cli.mv", "rename a file or directory at a router"),
    "copy": ("stageout.overlay.cli.copy", "copy a file from one router to another"),
    "lot": ("stageout.overlay.cli.lot", "reserve space at a router of the overlay"),
    "routes": ("stageout.overlay.cli.routes", "show links and routes between routers of the overlay"),
    "capability": ("stageout.overlay.cli.capability", "make a capability for the overlay"),
    "token": ("stageout.overlay.cli.token", "make a token for HTTP requests at a router"),
    "completion": ("stageout.cli.completion", "print the completion script for a shell"),
}


#: Heading in the help -> first command below it.
_GROUPS = {
    "Follow and control deliveries:": "status",
    "Before you submit:": "explain",
    "Administrators and authors of plugins:": "doctor",
    "Routers of the overlay:": "put",
    "About this command:": "completion",
}


class _GroupedHelp(argparse.RawDescriptionHelpFormatter):
    """Help that lists commands below headings."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        headings = {first: heading for heading, first in _GROUPS.items()}
        lines: list[str] = []
        for one in action._get_subactions():
            if one.dest in headings:
                lines.append(f"{'' if not lines else chr(10)}{headings[one.dest]}\n")
            lines.append(super()._format_action(one))
        return "".join(lines)


class _Parser(argparse.ArgumentParser):
    """Parser that exits with EX_USAGE, because 2 means 'timed out' here, and suggests similar words."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments. The parser of a command itself refuses options that it does not have."""
        found, unknown = super().parse_known_args(args, namespace)
        is_leaf = not any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if is_leaf and unknown:
            word = unknown[0]
            hint = _meant(word.partition("=")[0], self._option_string_actions) if word.startswith("-") else ""
            self.error(f"{' '.join(unknown)}: no such {'option' if word.startswith('-') else 'argument'} here{hint}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = _meant(value, action.choices)
            raise argparse.ArgumentError(None, f"{value}: no such command{hint}; 'stageout help' lists all")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")


def _meant(word: str, known: Iterable[str]) -> str:
    """Suggest the most similar word in a question; "" when none is similar."""
    import difflib

    alike = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {alike[0]}?)" if alike else ""


def build_parser(word: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line, with all commands and their arguments.

    :param word: name of the command to load; the others have names and short help only. If no command has this name,
        load none. None: load all commands, except those of parts that are not installed.
    """
    parser = _Parser(prog="stageout", description=_DESCRIPTION, formatter_class=_GroupedHelp)
    parser.add_argument("--version", action="version", version=f"stageout {stageout.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=_Parser)
    for name in [word] if word in COMMANDS else COMMANDS:
        _, short = COMMANDS[name]
        command = commands.add_parser(name, help=short, formatter_class=argparse.RawDescriptionHelpFormatter)
        if word is None or word == name:
            try:
                module = _module(name)
            except CommandError:
                if word is None:
                    continue
                raise
            command.description = module.DESCRIPTION
            module.add_arguments(command)
    if word not in COMMANDS:
        command = commands.add_parser(
            "help", help="show the help of a command", description="Show the help of a command."
        )
        command.add_argument("topic", metavar="COMMAND", nargs="?")
    return parser


def _module(name: str) -> Any:
    """Load the module of a command. :raises CommandError: it belongs to a part that is not installed."""
    try:
        return importlib.import_module(COMMANDS[name][0])
    except ModuleNotFoundError as problem:
        if not (problem.name or "").startswith("stageout."):
            raise
        raise CommandError(
            f"'stageout {name}' needs the Python module {problem.name}, which is not installed: install all of stageout"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    :param arguments: without the program's name; None for those of the process.
    :returns: the exit status.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    options: argparse.Namespace | None = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names may contain characters that the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = build_parser(words[0] if words else "").parse_args(_protect_job_ids(words))
        if options.command in (None, "help"):
            return _help(getattr(options, "topic", None))
        with signals_end_it():
            status = int(_module(options.command).run(options))
            if sys.stdout is not None:
                sys.stdout.flush()
            return status
    except (StageoutError, TransferFailure) as problem:
        _say(problem, getattr(options, "json", False))
        return int(problem.status if isinstance(problem, CommandError) else Exit.FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as problem:
        is_file = problem.filename is not None
        if not is_file:
            _drop_output()
        text = f"{problem.filename if is_file else 'standard output'}: {problem.strerror}"
        _say(CommandError(text), is_file and getattr(options, "json", False))
        return int(Exit.FAILED)


def _drop_output() -> None:
    """Discard buffered output, which would cause another error at the exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(problem: StageoutError | TransferFailure, is_json: bool) -> None:
    """Print an error as a line, and with ``--json`` also as an object unless one was printed before."""
    from stageout.cli.bars import complain

    if is_json:
        from stageout.cli.results import Told, ending, tell

        if not isinstance(problem, Told):
            tell(ending(problem))
    complain(str(problem))


def _protect_job_ids(arguments: list[str]) -> list[str]:
    """Prevent argparse from reading a negative number as an option: DAGMan gives it to nodes that it never
    submitted.
    """
    return [f" {word}" if word[:1] == "-" and word[1:2].isdigit() and "." in word else word for word in arguments]


def _help(topic: str | None) -> int:
    parser = build_parser(topic or "")
    if topic is None:
        parser.print_help()
        return Exit.OK
    parser.parse_args([topic, "--help"])
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
