"""``stageout put`` by frames, the first protocol of routers.

Modules that a plain put does not need are loaded at their use: a file may take less time than the modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stageout.cli.bars import Bar
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.results import item
from stageout.core.errors import ErrorClass
from stageout.overlay.arrivals import umask
from stageout.overlay.channel import Gateway
from stageout.overlay.cli.arguments import deadline_of
from stageout.overlay.cli.places import given
from stageout.overlay.cli.shares import as_json
from stageout.overlay.cli.targets import check_names, is_directory, name_there, target, through
from stageout.overlay.client import Deposit, put
from stageout.overlay.sending import report
from stageout.overlay.settings import congestion_of, connections_of, routes_of
from stageout.overlay.wire.route import Route

#: Of a file of which nothing is known.
_NOTHING_SENT: dict[str, Any] = {"size_bytes": 0, "sent_bytes": 0, "generation": 0, "routes": [], "custodians": []}


def run(options: argparse.Namespace) -> int:
    """Send the files in order; the first that fails ends the command."""
    gateway, path = target(options.url, options.key)
    gateway = replace(gateway, congestion=congestion_of())
    if options.custody and not options.through:
        raise UsageError("--custody needs --through")
    if options.update and (options.through or not options.recursive):
        raise UsageError(
            "--update is for directories (-r), and compares them with the router's own: not with --through"
        )
    _check_copies(options)
    custodians = (options.through or "").split(";")
    first = through(gateway, custodians[0])[0] if custodians[0] else gateway
    routes = routes_of(options.routes, first)
    if options.recursive and (len(custodians) > 1 or "," in custodians[0] or options.copies > 1):
        raise UsageError("--recursive goes through one custodian")
    if options.lot and (options.recursive or options.through):
        raise UsageError("--lot is for single files that go to the router itself")
    if options.recursive:
        from stageout.overlay.cli.trees import send_trees

        terminal = through(gateway, options.through)[1] if options.through else ""
        return send_trees(gateway, path, options, routes, first, terminal)
    if "-" in options.files and (len(options.files) > 1 or is_directory(path, options.url)):
        raise UsageError("- (standard input) goes alone, to a URL with the file's name at its end")
    names = [name_there(path, options.url, file, len(options.files) > 1) for file in options.files]
    check_names(names)
    for file, name in zip(options.files, names):
        about = {"kind": "file", "local": file, "server": gateway.server, "path": name, **_NOTHING_SENT}
        with item(options.json, **about) as facts, given(file) as local:
            _put(gateway, local, name, options, routes, facts)
    return int(Exit.OK)


def _check_copies(options: argparse.Namespace) -> None:
    if options.copies > 1 and not options.custody:
        raise UsageError("--copies is for --custody: without it you keep the file until it has arrived")
    if options.through and ";" in options.through and not options.custody:
        raise UsageError("several custodians to choose from ('A; B') are for --custody; 'A,B' is the way through both")


def _put(
    gateway: Gateway,
    local: Path,
    path: str,
    options: argparse.Namespace,
    routes: Sequence[Route],
    facts: dict[str, Any],
) -> None:
    try:
        status = local.stat()
    except OSError as problem:
        raise CommandError(f"{local}: {problem.strerror}", ErrorClass.LOCAL_FILE) from None
    if local.is_dir():
        raise UsageError(f"{local} is a directory: put -r sends all that is below it")
    is_gathered = options.files == ["-"]
    mode = _mode_of_new_files() if is_gathered else status.st_mode & 0o777
    facts["size_bytes"] = status.st_size
    with Bar(path.rpartition("/")[2] if is_gathered else local.name, status.st_size, not options.json) as bar:
        facts.update(_send(gateway, local, path, options, routes, mode, bar))


def _mode_of_new_files() -> int:
    """Return the mode of a file sent from standard input: its temporary file is readable for nobody else."""
    return 0o666 & ~umask()


def _send(
    gateway: Gateway, local: Path, path: str, options: argparse.Namespace, routes: Sequence[Route], mode: int, bar: Bar
) -> dict[str, Any]:
    """Send it, and say what became of it; the same for programs."""
    terminal = ""
    first, most = connections_of(options.connections)
    deadline = deadline_of(options)
    if options.custody:
        from stageout.overlay.safekeeping import Custodian, deposit_copies

        custodians = [Custodian(*through(gateway, one)) for one in options.through.split(";")]
        given = deposit_copies(
            custodians, local, path, copies=options.copies, wait_s=options.wait, mode=mode,
            connections=first, most_connections=most, progress=bar, routes=routes, priority=options.priority,
            deadline=deadline,
        )  # fmt: skip
        bar.end(given[0].size_bytes)
        for one in given if not options.json else ():
            print(f"  in custody; what became of it: stageout ask overlay://{one.custodian} {one.origin}")
        return {"outcome": "custody", "custodians": [_custody(one) for one in given], "sent_bytes": _sent(given)}
    if options.through:
        gateway, terminal = through(gateway, options.through)
    done = put(
        gateway, local, path, mode=mode, connections=first, most_connections=most, progress=bar, terminal=terminal,
        routes=routes, lot=options.lot, priority=options.priority, deadline=deadline,
    )  # fmt: skip
    bar.end(done.size_bytes)
    if not options.json and (len(routes) > 1 or any(share.reason for share in done.shares)):
        print(f"  {report(done.shares)}")
    return {
        "size_bytes": done.size_bytes, "sent_bytes": done.sent_bytes, "generation": done.generation,
        "routes": as_json(done.shares),
    }  # fmt: skip


def _custody(given: Deposit) -> dict[str, Any]:
    """Return the operation for a later `ask`, and when it expires."""
    return {"custodian": given.custodian, "origin": given.origin, "number": given.seq, "expires": given.expires}


def _sent(given: Sequence[Deposit]) -> int:
    return sum(one.sent_bytes for one in given)
