"""``stageout mkdir``: make directories at a router of the overlay."""

from __future__ import annotations

import argparse

from stageout.cli.arguments import add_json
from stageout.cli.exits import Exit
from stageout.cli.results import item
from stageout.overlay.cli.arguments import STATUS, URL, add_custodian, add_key, add_routes
from stageout.overlay.cli.sessions import session_of
from stageout.overlay.cli.targets import named, target

DESCRIPTION = "Make directories in the given order." + STATUS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("-p", "--parents", action="store_true", help="make missing parent directories, too")
    command.add_argument("urls", metavar="URL", nargs="+", help=URL)
    add_json(command)
    add_key(command)
    add_routes(command)
    add_custodian(command)


def run(options: argparse.Namespace) -> int:
    """Make the directories in order. The first failure ends the command."""
    for url in options.urls:
        gateway, path = target(url, options.key)
        named(url, path)
        with item(options.json, server=gateway.server, path=path), session_of(gateway, options) as session:
            session.mkdir(path, parents=options.parents)
            session.push()
    return int(Exit.OK)
