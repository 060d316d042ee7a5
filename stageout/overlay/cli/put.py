"""``stageout put``: files to a router of the overlay.

This module has the command line only. The modules of the protocol that a URL needs are loaded at their use: a small
file takes less time than they do.
"""

from __future__ import annotations

import argparse

from stageout.cli.arguments import add_json, seconds, whole
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
Send files to a router of the overlay. A file appears under its name only when it is complete, verified by its digest
and on the router's disk. Missing directories are made. With several FILEs, or a / at its end, URL is a directory. With
-r small files are sent in packs, and a file that fails does not stop the others.

exit status: 0 all files arrived, 1 a file failed (later files were not sent), 64 the URL cannot be used"""

_copies = whole("number of copies (1 to 8)", 1, 8)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("files", metavar="FILE", nargs="+", help="file to send; - for standard input")
    command.add_argument("url", metavar="URL", help=URL)
    command.add_argument("-r", "--recursive", action="store_true", help="send all files below the directories FILE")
    add_update(command)
    command.add_argument("--lot", metavar="ID", default="", help="use the space of this lot (stageout lot)")
    add_connections(command)
    add_wishes(command)
    command.add_argument(
        "--through",
        metavar="HOST",
        help="custodian that delivers the file, or a chain A,B; the command waits for the delivery",
    )
    command.add_argument(
        "--custody",
        action="store_true",
        help="with --through: return when the custodian holds the file; of 'A; B' the first one",
    )
    command.add_argument(
        "--copies",
        metavar="N",
        type=_copies,
        default=1,
        help="with --custody: return when N of 'A; B; C' hold the file",
    )
    command.add_argument(
        "--wait",
        metavar="S",
        type=seconds,
        default=0.0,
        help="with --custody: seconds to wait for further custodians if too few answer",
    )
    add_json(command)
    add_key(command)
    add_http(command)
    add_routes(command)


def run(options: argparse.Namespace) -> int:
    """Send the files in order; the first that fails ends the command."""
    from stageout.overlay.cli.choosing import is_http

    if is_http(options.url, options):
        from stageout.overlay.cli import http_put

        return http_put.run(options)
    from stageout.overlay.cli import framed_put

    return framed_put.run(options)
