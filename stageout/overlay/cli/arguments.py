"""Arguments that several commands of the overlay take, and readers of their values."""

from __future__ import annotations

import argparse
import time

from stageout.cli.arguments import seconds, streams, whole

URL = "overlay://HOST[:PORT]/path"
#: End of the description of each command for names.
STATUS = """

exit status: 0 done, 1 not done, 64 a URL cannot be used"""
_priority = whole("priority (0 to 10)", 0, 10)


def add_key(command: argparse.ArgumentParser) -> None:
    """Add the file with the user's key."""
    command.add_argument(
        "--key", metavar="FILE", default="/etc/condor/stageout-overlay.key",
        help="file with your key for the router: NAME SECRET, or a token of HTCondor (default: %(default)s)",
    )  # fmt: skip


def add_http(command: argparse.ArgumentParser) -> None:
    """Add what requests by HTTP need."""
    command.add_argument(
        "--user", metavar="NAME", default="",
        help="with https:// and a key of 'stageout token': name of its line at the router (default: your login name)",
    )  # fmt: skip
    command.add_argument(
        "--token", metavar="FILE", default="",
        help="with https://: file with a bearer token, in place of a key (default: BEARER_TOKEN_FILE)",
    )  # fmt: skip
    command.add_argument(
        "--cacert", metavar="FILE", default="", help="with https://: certificates of the CA, or of the router itself"
    )
    command.add_argument(
        "--pin", metavar="KEY", default="", help="with https://: public key of the router, sha256//BASE64, as of curl"
    )


def add_routes(command: argparse.ArgumentParser) -> None:
    """Add the routes to the router."""
    command.add_argument(
        "--routes", metavar="ROUTES", default="",
        help="relays: 'A; B,C; direct' are three routes (put uses all together), 'ask A' the routes that A "
        "knows (default: STAGEOUT_OVERLAY_ROUTES)",
    )  # fmt: skip


def add_update(command: argparse.ArgumentParser) -> None:
    """Add ``--update``."""
    command.add_argument(
        "-u", "--update", action="store_true", help="with -r: only files that differ from those at the other end"
    )


def add_custodian(command: argparse.ArgumentParser) -> None:
    """Add a custodian that passes a change of names on."""
    command.add_argument(
        "--through", metavar="HOST", help="custodian that forwards the request; --routes then lead to the custodian"
    )


def add_wishes(command: argparse.ArgumentParser) -> None:
    """Add priority and wished time of arrival; :func:`deadline_of` reads that."""
    command.add_argument(
        "--priority", metavar="N", type=_priority, default=0, help="priority from 0 to 10; each step doubles the share"
    )
    command.add_argument(
        "--within", metavar="S", type=seconds, default=0, help="seconds in which the transfer should end"
    )


def deadline_of(options: argparse.Namespace) -> int:
    """Return the wished time of arrival as Unix time; 0 for no wish."""
    return int(time.time() + options.within) if options.within else 0


def add_connections(command: argparse.ArgumentParser) -> None:
    """Add the number of connections for one file."""
    command.add_argument(
        "--connections", metavar="N", type=_connections, default=0,
        help="connections for one file on each route (default: auto, at most STAGEOUT_OVERLAY_CONNECTIONS)",
    )  # fmt: skip


def _connections(text: str) -> int:
    return 0 if text == "auto" else streams(text)


_connections.__name__ = "number of connections (1 to 64, or auto)"
