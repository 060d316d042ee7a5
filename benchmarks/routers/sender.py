"""One put, or get, as a process of its own; prints JSON.

``sender.py put|get FILE HOST:PORT KEYFILE ROUTES [CONNECTIONS]``. A line "half" comes when half of the file was sent.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from stageout.overlay.channel import Gateway, read_key
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.wire.route import address, parse_routes


def main() -> None:
    """Run it."""
    verb, file, end, key, ways, *further = sys.argv[1:]
    connections = int(further[0]) if further else 2
    local, routes = Path(file), parse_routes(ways)
    gateway = Gateway(*address(end), *read_key(Path(key)))
    size_bytes = local.stat().st_size
    told = []

    def progress(sent_bytes: int) -> None:
        if not told and sent_bytes >= size_bytes / 2:
            told.append(sent_bytes)
            print("half", flush=True)

    start_s = time.monotonic()
    if verb == "get":
        get(gateway, "file", local.with_suffix(".back"), routes=routes)
        sent_bytes, shares = size_bytes, [size_bytes]
    else:
        done = put(gateway, local, "file", routes=routes, progress=progress, connections=connections)
        sent_bytes, shares = done.sent_bytes, [share.sent_bytes for share in done.shares]
    print(json.dumps({"took_s": time.monotonic() - start_s, "sent_bytes": sent_bytes, "shares": shares}))


if __name__ == "__main__":
    main()
