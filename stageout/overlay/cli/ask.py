"""``stageout ask``: what became of files that a custodian or a copying router has taken over."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from typing import Any

from stageout.cli.arguments import add_json, whole
from stageout.cli.bars import printable
from stageout.cli.exits import Exit, UsageError
from stageout.cli.results import ending, tell
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.units import size
from stageout.overlay import outcomes
from stageout.overlay.channel import Gateway
from stageout.overlay.cli.arguments import add_key
from stageout.overlay.cli.targets import target
from stageout.overlay.copying import state, states
from stageout.overlay.settings import congestion_of
from stageout.overlay.wire.fields import is_origin
from stageout.overlay.wire.messages import Copying, Custody, Result

DESCRIPTION = """\
Ask a router for the state of a file that 'stageout put --custody' or 'stageout copy --background' gave to it. The
states are: in custody (with its progress), done, failed, expired, lost, cancelled, or unknown (the router lost its
records). With --cancel the router stops the delivery. Ask again to see whether that was in time.

exit status: 0 the file is at its destination, 1 it will not arrive there, 2 not yet, 64 the URL cannot be used"""

_files = whole("number of files", 1)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("url", metavar="URL", help="overlay://HOST[:PORT] of the custodian")
    command.add_argument("origin", metavar="ORIGIN", help="identifier that put --custody or copy --background printed")
    command.add_argument("--cancel", action="store_true", help="cancel the delivery first")
    command.add_argument("--files", metavar="N", type=_files, default=1, help="number of files, as put -r printed it")
    add_json(command)
    add_key(command)


def run(options: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    gateway, _ = target(options.url, options.key)
    gateway = replace(gateway, congestion=congestion_of())
    if not is_origin(options.origin):
        words = "write the 32 digits that put --custody or copy --background has printed"
        raise UsageError(f"{printable(options.origin)} is no ORIGIN: {words}")
    if options.files > 1:
        return _ask_all(gateway, options)
    answer = state(gateway, options.origin, options.cancel)
    if options.json:
        tell(_fate(gateway, options.origin, 1, answer))
    elif isinstance(answer, Custody):
        print(f"in custody of {printable(answer.router)}")
    elif isinstance(answer, Copying):
        problem = f": {printable(answer.problem)}" if answer.problem else ""
        print(f"{size(answer.moved_bytes)} of {size(answer.size_bytes)}{problem}")
    else:
        print(f"{answer.outcome}{': ' if answer.reason else ''}{printable(answer.reason)}")
    if not isinstance(answer, Result):
        return int(Exit.TIMED_OUT)
    return int({"done": Exit.OK, "pending": Exit.TIMED_OUT}.get(answer.outcome, Exit.FAILED))


def _fate(gateway: Gateway, origin: str, seq: int, answer: Result | Custody | Copying) -> dict[str, Any]:
    """Return the outcome of a file, for programs."""
    about: dict[str, Any] = {
        "server": gateway.server, "origin": origin, "number": seq, "custodian": "", "moved_bytes": 0, "size_bytes": 0,
        "generation": 0,
    }  # fmt: skip
    if isinstance(answer, Custody):
        return {**about, **ending(outcome="custody"), "custodian": answer.router}
    if isinstance(answer, Copying):
        moved = {"moved_bytes": answer.moved_bytes, "size_bytes": answer.size_bytes}
        problem = TransferFailure(ErrorClass.from_code(answer.code), answer.problem) if answer.problem else None
        return {**about, **ending(problem, "copying"), **moved}
    over = answer.outcome not in ("done", "pending")
    problem = outcomes.failure(answer, f"file {seq}", gateway.server) if over else None
    return {**about, **ending(problem, answer.outcome), "generation": answer.generation}


def _ask_all(gateway: Gateway, options: argparse.Namespace) -> int:
    """Many files of one origin: those that will not arrive, and how many there are of each kind."""
    if options.cancel:
        raise UsageError("--cancel is for one file: leave out --files")
    answers = states(gateway, options.origin, options.files)
    found = Counter("in custody" if isinstance(one, Custody) else one.outcome for one in answers)
    for seq, one in enumerate(answers, 1):
        if options.json:
            tell(_fate(gateway, options.origin, seq, one))
        elif isinstance(one, Result) and one.outcome not in ("done", "pending"):
            print(f"file {seq}: {one.outcome}{': ' if one.reason else ''}{printable(one.reason)}")
    if not options.json:
        print(", ".join(f"{count} {what}" for what, count in found.items()))
    if set(found) == {"done"}:
        return int(Exit.OK)
    return int(Exit.TIMED_OUT if set(found) <= {"done", "in custody", "pending"} else Exit.FAILED)
