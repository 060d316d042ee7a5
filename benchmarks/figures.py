"""One report of the published headlines, measured again: ``figures.py [--quick] [--reuse HOURS] [--out DIR]``.

Runs the programs behind the headlines (:mod:`published.programs`), those that mostly wait two at a time, and writes one
HTML file, which needs no other file. A figure that could not be measured is shown with the reason.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import common  # noqa: F401 - finds the tests' harness
from published.headlines import HEADLINES
from published.measured import path_of, read_figures, read_timeline
from published.page import page
from published.programs import PROGRAMS, needed
from published.runs import Ran, Runner, clock, read_runs
from published.schedule import plan, total_s


def main() -> int:
    """Measure and write the report; 1 when a program could not be measured."""
    given = _parser().parse_args()
    folder = (given.out / ("quick" if given.quick else "full")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [] if given.no_run else given.only or needed(given.quick)
    ran = _run(folder, [name for name in wanted if not _young(path_of(folder, name), given.reuse)], given.quick)
    report = given.page or folder / "figures.html"
    report.write_text(_report(folder, given.quick, given.note))
    for name in failed(ran):
        _say(f"{name}: not measured: {ran[name].reason}; see {folder / name}.log", sys.stderr)
    _say(str(report))
    return int(bool(failed(ran)))


def failed(ran: Mapping[str, Ran]) -> list[str]:
    """Return the programs that left no figures."""
    return [name for name, one in ran.items() if one.reason]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="figures.py")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs, ten minutes in all")
    parser.add_argument("--reuse", type=float, default=0.0, metavar="HOURS", help="keep figures younger than this")
    parser.add_argument("--only", action="append", choices=list(PROGRAMS), help="run this program; keep other figures")
    parser.add_argument("--no-run", action="store_true", help="run nothing; write the report of the figures that exist")
    parser.add_argument("--out", type=Path, default=Path("out/figures"), help="directory of figures and report")
    parser.add_argument("--page", type=Path, help="write the report to this file")
    parser.add_argument("--note", default="", help="a sentence for the head of the report")
    return parser


def _young(path: Path, hours: float) -> bool:
    return path.exists() and time.time() - path.stat().st_mtime < hours * 3600


def _run(folder: Path, names: list[str], quick: bool) -> dict[str, Ran]:
    if not names:
        return {}
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # either one stops what runs
    expected_s = total_s(plan([PROGRAMS[name].job(name, quick) for name in names]))
    _say(f"{len(names)} programs, about {clock(expected_s)}")
    try:
        return Runner(folder, names, quick, _say).run()
    except KeyboardInterrupt:
        sys.exit("figures: interrupted; the programs that ran are stopped, and there is no report")


def _say(words: str, file: object = None) -> None:
    print(f"figures: {words}", file=file or sys.stdout, flush=True)  # type: ignore[arg-type]


def _report(folder: Path, quick: bool, note: str) -> str:
    figures, machine = read_figures(folder, quick)
    measured = [path.stat().st_mtime for path in (path_of(folder, name) for name in PROGRAMS) if path.exists()]
    day = time.strftime("%Y-%m-%d", time.gmtime(max(measured))) if measured else "never"
    kind = "A quick run: few and small rounds." if quick else "A full run."
    facts = [
        f"Measured on {day}. {kind} {note}".strip(),
        f"Machine: {machine or 'unknown'}. Clients, servers and HTCondor run together on it. Links over a distance are "
        "emulated: real TCP between network namespaces, with a process between them that delays and paces packets.",
        "The published figures are of machines and networks of their time. Each section says which of them compare.",
    ]
    return page(HEADLINES, figures, read_runs(folder), read_timeline(folder), folder, facts)


if __name__ == "__main__":
    sys.exit(main())
