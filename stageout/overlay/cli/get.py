"""``stageout get``: a file, or a directory, from a router of the overlay.

This module has the command line only. The modules of the protocol that a URL needs are loaded at their use: a small
file takes less time than they do.
"""

from __future__ import annotations

import argparse

from stageout.cli.arguments import add_json
from stageout.overlay.cli.arguments import (
    URL,
    add_connections,
    add_http,
    add_key,
    add_routes,
    add_update,
    add_wishes,
)

DESCRIPTION = """\
Fetch a file from a router of the overlay. It appears under its name only when it is complete. With -r all files below a
directory are fetched. A file that fails does not stop the others, and symbolic links count as failed.

exit status: 0 fetched, 1 not fetched, 64 the URL cannot be used"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("url", metavar="URL", help=URL)
    command.add_argument(
        "file", metavar="FILE", nargs="?",
        help="file to replace or directory to write into; - for standard output (default: the file's name, here)",
    )  # fmt: skip
    command.add_argument("-r", "--recursive", action="store_true", help="fetch a directory with all files below it")
    add_update(command)
    add_connections(command)
    command.add_argument(
        "--through", metavar="HOSTS", help="custodians ('A; B') to ask when the router has no such file"
    )
    command.add_argument(
        "--stale-ok", action="store_true", help="with --through: accept a version that is not delivered yet"
    )
    add_wishes(command)
    add_json(command)
    add_key(command)
    add_http(command)
    add_routes(command)


def run(options: argparse.Namespace) -> int:
    """Fetch the file or the directory."""
    from stageout.overlay.cli.choosing import is_http

    if is_http(options.url, options):
        from stageout.overlay.cli import http_get

        return http_get.run(options)
    from stageout.overlay.cli import framed_get

    return framed_get.run(options)
