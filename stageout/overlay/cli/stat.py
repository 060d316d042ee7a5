"""``stageout stat``: one name at a router of the overlay."""

from __future__ import annotations

import argparse
import json
import time

from stageout.cli.arguments import add_json
from stageout.cli.bars import printable
from stageout.cli.exits import Exit
from stageout.cli.results import SCHEMA
from stageout.core.units import size
from stageout.overlay.cli.arguments import STATUS, URL, add_key, add_routes
from stageout.overlay.cli.ls import as_json
from stageout.overlay.cli.sessions import session_of
from stageout.overlay.cli.targets import target

DESCRIPTION = "Show kind, size and time of a name. Its generation counts the changes made by the overlay." + STATUS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    add_json(command)
    command.add_argument("url", metavar="URL", help=URL)
    add_key(command)
    add_routes(command)


def run(options: argparse.Namespace) -> int:
    """Show what the name is."""
    gateway, path = target(options.url, options.key)
    with session_of(gateway, options) as session:
        entry = session.stat(path)
    if options.json:
        more = {"generation": entry.generation, "known": entry.note, "digest": entry.digest, "manifest": entry.manifest}
        print(json.dumps({"schema": SCHEMA, **as_json(entry), **more}, indent=1))
        return int(Exit.OK)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.modified))
    for name, value in (
        ("name", printable(path) or "/"), ("kind", entry.kind),
        ("size", f"{size(entry.size_bytes)} ({entry.size_bytes} bytes)"),
        ("mode", f"{entry.mode:03o}"), ("modified", when), ("generation", entry.generation),
        ("digest", printable(f"{entry.digest} {entry.manifest}") if entry.manifest else "-"),
    ):  # fmt: skip
        print(f"{name + ':':<12}{value}")
    if entry.note:
        print(f"{'known:':<12}{printable(entry.note)}")
    return int(Exit.OK)
