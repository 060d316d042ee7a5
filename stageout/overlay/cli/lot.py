"""``stageout lot``: space at a router of the overlay, reserved before there is anything to send."""

from __future__ import annotations

import argparse
import time

from stageout.cli.arguments import add_json, size
from stageout.cli.exits import Exit, UsageError
from stageout.cli.results import item
from stageout.core.units import size as size_text
from stageout.overlay.cli.arguments import add_key
from stageout.overlay.cli.targets import target
from stageout.overlay.lots import release, renew, reserve

DESCRIPTION = """\
Reserve space at a router for later uploads, and print the ID of the lot. The space is allocated for you until uploads
use it ('stageout put --lot ID'), you release it, or its time ends.

exit status: 0 done, 1 not done, 64 the command line cannot be used"""


def _hours(text: str) -> float:
    value = float(text)
    if not 0 < value <= 168:
        raise ValueError
    return value


_hours.__name__ = "number of hours (at most 168)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("action", choices=("reserve", "renew", "release"))
    command.add_argument("url", metavar="URL", help="overlay://HOST[:PORT]/path of the uploads")
    command.add_argument("--size", metavar="SIZE", type=size, default=0, help="bytes to reserve, such as 500G")
    command.add_argument("--lot", metavar="ID", default="", help="lot to renew or release")
    command.add_argument(
        "--hours", metavar="N", type=_hours, default=24.0, help="hours until the lot ends, at most 168 (default: 24)"
    )
    add_json(command)
    add_key(command)


def run(options: argparse.Namespace) -> int:
    """Reserve, renew or release."""
    gateway, path = target(options.url, options.key)
    new = options.action == "reserve"
    if bool(options.size) is not new or bool(options.lot) is new:
        raise UsageError("reserve needs --size, renew and release need --lot")
    lifetime_s = int(options.hours * 3600)
    about = {"server": gateway.server, "path": path, "lot": options.lot, "left_bytes": 0, "expires": 0}
    with item(options.json, **about) as facts:
        if options.action == "release":
            release(gateway, options.lot)
            return int(Exit.OK)
        lot = reserve(gateway, options.size, lifetime_s, path) if new else renew(gateway, options.lot, lifetime_s)
        facts.update(lot=lot.number, left_bytes=lot.left_bytes, expires=lot.expires)
        if not options.json:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lot.expires))
            print(f"lot {lot.number}: {size_text(lot.left_bytes)} until {when}")
    return int(Exit.OK)
