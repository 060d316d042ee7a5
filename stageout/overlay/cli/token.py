"""``stageout token``: makes a token for HTTP requests at a router."""

from __future__ import annotations

import argparse
import re
import secrets
import time
from base64 import urlsafe_b64decode
from pathlib import Path

from stageout.cli.arguments import add_json
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.results import tell
from stageout.core.signing import load_or_make_key
from stageout.overlay.http.claims import MOST_OWN_S, MOST_RELAY_S, MOST_S, RELAY
from stageout.overlay.wire.route import address, written

_MINUTES = 15
_PUBLIC = re.compile("ed25519:[A-Za-z0-9_-]{43}")

DESCRIPTION = """\
Make a token for HTTP requests at a router, signed with your key, and print it. If the key is missing, it is made. The
administrator of the router adds the line 'USER KEY PREFIX', with the key that --public prints, to the file
STAGEOUT_ROUTER_KEYS. A token without --scope has all rights below that prefix, and lasts at most 15 minutes. A token
with scopes lasts at most 7 days: storage.read:PATH, storage.create:PATH, storage.modify:PATH, relay. With --relay-to
the token lets one connection through the router to HOST:PORT, and lasts one minute. With --holder the token is for
another key: its owner uses it with stageout put --token and --key.

exit status: 0 made, 1 the key cannot be used, 64 the command line cannot be used"""


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= MOST_S / 60:
        raise ValueError
    return value


def _address(text: str) -> str:
    return written(*address(text))


_address.__name__ = "HOST:PORT"
_minutes.__name__ = "number of minutes"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("key", metavar="KEYFILE", help="your private key")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--public", action="store_true", help="print the public key")
    what.add_argument(
        "--router", metavar="NAME", action="append", help="router: the host of its STAGEOUT_ROUTER_ADDRESS; repeatable"
    )
    command.add_argument("--user", metavar="NAME", default="", help="name of your line in the router's keys file")
    command.add_argument("--scope", metavar="SCOPE", action="append", default=[], help="scope of the token; repeatable")
    command.add_argument(
        "--holder", metavar="PUBLIC",
        help="bind the token to this public key: it counts only together with the private one",
    )  # fmt: skip
    command.add_argument(
        "--relay-to", metavar="HOST:PORT", type=_address, help="go through the router to this one, once"
    )
    command.add_argument(
        "--minutes", metavar="N", type=_minutes, default=float(_MINUTES),
        help=f"minutes until the token expires (default: {_MINUTES})",
    )  # fmt: skip
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Print the public key, or a token."""
    key = load_or_make_key("token-key", Path(options.key))
    if options.public:
        facts, line = {"public": key.public}, key.public
    elif not options.user:
        raise UsageError("--user is missing: name the line of the router's keys file that has your key")
    elif options.holder and not _PUBLIC.fullmatch(options.holder):
        raise UsageError("--holder is a public key, as --public prints it")
    elif options.relay_to and (options.scope or options.holder or len(options.router) > 1):
        raise UsageError("--relay-to goes without --scope and --holder, and with one --router")
    elif not options.scope and options.minutes > MOST_OWN_S / 60:
        raise UsageError(f"a token without --scope lasts at most {MOST_OWN_S // 60} minutes")
    else:
        line = _token(key.private, options)
        facts = {"token": line}
    if options.json:
        tell(facts)
    else:
        print(line)
    return int(Exit.OK)


def _token(private: str, options: argparse.Namespace) -> str:
    try:
        import jwt
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise CommandError("a token needs the Python package PyJWT: pip install 'stageout[overlay]'") from None
    now = int(time.time())
    ends = now + int(options.minutes * 60)
    routers = options.router if len(options.router) > 1 else options.router[0]
    claims = {"iss": options.user, "sub": options.user, "aud": routers, "iat": now, "nbf": now, "exp": ends}
    if options.holder:
        claims["cnf"] = {"jwk": {"kty": "OKP", "crv": "Ed25519", "x": options.holder.partition(":")[2]}}
    if options.relay_to:  # to parts of a second: a router refuses what was made before it started
        claims = {**claims, "iat": time.time(), "exp": now + MOST_RELAY_S, "jti": secrets.token_hex(16)}
        claims["scope"] = f"{RELAY}:{options.relay_to}"
    elif options.scope:
        claims["scope"] = " ".join(options.scope)
    key = Ed25519PrivateKey.from_private_bytes(urlsafe_b64decode(private + "=" * (-len(private) % 4)))
    return jwt.encode(claims, key, "EdDSA")
