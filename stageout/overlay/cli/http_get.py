"""``stageout get`` by HTTP."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from stageout.cli.bars import Bar
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.results import item
from stageout.core.errors import ErrorClass
from stageout.overlay.cli.choosing import Target, target
from stageout.overlay.cli.http_put import as_json, show_routes
from stageout.overlay.cli.places import place_here
from stageout.overlay.transfer.download import get

#: Of a file of which nothing is known.
_NOTHING_FETCHED: dict[str, Any] = {"size_bytes": 0, "stale_from": "", "routes": []}


def run(options: argparse.Namespace) -> int:
    """Fetch the file or the directory."""
    source = target(options.url, options)
    if options.update and not options.recursive:
        raise UsageError("--update is for directories (-r)")
    if options.through or options.stale_ok:
        raise UsageError("--through and --stale-ok are for overlay:// URLs")
    if options.recursive:
        if options.file == "-":
            raise UsageError("-r fetches into a directory: leave out -")
        from stageout.overlay.cli.http_trees import fetch_tree

        return fetch_tree(source, options)
    if options.file == "-":
        return _print(source, options)
    local = place_here(source.path, options.file)
    about = {"kind": "file", "local": str(local), "server": source.server, "path": source.path}
    with item(options.json, **about, **_NOTHING_FETCHED) as facts, Bar(local.name, 0, not options.json) as bar:
        got = get(
            source.place, source.identity, source.path, local, routes=source.routes, first=source.first,
            most=source.most, progress=bar, sized=bar.sized,
        )  # fmt: skip
        bar.end(got.size_bytes)
        show_routes(got.shares, options)
        facts.update(size_bytes=got.size_bytes, routes=as_json(got.shares))
    return int(Exit.OK)


def _print(source: Target, options: argparse.Namespace) -> int:
    """All of a file to standard output, when it has come: nobody reads what turns out to be damaged."""
    import shutil
    import tempfile
    from pathlib import Path

    if options.json:
        raise UsageError("--json prints on standard output, where the file would go: name one in place of -")
    with tempfile.TemporaryDirectory(prefix="stageout-") as folder:
        local = Path(folder) / "file"
        get(
            source.place,
            source.identity,
            source.path,
            local,
            routes=source.routes,
            first=source.first,
            most=source.most,
        )
        try:
            with open(local, "rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            raise CommandError(f"standard output: {problem.strerror}", ErrorClass.LOCAL_FILE) from None
    return int(Exit.OK)
