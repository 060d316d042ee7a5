"""Man pages: one for each program and for each command of ``stageout``, from their parsers.

``make docs`` writes them into ``out/docs/man``. The files of a daemon come from its knobs and its fragment, those of a
command from ``descriptions.py``.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from descriptions import COMMAND_FILES, COMMAND_GROUPS
from programs import Block, Command, command, parser_of, parsers_of_commands, sentence, summaries
from reference import EXIT_MEANINGS, ROOT

import stageout
from stageout.cli.exits import Exit
from stageout.core.config import KNOBS, PathKnob

_CONFIGURATION = (
    "/etc/condor/condor_config, /etc/condor/config.d/",
    "HTCondor's configuration, which names the schedd, the collector and the plugins.",
)


class Daemon(NamedTuple):
    """A daemon: what it is for, its fragment, the roles whose knobs it reads, and the page that explains it."""

    summary: str
    fragment: str
    roles: tuple[str, ...]
    page: str


DAEMONS = {
    "stageout-sandbox-manager": Daemon(
        "keep and deliver job output", "20-stageout-ep.conf", ("both", "ep", "pilot"), "administrator/execute-point.md"
    ),
    "stageout-schedd-agent": Daemon(
        "track stage-out for the jobs of a schedd",
        "20-stageout-ap.conf",
        ("both", "ap"),
        "administrator/access-point.md",
    ),
    "stageout-router": Daemon(
        "store and forward files of the overlay", "20-stageout-router.conf", ("router",), "overlay/gateways.md"
    ),
    "stageout-policy-service": Daemon(
        "grant transfer streams to sites", "20-stageout-policy.conf", ("policy",), "administrator/policy-service.md"
    ),
    "stageout-web": Daemon(
        "show the stage-out of a pool on a web page", "20-stageout-web.conf", ("web",), "administrator/web.md"
    ),
}


def escaped(text: str) -> str:
    """Text for roff: hyphens stay the hyphens of options, and no line is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    for letter, name in (("'", "aq"), ("`", "ga"), ("^", "ha"), ("~", "ti"), ('"', "dq")):
        text = text.replace(letter, f"\\({name}")
    return re.sub(r"^\.", r"\\&.", text, flags=re.M)


def _prose(text: str) -> str:
    """A paragraph, one sentence a line, as roff expects it."""
    return escaped(re.sub(r"(?<=[a-z)\]][.!?]) (?=[A-Z])", "\n", " ".join(text.split())))


def _usage_word(word: str) -> str:
    """One word of the usage: names of options are bold, values are italic, and the rest is as it is."""
    parts = re.split(r"([A-Za-z_][\w-]*|--?[A-Za-z][\w-]*)", word)
    shown = []
    for part in parts:
        if re.fullmatch(r"--?[A-Za-z][\w-]*|[a-z][a-z-]*", part):
            shown.append(f"\\fB{escaped(part)}\\fR")
        elif re.fullmatch(r"[A-Z][\w-]*", part):
            shown.append(f"\\fI{escaped(part)}\\fR")
        else:
            shown.append(escaped(part))
    return "".join(shown)


def _blocks(blocks: Iterable[Block]) -> Iterator[str]:
    for number, (text, is_program) in enumerate(blocks):
        if is_program:
            yield f".PP\n.in +4n\n.nf\n{escaped(text)}\n.fi\n.in"
        else:
            yield (".PP\n" if number else "") + _prose(text)


def _items(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names, already in roff, and their explanation."""
    for name, text in rows:
        yield f".TP\n{name}\n{_prose(text)}"


def _options(shown: Command, *, positional: bool) -> list[str]:
    rows = []
    for argument in shown.arguments:
        if argument.names[0].startswith("-") != positional:
            names = ", ".join(f"\\fB{escaped(name)}\\fR" for name in argument.names)
            value = f" {_usage_word(argument.value)}" if argument.value else ""
            rows.append((_usage_word(argument.names[0]) if positional else names + value, argument.text))
    return list(_items(rows))


def _references(names: Sequence[str]) -> str:
    pages = [f".BR {escaped(name)} ({_section(name)})" for name in names]
    return ",\n".join(pages)


def _section(name: str) -> int:
    return 8 if name in DAEMONS else 1


def page(
    shown: Command,
    summary: str,
    files: Iterable[tuple[str, str]],
    related: Sequence[str],
    document: str,
    commands: Iterable[tuple[str, str]] = (),
) -> str:
    """Return a man page.

    :param summary: a phrase for ``apropos``.
    :param files: name and explanation of each file.
    :param related: names of the other man pages.
    :param document: page of the documents that explains the command, below ``docs/``.
    :param commands: the program's commands, in roff, and what each does.
    """
    name = shown.name.replace(" ", "-")
    day = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())))
    head = f'.TH {escaped(name.upper())} {_section(name)} {day} "stageout {stageout.__version__}" "stageout"'
    own = [(code, sentence(meaning)) for code, meaning in shown.statuses]
    statuses = own or [(str(int(code)), EXIT_MEANINGS[code]) for code in Exit]
    if own and name not in DAEMONS:
        others = "Other statuses are those of stageout(1): 64 for a wrong command line, 69 if a daemon does not answer."
    else:
        others = ""
    sections: dict[str, list[str]] = {
        "NAME": [f"{escaped(name)} \\- {escaped(summary)}"],
        "SYNOPSIS": [
            ".nh\n.ad l\n" + " ".join([f"\\fB{escaped(shown.name)}\\fR", *map(_usage_word, shown.usage)]) + "\n.ad\n.hy"
        ],
        "DESCRIPTION": list(_blocks(shown.description)),
        "COMMANDS": list(_items(commands)),
        "OPTIONS": [
            *_options(shown, positional=False),
            *_items([("\\fB\\-h\\fR, \\fB\\-\\-help\\fR", "Show the usage and the options.")]),
        ],
        "OPERANDS": _options(shown, positional=True),
        "EXIT STATUS": [*_items(statuses), *([f".PP\n{_prose(others)}"] if others else [])],
        "FILES": list(_items((f"\\fI{escaped(file)}\\fR", text) for file, text in files)),
        "SEE ALSO": [_references(related), ".PP\n" + _prose(f"Page docs/{document} of the documents of stageout.")],
    }
    return "\n".join(
        [head, *(line for title, lines in sections.items() if lines for line in (f".SH {title}", *lines)), ""]
    )


def daemon_files(daemon: Daemon) -> Iterator[tuple[str, str]]:
    """Yield the files of a daemon: its fragment, its log, and the paths that knobs name."""
    yield f"/etc/condor/config.d/{daemon.fragment}", "Its fragment of HTCondor's configuration."
    for log in re.findall(r"^\w+_LOG = (\S+)", (ROOT / "condor_config.d" / daemon.fragment).read_text(), re.M):
        yield log, "Its log."
    for knob in KNOBS.values():
        if isinstance(knob, PathKnob) and knob.role in daemon.roles:
            yield str(knob.default) or f"$({knob.name})", f"{sentence(knob.doc)} The knob {knob.name} names it."


def pages() -> Iterator[tuple[str, str]]:
    """Yield name and text of each man page."""
    parser = parser_of("stageout")
    short = summaries(parser)
    yield (
        "stageout.1",
        page(
            command(parser),
            "show and control the delivery of job output",
            [_CONFIGURATION],
            [*DAEMONS],
            "reference/stageout.md",
            [(_references([f"stageout-{word}"]), sentence(text)) for word, text in short.items()],
        ),
    )
    for word, each in parsers_of_commands(parser).items():
        ((group, document),) = [(group, page) for group, page in COMMAND_GROUPS.items() if word in group]
        files = [*COMMAND_FILES.get(word, ()), _CONFIGURATION]
        related = ["stageout", *(f"stageout-{other}" for other in group if other != word)]
        yield f"stageout-{word}.1", page(command(each), short[word], files, related, document)
    for name, daemon in DAEMONS.items():
        others = ["stageout", "stageout-doctor", *(other for other in DAEMONS if other != name)]
        shown = command(parser_of(name))
        yield f"{name}.8", page(shown, daemon.summary, daemon_files(daemon), others, daemon.page)


def main(folder: str) -> None:
    """Write all man pages into a folder."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.[18]"):
        old.unlink()
    for name, text in pages():
        (out / name).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
