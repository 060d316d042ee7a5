"""Directories of files of 4 KiB to 8 MiB to a router, in files a second.

Each is sent in packs, and beside it, in turn, with packs that take files of 64 KiB at most, as those for custodians do,
or files of 1 MiB at most, as a router with many connections asks for: larger ones then leave by themselves. Ratios are
of one round.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import Figure, main

from stageout.core.errors import StageoutError, TransferFailure
from stageout.overlay import packs
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put
from stageout.overlay.key_file import read_key
from stageout.overlay.many import below, put_many
from stageout.overlay.packs import SmallPut
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_PACK_BYTES, MAX_TAKEN_BYTES
from tests.harness.router import RouterProcess

#: Size, and how many files of it are sent; fewer of those that are slow by themselves.
SIZES = {
    4096: 2000, MAX_FILE_BYTES + 1: 200, 100 * 1024: 200, MAX_PACK_BYTES: 100, MAX_PACK_BYTES + 1: 100,
    2 * MAX_PACK_BYTES: 50, MAX_TAKEN_BYTES: 24, MAX_TAKEN_BYTES + 1: 24, 2 * MAX_TAKEN_BYTES: 12,
}  # fmt: skip
#: Up to just more than 1 MiB. Of larger ones their bytes take the time.
GOAL_RATIO = 2.0


def files_per_s(gateway: Gateway, source: Path, into: str, most_bytes: int) -> float:
    """Send a directory. :param most_bytes: of a file in a pack."""
    ended: list[Put | SmallPut | TransferFailure] = []
    packs.MAX_TAKEN_BYTES = most_bytes
    start_s = time.perf_counter()
    put_many(
        gateway,
        [(one.path, one.local, f"{into}/{one.path}") for one in below(source)],
        lambda key, end: ended.append(end),
    )
    took_s = time.perf_counter() - start_s
    for end in ended:
        if isinstance(end, TransferFailure):
            raise StageoutError(f"a file did not arrive: {end}")
    return len(ended) / took_s


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="stageout-bench-") as name, RouterProcess(Path(name) / "router") as router:
        gateway = Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")))
        for size_bytes, files in SIZES.items():
            source = Path(name) / "source"
            source.mkdir()
            for number in range(files):
                (source / f"file{number:04}").write_bytes(os.urandom(size_bytes))
            fewer_bytes = MAX_PACK_BYTES if size_bytes > MAX_PACK_BYTES else MAX_FILE_BYTES
            rounds = []
            for number in range(3 if quick else 7):
                rates = {}
                for most_bytes in (MAX_TAKEN_BYTES, fewer_bytes)[:: 1 if number % 2 else -1]:
                    rates[most_bytes] = files_per_s(gateway, source, f"{number}", most_bytes)
                    shutil.rmtree(router.root / f"{number}")
                rounds.append(rates)
            shutil.rmtree(source)
            packed, single = (statistics.median(one[most] for one in rounds) for most in (MAX_TAKEN_BYTES, fewer_bytes))
            what = f"files of {size_bytes} bytes"
            fewer = f"packs of files up to {fewer_bytes // 1024} KiB"
            figures.append(Figure(what, packed, "files/s", fewer, single, more=True))
            if size_bytes > MAX_FILE_BYTES:
                ratio = statistics.median(one[MAX_TAKEN_BYTES] / one[fewer_bytes] for one in rounds)
                goal = GOAL_RATIO if size_bytes <= MAX_PACK_BYTES + 1 else None
                figures.append(Figure(f"{what}: ratio", ratio, "", goal=goal, more=True))
    return figures


if __name__ == "__main__":
    sys.exit(main("overlay_sizes", measure))
