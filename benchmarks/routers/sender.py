"""One put, or get, as a process of its own; prints JSON.

``sender.py put|get FILE HOST:PORT KEYFILE ROUTES [CONNECTIONS]``. A line "half" comes when half of the file was sent.
With 0 connections a controller chooses their number.
``sender.py many DIRECTORY HOST:PORT KEYFILE ROUTES`` puts all files below a directory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stageout.core.errors import TransferFailure
from stageout.overlay.cargo import Share, report
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put, put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import read_key
from stageout.overlay.many import below, put_many
from stageout.overlay.packs import SmallPut
from stageout.overlay.settings import connections_of
from stageout.overlay.wire.route import Route, address, parse_routes


def main() -> None:
    """Run it."""
    verb, file, end, key, ways, *further = sys.argv[1:]
    connections, most = connections_of(int(further[0])) if further else (2, 2)
    local, routes = Path(file), parse_routes(ways)
    gateway = Gateway(*address(end), *read_key(Path(key)))
    if verb == "many":
        _many(gateway, local, routes)
        return
    size_bytes = local.stat().st_size
    told = []

    def progress(sent_bytes: int) -> None:
        if not told and sent_bytes >= size_bytes / 2:
            told.append(sent_bytes)
            print("half", flush=True)

    start_s = time.monotonic()
    if verb == "get":
        did: list[Share] = []
        get(gateway, "file", local.with_suffix(".back"), routes=routes, progress=progress, connections=connections,
            most_connections=most, ended=did.extend)  # fmt: skip
        sent_bytes, shares, why = size_bytes, [share.sent_bytes for share in did], report(did)
    else:
        done = put(gateway, local, "file", routes=routes, progress=progress, connections=connections,
                   most_connections=most)  # fmt: skip
        sent_bytes, shares, why = done.sent_bytes, [share.sent_bytes for share in done.shares], report(done.shares)
    print(json.dumps({"took_s": time.monotonic() - start_s, "sent_bytes": sent_bytes, "shares": shares, "why": why}))


def _many(gateway: Gateway, local: Path, routes: Sequence[Route]) -> None:
    failures: list[TransferFailure] = []

    def ended(path: str, result: Put | SmallPut | TransferFailure) -> None:
        if isinstance(result, TransferFailure):
            failures.append(result)

    start_s = time.monotonic()
    put_many(gateway, ((found.path, found.local, f"many/{found.path}") for found in below(local)), ended, routes=routes,
             most_connections=24)  # fmt: skip
    if failures:
        raise failures[0]
    print(json.dumps({"took_s": time.monotonic() - start_s}))


if __name__ == "__main__":
    main()
