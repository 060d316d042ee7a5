"""One put (or get) with a priority, and a controller of its connections, as a process that says how far it is.

``flow.py put|get FILE NAME HOST:PORT KEYFILE ROUTES FIRST[-MOST] PRIORITY``; CONGESTION in the environment. Lines of
JSON: monotonic time and bytes moved so far, about ten a second; the last one has ``took_s`` and what each route of a
put did.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from stageout.core import log
from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import read_key
from stageout.overlay.sending import report
from stageout.overlay.wire.route import address, parse_routes

_SAY_S = 0.1


def main() -> None:
    """Run it."""
    verb, file, name, end, key, ways, connections, priority = sys.argv[1:]
    if "-" in connections:
        log.open_log(None)
    said_s = [0.0]

    def progress(moved_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - said_s[0] >= _SAY_S:
            said_s[0] = now_s
            print(json.dumps({"at_s": now_s, "moved_bytes": moved_bytes}), flush=True)

    gateway = Gateway(*address(end), *read_key(Path(key)), congestion=os.environ.get("CONGESTION", ""))
    first, _, most = connections.partition("-")
    start_s = time.monotonic()
    if verb == "get":
        get(
            gateway, name, Path(file), routes=parse_routes(ways), progress=progress, priority=int(priority),
            connections=int(first), most_connections=int(most or 0),
        )  # fmt: skip
        print(json.dumps({"took_s": time.monotonic() - start_s}))
        return
    done = put(
        gateway, Path(file), name, routes=parse_routes(ways), progress=progress, connections=int(first),
        most_connections=int(most or 0), priority=int(priority),
    )  # fmt: skip
    took_s = time.monotonic() - start_s
    used = [share.connections for share in done.shares]
    print(json.dumps({"took_s": took_s, "connections": used, "shares": report(done.shares)}))


if __name__ == "__main__":
    main()
