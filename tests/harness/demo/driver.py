"""The demonstration from top to bottom."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stageout.core.errors import StageoutError
from tests.harness.demo import report
from tests.harness.demo.embedded_run import both_runs
from tests.harness.demo.picture import draw
from tests.harness.demo.pool_run import PoolRun
from tests.harness.demo.record import FINE_LOGS, Record
from tests.harness.demo.workload import MB, Workload
from tests.harness.narrow_destination import NarrowDestination
from tests.harness.pool import Pool, PoolUnavailable
from tests.harness.pool.image import PREFIX

WORKLOAD = Workload(jobs=8, compute_s=10, files=3, file_bytes=20 * MB, input_bytes=5 * MB)
"""Output of two jobs takes as long as their computation; all of it takes two to three minutes."""

TITLES = ("HTCondor as it comes", "With data slots")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 when every job was delivered, every file verified and every slot freed first."""
    parser = argparse.ArgumentParser(prog="make demo", description="The same jobs without and with data slots.")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="directory of the picture and the figures")
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    try:
        synchronous, stage_out = _both_runs(WORKLOAD, out)
    except StageoutError as failed:
        print(f"demo: failed: {failed}", file=sys.stderr)
        return 1
    return _conclude(synchronous, stage_out, out)


def _both_runs(load: Workload, out: Path) -> tuple[Record, Record]:
    print(_what_comes(load))
    place = tempfile.TemporaryDirectory(prefix="stageout-demo-")
    with place as name, NarrowDestination(Path(name) / "destination") as destination:
        try:
            return _on_pools(load, destination, out)
        except PoolUnavailable as why:
            print(f"\nThere is no real pool here: {why}")
        return both_runs(load, destination)


def _what_comes(load: Workload) -> str:
    return (
        f"{load.jobs} jobs on 2 CPU slots. Each fetches {load.input_bytes / MB:.0f} MB by URL, computes for "
        f"{load.compute_s} s and leaves {load.files} files of {load.file_bytes / MB:.0f} MB\n"
        f"for a WebDAV server whose link takes 12.5 MB/s in all. The submit file, the same for both runs:\n\n"
        + "".join(f"    {line}\n" for line in load.submit_text("http://DESTINATION").splitlines())
    )


def _on_pools(load: Workload, destination: NarrowDestination, out: Path) -> tuple[Record, Record]:
    runs = []
    for title, name, ours in ((TITLES[0], "synchronous", False), (TITLES[1], "stage-out", True)):
        pool = Pool(stageout=ours, ep_config=FINE_LOGS)
        with pool:
            if ours:
                _wrap_plugins(pool)
            print(f"{title}: HTCondor {pool.image.release}, one access point, one execute point", flush=True)
            try:
                runs.append(_one_run(pool, destination, load, name, title))
            except StageoutError:
                pool.collect_logs(out / "logs")
                print(f"The pool's logs are in {out / 'logs'}.", file=sys.stderr)
                raise
    return runs[0], runs[1]


def _wrap_plugins(pool: Pool) -> None:
    """Give HTCondor's own plugins front ends, which answer for them at each job's end (docs/plugin/front-ends.md)."""
    for node in pool.eps:
        listed = node.config_val("FILETRANSFER_PLUGINS").replace(",", " ").split()
        bare = [
            path
            for path in listed
            if not path.startswith(PREFIX) and node.run(["test", "-x", path], check=False).returncode == 0
        ]
        command = [f"{PREFIX}/bin/stageout", "wrap", "--directory", str(node.home / "front-ends"), *bare]
        node.configure(node.run(command).stdout.splitlines()[-1])


def _one_run(pool: Pool, destination: NarrowDestination, load: Workload, name: str, title: str) -> Record:
    tell = report.Teller(title, load.jobs * load.job_bytes / MB)
    return PoolRun(pool, destination, load, name, title, tell).run()


def _conclude(synchronous: Record, stage_out: Record, out: Path) -> int:
    """Write the picture and the figures, print the table and the last line."""
    load, picture = WORKLOAD, out / "timeline.svg"
    subtitle = (
        f"{load.jobs} jobs of {load.compute_s} s on 2 CPU slots; each leaves {load.files} files of "
        f"{load.file_bytes / MB:.0f} MB for a destination that takes 12.5 MB/s in all"
    )
    draw([synchronous, stage_out], picture, subtitle=subtitle)
    figures = {"synchronous": asdict(synchronous), "stage_out": asdict(stage_out)}
    (out / "timeline.json").write_text(json.dumps(figures, indent=1))
    print(f"\n{report.table(synchronous, stage_out)}\n\npicture: {picture}")
    wrong = report.shortfalls(synchronous, stage_out)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    print(report.last_line([synchronous, stage_out]))
    return 1 if wrong else 0
