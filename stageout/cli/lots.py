"""``stageout lot``: space at a router of the overlay, reserved before there is anything to send."""

from __future__ import annotations

import argparse
import time

from stageout.cli.exits import Exit, UsageError
from stageout.cli.files import target
from stageout.cli.results import item
from stageout.overlay.lots import release, renew, reserve


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
            print(f"lot {lot.number}: {lot.left_bytes} bytes until {when}")
    return int(Exit.OK)
