"""One report of the published headlines, measured again: ``figures.py [--quick] [--reuse HOURS] [--out DIR]``.

Runs the benchmarks that the headlines need (:mod:`published.headlines`) and writes one HTML file, which needs no other
file. A figure that no benchmark measures, or whose benchmark failed, is shown as not measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import common  # noqa: F401 - finds the tests' harness
from published.headlines import HEADLINES, PROGRAMS
from published.measured import path_of, read_figures, read_timeline
from published.page import page
from run_all import run

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Measure and write the report; 1 when a program could not be measured."""
    given = _parser().parse_args()
    folder = given.out / ("quick" if given.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [] if given.no_run else given.only or list(PROGRAMS)
    failed = [
        name
        for name in wanted
        if not _young(path_of(folder, name), given.reuse) and not _ran(name, given.quick, folder)
    ]
    report = given.page or folder / "figures.html"
    report.write_text(_report(folder, given.quick, given.note))
    for name in failed:
        print(f"figures: {name}: could not be measured", file=sys.stderr)
    print(f"figures: {report}")
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="figures.py")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs, a quarter of an hour in all")
    parser.add_argument("--reuse", type=float, default=0.0, metavar="HOURS", help="keep figures younger than this")
    parser.add_argument("--only", action="append", choices=list(PROGRAMS), help="run this program; keep other figures")
    parser.add_argument("--no-run", action="store_true", help="run nothing; write the report of the figures that exist")
    parser.add_argument("--out", type=Path, default=Path("out/figures"), help="directory of figures and report")
    parser.add_argument("--page", type=Path, help="write the report to this file")
    parser.add_argument("--note", default="", help="a sentence for the head of the report")
    return parser


def _young(path: Path, hours: float) -> bool:
    return path.exists() and time.time() - path.stat().st_mtime < hours * 3600


def _ran(name: str, quick: bool, folder: Path) -> bool:
    """Run a program; True when it left figures."""
    if name != "demo":
        run(name, quick, folder, PROGRAMS[name])
        return path_of(folder, name).exists()
    path_of(folder, name).unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.harness.demo", "--out", str((folder / "demo").resolve())]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    return path_of(folder, name).exists()


def _report(folder: Path, quick: bool, note: str) -> str:
    figures, machine = read_figures(folder, PROGRAMS)
    measured = [path_of(folder, name).stat().st_mtime for name in figures]
    day = time.strftime("%Y-%m-%d", time.gmtime(max(measured))) if measured else "never"
    kind = "A quick run: few and small rounds." if quick else "A full run."
    facts = [
        f"Measured on {day}. {kind} {note}".strip(),
        f"Machine: {machine or 'unknown'}. Clients, servers and HTCondor run together on it. Links over a distance are "
        "emulated: real TCP between network namespaces, with a process between them that delays and paces packets.",
        "The published figures are of machines and networks of their time. Each section says which of them compare.",
    ]
    return page(HEADLINES, figures, read_timeline(folder), folder, facts)


if __name__ == "__main__":
    sys.exit(main())
