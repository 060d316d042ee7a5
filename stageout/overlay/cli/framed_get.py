"""``stageout get`` by frames, the first protocol of routers.

Modules that a plain get does not need are loaded at their use: a file may take less time than the modules.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from stageout.cli.bars import Bar
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.results import item
from stageout.core.errors import ErrorClass
from stageout.overlay.channel import Gateway
from stageout.overlay.cli.arguments import deadline_of
from stageout.overlay.cli.places import place_here
from stageout.overlay.cli.shares import as_json
from stageout.overlay.cli.targets import custodians_of, target
from stageout.overlay.sending import Share, report
from stageout.overlay.settings import congestion_of, connections_of, custodian_of, routes_of

#: Of a file of which nothing is known.
_NOTHING_FETCHED: dict[str, Any] = {"size_bytes": 0, "stale_from": "", "routes": []}


def run(options: argparse.Namespace) -> int:
    """Fetch the file or the directory."""
    gateway, path = target(options.url, options.key)
    gateway = replace(gateway, congestion=congestion_of())
    if options.update and (options.through or not options.recursive):
        raise UsageError(
            "--update is for directories (-r), and compares them with the router's own: not with --through"
        )
    if options.recursive:
        if options.file == "-" or options.through or options.stale_ok:
            raise UsageError("-r fetches from the router into a directory: leave out -, --through and --stale-ok")
        from stageout.overlay.cli.trees import fetch_tree

        return fetch_tree(gateway, path, options, routes_of(options.routes, gateway))
    if options.file == "-":
        return _print(gateway, path, options)
    local = place_here(path, options.file)
    about = {"kind": "file", "local": str(local), "server": gateway.server, "path": path}
    with item(options.json, **about, **_NOTHING_FETCHED) as facts, Bar(local.name, 0, not options.json) as bar:
        facts.update(_fetch(gateway, path, local, options, bar))
    return int(Exit.OK)


def _print(gateway: Gateway, path: str, options: argparse.Namespace) -> int:
    """All of a file to standard output, as it comes."""
    import shutil

    from stageout.overlay.opening import open_file

    if options.json:
        raise UsageError("--json prints on standard output, where the file would go: name one in place of -")
    if options.through or options.stale_ok:  # whoever reads has no way to see that it is another version
        raise UsageError("--through and --stale-ok are for files: name one in place of -")
    with open_file(gateway, path, routes=routes_of(options.routes, gateway)) as file:
        try:
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            raise CommandError(f"standard output: {problem.strerror}", ErrorClass.LOCAL_FILE) from None
    return int(Exit.OK)


def _fetch(gateway: Gateway, path: str, local: Path, options: argparse.Namespace, bar: Bar) -> dict[str, Any]:
    from stageout.overlay.finding import get_found

    received, shares = [0], list[Share]()
    first, most = connections_of(options.connections)

    def sized(size_bytes: int) -> None:
        received[0] = size_bytes
        bar.sized(size_bytes)

    custodians = [custodians_of(one) for one in options.through.split(";")] if options.through else [custodian_of()]
    kept = get_found(
        gateway, custodians, path, local,
        stale_ok=options.stale_ok, progress=bar, sized=sized, routes=routes_of(options.routes, gateway),
        priority=options.priority, deadline=deadline_of(options), connections=first, most_connections=most,
        ended=shares.extend,
    )  # fmt: skip
    bar.end(received[0])
    told = report(shares) if kept is None and (len(shares) > 1 or any(share.reason for share in shares)) else ""
    if told and not options.json:
        print(f"  {told}")
    if kept is not None and not options.json:
        print(f"  not from {gateway.server}: {kept}")
    stale_from = "" if kept is None else kept.custodian.server
    return {"size_bytes": received[0], "stale_from": stale_from, "routes": as_json(shares)}
