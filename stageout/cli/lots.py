"""``stageout lot``: space at a router of the overlay, reserved before there is anything to send."""

from __future__ import annotations

import argparse
import time

from stageout.cli.bars import complain
from stageout.cli.exits import Exit, UsageError
from stageout.cli.files import target
from stageout.core.errors import TransferFailure
from stageout.overlay.lots import Lot, release, renew, reserve


def run(options: argparse.Namespace) -> int:
    """Reserve, renew or release."""
    gateway, path = target(options.url, options.key)
    new = options.action == "reserve"
    if bool(options.size) is not new or bool(options.lot) is new:
        raise UsageError("reserve needs --size, renew and release need --lot")
    lifetime_s = int(options.hours * 3600)
    try:
        if new:
            _show(reserve(gateway, options.size, lifetime_s, path))
        elif options.action == "renew":
            _show(renew(gateway, options.lot, lifetime_s))
        else:
            release(gateway, options.lot)
    except TransferFailure as failure:
        complain(failure)
        return int(Exit.FAILED)
    return int(Exit.OK)


def _show(lot: Lot) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lot.expires))
    print(f"lot {lot.number}: {lot.left_bytes} bytes until {when}")
