"""``stageout mv``: rename a file or directory at a router of the overlay."""

from __future__ import annotations

import argparse

from stageout.cli.arguments import add_json
from stageout.cli.exits import Exit, UsageError
from stageout.cli.results import item
from stageout.overlay.cli.arguments import STATUS, URL, add_custodian, add_key, add_routes
from stageout.overlay.cli.sessions import session_of
from stageout.overlay.cli.targets import name_there, named, target

DESCRIPTION = "Rename a file or directory at one router. A file with the new name is replaced." + STATUS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("-p", "--parents", action="store_true", help="make missing parent directories of NEW, too")
    command.add_argument("url", metavar="URL", help=URL)
    command.add_argument("to", metavar="NEW", help="new name at the same router")
    add_json(command)
    add_key(command)
    add_routes(command)
    add_custodian(command)


def run(options: argparse.Namespace) -> int:
    """Rename it."""
    gateway, path = target(options.url, options.key)
    named(options.url, path)
    other, new = target(options.to, options.key)
    new = name_there(new, options.to, path)
    if other.server != gateway.server:
        raise UsageError("mv renames at one router; use copy, then rm")
    about = {"server": gateway.server, "path": path, "to": new}
    with item(options.json, **about), session_of(gateway, options) as session:
        session.rename(path, new, parents=options.parents)
        session.push()
    return int(Exit.OK)
