"""One large file through a custodian, everything on one disk, beside ``cp`` and its fdatasync."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import Figure

from stageout.core.errors import StageoutError
from stageout.testing.router import RouterProcess, custodian_for

_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def figures(quick: bool, folder: Path) -> list[Figure]:
    """Rates of a put that ends when the terminal has the file; what the custodian's processes cost."""
    source, size_bytes = folder / "source", (256 if quick else 1024) * _MIB
    with source.open("wb") as file:
        for _ in range(size_bytes // _MIB):
            file.write(os.urandom(_MIB))
        os.fsync(file.fileno())
    with RouterProcess(folder / "end") as end, custodian_for(folder / "custodian", [end]) as custodian:
        shares, costs, rates = [], [], []
        for number in range(3 if quick else 6):
            spent_s = _tree_s(custodian.pid)
            put_s = _put(source, end, custodian)
            cost = (_tree_s(custodian.pid) - spent_s) / size_bytes * 1e9
            cp_s = _timed(["sh", "-c", 'cp "$0" "$1" && sync -d "$1"', str(source), str(folder / "copy")])
            for path in (end.root / "file", folder / "copy"):
                path.unlink()
            subprocess.run(["sync"], check=True)
            if number:  # the first round warms up
                shares.append(cp_s / put_s)
                costs.append(cost)
                rates.append(size_bytes / put_s / 1e6)
    return [
        Figure("through a custodian, one disk, of cp + fdatasync", statistics.median(shares), "ratio", goal=0.9,
               more=True),
        Figure("through a custodian, one disk", statistics.median(rates), "MB/s"),
        Figure("custodian's processor time", statistics.median(costs), "s/GB", goal=1.2),
    ]  # fmt: skip


def _put(source: Path, end: RouterProcess, custodian: RouterProcess) -> float:
    """``stageout put --through``: on return the file has its name, and is on the disk, at the terminal."""
    url = f"overlay://{end.address}/file"
    command = [sys.executable, "-m", "stageout.cli.main", "put", str(source), url, "--through", custodian.address]
    return _timed([*command, "--key", str(custodian.key_file("site"))])


def _timed(command: list[str]) -> float:
    start_s = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise StageoutError(f"{command} ended with {done.returncode}: {done.stderr[:300]}")
    return time.monotonic() - start_s


def _tree_s(pid: int) -> float:
    """Seconds of the processor of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0.0
    for one in [str(pid), *children]:
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return total
