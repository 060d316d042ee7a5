"""The cost of reserved space: a put out of a lot beside the same put without one, and reserving and releasing.

NeST's authors found that their lots cost 30 % of the write rate. Ours allocate the space; a put then cuts what it needs
off the lot. One lot may serve many puts, so reserving and releasing stand apart.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import Figure, main, median_noise

from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.key_file import read_key
from stageout.overlay.lots import release, renew, reserve
from stageout.overlay.operations import Session
from tests.harness.router import RouterProcess

SIZE_BYTES = 512 << 20
GOAL_COST = 0.03


def put_s(gateway: Gateway, source: Path, lot: str) -> float:
    """Wall time of one put to the disk; the file is removed afterwards."""
    os.sync()
    start_s = time.perf_counter()
    put(gateway, source, "file", lot=lot)
    took_s = time.perf_counter() - start_s
    with Session(gateway) as session:
        session.delete("file")
        session.push()
    return took_s


def pair(gateway: Gateway, source: Path, lot_first: bool) -> tuple[float, ...]:
    """Seconds of a put with a lot, of one without, and of reserving that lot, of renewing and of releasing it."""
    times_s: dict[bool, float] = {}
    for with_lot in (lot_first, not lot_first):
        if not with_lot:
            times_s[False] = put_s(gateway, source, "")
            continue
        marks_s = [time.perf_counter()]
        lot = reserve(gateway, 2 * SIZE_BYTES, 3600)
        marks_s.append(time.perf_counter())
        renew(gateway, lot.number, 3600)
        marks_s.append(time.perf_counter())
        times_s[True] = put_s(gateway, source, lot.number)
        start_s = time.perf_counter()
        release(gateway, lot.number)
        released_s = time.perf_counter() - start_s
    return times_s[True], times_s[False], marks_s[1] - marks_s[0], marks_s[2] - marks_s[1], released_s


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    with tempfile.TemporaryDirectory(prefix="stageout-bench-") as name, RouterProcess(Path(name) / "router") as router:
        source = Path(name) / "source"
        source.write_bytes(os.urandom(1 << 20) * (SIZE_BYTES >> 20))
        gateway = Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")))
        put_s(gateway, source, "")
        pairs = [pair(gateway, source, bool(number % 2)) for number in range(5 if quick else 21)]
    rates = [statistics.median(SIZE_BYTES / one[which] / 1e6 for one in pairs) for which in (0, 1)]
    costs = [one[0] / one[1] - 1 for one in pairs]
    steps_s = [statistics.median(one[which] for one in pairs) for which in (2, 3, 4)]
    return [
        Figure("put of 512 MiB to the disk out of a lot", rates[0], "MB/s", "without a lot", rates[1], more=True),
        Figure(
            "cost of the lot, median of pairs", statistics.median(costs), "", goal=GOAL_COST, noise=median_noise(costs)
        ),
        *(
            Figure(f"{what}, with its connection", took_s, "s")
            for what, took_s in zip(("reserve 1 GiB", "renew it", "release what is left"), steps_s)
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("overlay_lots", measure))
