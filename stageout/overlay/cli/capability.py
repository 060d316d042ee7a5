"""``stageout capability``: makes a capability, as the line that its holder adds to a key file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from stageout.cli.arguments import add_json, size
from stageout.cli.exits import Exit, UsageError
from stageout.cli.results import tell
from stageout.core.signing import load_or_make_key, new_key
from stageout.overlay.wire.capability import issue
from stageout.overlay.wire.route import address, written

_DAY_S = 86400

DESCRIPTION = """\
Make a capability: permissions, for a time, at routers of the overlay that trust its issuer. The command prints the line
to add to the holder's key file (--key of put). The line holds a secret. If the issuer's key is missing, it is made.
Add the public key, which --public prints, to the file STAGEOUT_ROUTER_ISSUERS of the routers.

exit status: 0 made, 1 the key cannot be used, 64 the command line cannot be used"""


def _days(text: str) -> float:
    value = float(text)
    if not 0 < value <= 36500:
        raise ValueError
    return value


_days.__name__ = "number of days"


def _router(text: str) -> str:
    return written(*address(text))


_router.__name__ = "address of a router"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("issuer", metavar="KEYFILE", help="private key of the issuer")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--public", action="store_true", help="print the issuer's public key")
    what.add_argument("--prefix", metavar="PATH", help="path to which the capability is limited; / for all")
    command.add_argument(
        "--terminal", metavar="HOST", type=_router, action="append", default=[],
        help="router that accepts the capability: HOST or HOST:PORT as in its STAGEOUT_ROUTER_ADDRESS; repeatable",
    )  # fmt: skip
    command.add_argument("--delete", action="store_true", help="permit to delete and rename")
    command.add_argument("--read", action="store_true", help="permit to get, stat and list")
    command.add_argument("--lot", metavar="SIZE", type=size, default=0, help="largest number of bytes under way")
    command.add_argument("--priority", metavar="N", type=int, default=0, help="highest priority (default: 0)")
    command.add_argument(
        "--days", metavar="N", type=_days, default=30.0, help="days until the capability expires (default: 30)"
    )
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Print the issuer's public key, or a capability with the private key of its holder."""
    if options.priority < 0:
        raise UsageError("--priority is a number from 0 on")
    issuer = load_or_make_key("capability-key", Path(options.issuer))
    if options.public:
        _print({"public": issuer.public}, issuer.public, options.json)
        return int(Exit.OK)
    if not options.terminal:
        raise UsageError("--terminal is missing: name the router where the capability shall hold, as its URLs do")
    holder = new_key()  # of its own: what is signed with it carries no other capability
    rights = ("write", *(["delete"] if options.delete else []), *(["read"] if options.read else []))
    expires = int(time.time() + options.days * _DAY_S)
    text = issue(
        issuer, holder.public, options.prefix, rights, expires, options.lot, options.priority, tuple(options.terminal)
    )
    line = f"capability {text} {holder.private}"
    _print({"public": issuer.public, "line": line, "expires": expires}, line, options.json)
    return int(Exit.OK)


def _print(facts: dict[str, Any], line: str, is_json: bool) -> None:
    if is_json:
        tell(facts)
    else:
        print(line)
