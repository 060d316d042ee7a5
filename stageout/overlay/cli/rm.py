"""``stageout rm``: remove files and directories at a router of the overlay."""

from __future__ import annotations

import argparse

from stageout.cli.arguments import add_json
from stageout.cli.exits import Exit
from stageout.cli.results import item
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.cli.arguments import STATUS, URL, add_custodian, add_key, add_routes
from stageout.overlay.cli.sessions import session_of
from stageout.overlay.cli.targets import named, target

DESCRIPTION = "Remove files in the given order; with -r also directories and their content." + STATUS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("-r", "--recursive", action="store_true", help="remove directories with their content")
    command.add_argument("urls", metavar="URL", nargs="+", help=URL)
    add_json(command)
    add_key(command)
    add_routes(command)
    add_custodian(command)


def run(options: argparse.Namespace) -> int:
    """Remove the names in order. The first failure ends the command."""
    for url in options.urls:
        gateway, path = target(url, options.key)
        named(url, path)
        with item(options.json, server=gateway.server, path=path), session_of(gateway, options) as session:
            if not options.recursive and session.stat(path).kind == "directory":
                raise TransferFailure(ErrorClass.CONFLICT, f"{path} is a directory: rm -r removes it with all in it")
            session.delete(path)
            session.push()
    return int(Exit.OK)
