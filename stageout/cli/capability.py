"""``stageout capability``: makes a capability, as the line that its holder adds to a key file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from stageout.cli.exits import Exit, UsageError
from stageout.core.signing import load_or_make_key, new_key
from stageout.wire.capability import issue

_DAY_S = 86400


def run(options: argparse.Namespace) -> int:
    """Print the issuer's public key, or a capability with the private key of its holder."""
    if options.priority < 0:
        raise UsageError("--priority is a number from 0 on")
    issuer = load_or_make_key("capability-key", Path(options.issuer))
    if options.public:
        print(issuer.public)
        return int(Exit.OK)
    if not options.terminal:
        raise UsageError("--terminal is missing: name the router where the capability shall hold, as its URLs do")
    holder = new_key()  # of its own: what is signed with it carries no other capability
    rights = ("write", *(["delete"] if options.delete else []), *(["read"] if options.read else []))
    expires = int(time.time() + options.days * _DAY_S)
    text = issue(
        issuer, holder.public, options.prefix, rights, expires, options.lot, options.priority, tuple(options.terminal)
    )
    print(f"capability {text} {holder.private}")
    return int(Exit.OK)
