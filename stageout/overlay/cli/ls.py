"""``stageout ls``: names in a directory at a router of the overlay."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice

from stageout.cli.arguments import add_json
from stageout.cli.bars import printable
from stageout.cli.exits import Exit
from stageout.cli.results import SCHEMA
from stageout.core.units import size
from stageout.overlay.cli.arguments import STATUS, URL, add_key, add_routes
from stageout.overlay.cli.sessions import session_of
from stageout.overlay.cli.targets import target
from stageout.overlay.operations import Entry

#: Names that are sorted together.
_SORTED = 100_000
_KINDS = {"file": "-", "directory": "d", "link": "l", "other": "?"}

DESCRIPTION = (
    "List a directory at a router of the overlay, or one file. Symbolic links are shown, not followed." + STATUS
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("-l", "--long", action="store_true", help="show kind, mode, size and time, too")
    add_json(command)
    command.add_argument("url", metavar="URL", help=URL)
    add_key(command)
    add_routes(command)


def run(options: argparse.Namespace) -> int:
    """Show the names, sorted."""
    gateway, path = target(options.url, options.key)
    with session_of(gateway, options) as session:
        entry = session.stat(path)
        parts = _sorted(session.entries(path) if entry.kind == "directory" else iter([entry]))
        shown = (one for part in parts for one in part)
        if options.json:
            _print_json(shown)
            return int(Exit.OK)
        for one in shown:
            print(line(one, options.long))
    return int(Exit.OK)


def line(entry: Entry, long: bool) -> str:
    """One entry as ``ls`` shows it."""
    name = printable(entry.name) + ("/" if entry.kind == "directory" else "")
    if not long:
        return name
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
    return f"{_KINDS[entry.kind]} {entry.mode:03o} {size(entry.size_bytes):>8} {when} {name}"


def as_json(entry: Entry) -> dict[str, object]:
    """The same for programs (docs/reference/json-overlay.md)."""
    fields = ("name", "kind", "size_bytes", "mode", "modified")
    return {name: getattr(entry, name) for name in fields}


def _sorted(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    """By name; of very many one part after the other, so that they need not all be held."""
    while part := sorted(islice(entries, _SORTED), key=lambda one: one.name):
        yield part


def _print_json(entries: Iterator[Entry]) -> None:
    """One object, as it comes."""
    first = next(entries, None)
    print(f'{{"schema": {SCHEMA}, "entries": [', end="")
    if first is not None:
        print("\n " + json.dumps(as_json(first)), end="")
    for one in entries:
        print(",\n " + json.dumps(as_json(one)), end="")
    print("\n]}")
