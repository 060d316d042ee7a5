"""A job's plugin that hands off the same small file again and again: ``client.py UID SECONDS PLUGIN FILE``.

The product's client code, in one process that does not pay for a new interpreter each time: what is measured is the
manager. Prints the time of each hand-off in ms, the number of refusals, and the processor time that all took in s.
"""

from __future__ import annotations

import hashlib  # noqa: F401
import json
import os
import sys
import time
from pathlib import Path

from stageout.handoff import client, connection, links  # noqa: F401 - all is loaded before this becomes another user


def main() -> None:
    """Hand off for so many seconds."""
    uid, seconds, plugin, path = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    os.chdir(Path(path).parent)
    end_s, cpu_s = time.monotonic() + seconds, time.process_time()
    took_ms: list[float] = []
    refused: list[str] = []
    while time.monotonic() < end_s:
        start_s = time.monotonic()
        answer = client.offer([(f"https://store.example.org/out/{len(took_ms)}", path)], plugin)
        if answer.accepted:
            took_ms.append((time.monotonic() - start_s) * 1000)
        else:
            refused.append(answer.reason)
    used_s = time.process_time() - cpu_s
    print(json.dumps({"ms": took_ms, "refused": len(refused), "reason": refused[:1], "cpu_s": used_s}))


if __name__ == "__main__":
    main()
