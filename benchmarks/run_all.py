"""Runs every benchmark, one after the other, and draws the plots: ``run_all.py [--quick] [--out DIR]``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
_NO_BENCHMARKS = {"common", "figures", "run_all", "plot", "web"}


def main() -> int:
    """Run them; 1 when one missed a goal or could not be measured."""
    parser = argparse.ArgumentParser(prog="run_all.py")
    parser.add_argument("--quick", action="store_true", help="each under three minutes")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="directory of figures and plots")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in _NO_BENCHMARKS)
    ends = {name: run(name, given.quick, given.out) for name in names}
    subprocess.run([sys.executable, str(HERE / "plot.py"), str(given.out)], check=True)
    for name, (status, took_s) in ends.items():
        word = {0: "all goals met", 1: "a goal was missed"}.get(status, "could not be measured")
        print(f"bench: {name}: {word} ({took_s:.0f} s)")
    return int(any(status for status, _ in ends.values()))


def run(name: str, quick: bool, out: Path, parts: Sequence[str] = ()) -> tuple[int, float]:
    """Run one benchmark; return its exit status and its seconds.

    :param parts: of a benchmark that has some; all without a list.
    """
    figures = out / f"{name}.json"
    figures.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(figures), *(["--quick"] if quick else [])]
    command += [word for part in parts for word in ("--only", part)]
    return subprocess.run(command, check=False).returncode, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
