"""``stageout copy``: copies a file from one router of the overlay to another."""

from __future__ import annotations

import argparse
from typing import Any

from stageout.cli.arguments import add_json
from stageout.cli.bars import Bar
from stageout.cli.exits import Exit
from stageout.cli.results import item
from stageout.overlay.cli.arguments import URL, add_key, add_routes
from stageout.overlay.cli.targets import ask_with, name_there, named, target
from stageout.overlay.copying import carry, command, copy
from stageout.overlay.settings import routes_of

DESCRIPTION = """\
Copy a file from one router to another, or to the same. The first router sends the file to the second in your name, with
your permissions at both. If you interrupt the command, the copy is cancelled. If the first router cannot reach the
second, or with --carry, the data pass through the memory of this machine, and the command says so. The copy appears
under its name only when it is complete, verified by its digest and on the router's disk.

exit status: 0 copied, 1 not copied, 64 a URL cannot be used"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("url", metavar="URL", help=URL)
    command.add_argument("to", metavar="NEW", help="URL at any router; a directory if it ends with /")
    add_json(command)
    add_key(command)
    add_routes(command)
    command.add_argument("--to-key", metavar="FILE", default="", help="key for the router of NEW (default: --key)")
    command.add_argument("--to-routes", metavar="ROUTES", default="", help="routes to the router of NEW, as --routes")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--background", action="store_true", help="return when the first router has accepted the copy")
    how.add_argument("--carry", action="store_true", help="move the data through this machine")


def run(options: argparse.Namespace) -> int:
    """Copy it, or tell the first router to."""
    source, path = target(options.url, options.key)
    named(options.url, path)
    to, new = target(options.to, options.to_key or options.key)
    new = name_there(new, options.to, path)
    routes, to_routes = routes_of(options.routes, source), routes_of(options.to_routes or options.routes, to)
    about: dict[str, Any] = {"server": source.server, "path": path, "to_server": to.server, "to": new}
    with item(options.json, **about, size_bytes=0, generation=0, origin="", carried="") as facts:
        if options.background:
            given = command(source, path, to, new, routes=routes, target_routes=to_routes)
            facts.update(outcome="copying", size_bytes=given.size_bytes, origin=given.origin)
            if not options.json:
                print(f"{source.server} copies it; what became of it: {ask_with(source, given.origin)}")
            return int(Exit.OK)
        move = carry if options.carry else copy
        with Bar(path.rpartition("/")[2], 0, not options.json) as bar:
            done = move(source, path, to, new, progress=bar, sized=bar.sized, routes=routes, target_routes=to_routes)
            bar.end(done.size_bytes)
        facts.update(size_bytes=done.size_bytes, generation=done.generation, carried=done.carried)
        if done.carried and not options.json:
            print(f"  carried through this machine: {done.carried}")
    return int(Exit.OK)
