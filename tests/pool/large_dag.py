"""Measure a large DAG on a real pool: waiting processes, their CPU time, and wall time without and with stageout."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.destination import Destination
from tests.harness.pool import Pool, Submission
from tests.pool.conftest import JOB, LEAN, QUICK_AP, QUICK_EP, Site, open_directory, wait_until_acquainted

_TICKS = os.sysconf("SC_CLK_TCK")
_INCLUDE = "INCLUDE /opt/stageout/share/stageout/stageout.dag\n"
_LOOK_S = 0.5


@dataclass
class Watched:
    """A DAG that has ended.

    :param most: waiting processes at once: ``stageout wait``, and POST scripts. :param cpu_s: of all POST scripts.
    """

    wall_s: float
    status: int = -1
    most: dict[str, int] = field(default_factory=lambda: {"leaders": 0, "scripts": 0})
    cpu_s: float = 0.0


def dag_text(nodes: int, last_lines: str = "", length: int = 1) -> str:
    """Return a DAG of chains of nodes. :param length: nodes of a chain; 1 for independent nodes."""
    jobs = "".join(f"JOB N{number} node.sub\n" for number in range(nodes))
    links = ((number, number + 1) for number in range(nodes - 1) if (number + 1) % length)
    return jobs + "".join(f"PARENT N{one} CHILD N{other}\n" for one, other in links) + last_lines


def node_text(site: Site, extra: str = "", seconds: int = 0) -> str:
    """Return the submit file of all nodes. :param seconds: time of their program."""
    return f"""
executable = job.sh
arguments = out1
environment = "SIZE=2000 SLEEP={seconds}"
transfer_output_files = out1
output_destination = {site.url()}/$(JOB)
log = nodes.log
request_memory = 20
request_disk = 5M
{extra}
queue
"""


def submit(
    site: Site, nodes: int, last_lines: str = "", extra: str = "", length: int = 1, seconds: int = 0
) -> Submission:
    """Submit the DAG as alice."""
    files = {"job.sh": JOB, "node.sub": node_text(site, extra, seconds)}
    return site.pool.submit_dag("alice", dag_text(nodes, last_lines, length), files=files)


def watch(site: Site, dag: Submission, timeout_s: float) -> Watched:
    """Follow a DAG to its end.

    :raises TimeoutError: it takes longer than ``timeout_s`` seconds.
    """
    begin_s = time.monotonic()
    found = Watched(0.0)
    while not (history := site.pool.history(dag)):
        found.wall_s = time.monotonic() - begin_s
        if found.wall_s > timeout_s:
            raise TimeoutError(f"{dag} has not ended after {timeout_s:.0f} s: {site.pool.why(dag)}")
        _look(site.pool, found)
        time.sleep(_LOOK_S)
    found.status = int(history["ExitCode"])
    return found


def _look(pool: Pool, found: Watched) -> None:
    processes = pool.ap.processes()
    for process in processes:
        if process.is_named("dagman"):
            found.cpu_s = max(found.cpu_s, _cpu_of_children_s(process.pid))
    counts = {
        "leaders": sum("--answers" in process.argv for process in processes),
        "scripts": sum(process.is_named("stageout_dag_post") for process in processes),
    }
    for name, count in counts.items():
        found.most[name] = max(found.most[name], count)


def _cpu_of_children_s(pid: int) -> float:
    """Return the CPU seconds of all children that have ended, and of theirs; DAGMan starts nothing but scripts."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / _TICKS


def delivered(site: Site, nodes: int) -> int:
    """Return how many nodes have their output at the destination."""
    return sum(site.destination.file(f"{site.prefix}/N{number}/out1").exists() for number in range(nodes))


def _say(title: str, nodes: int, found: Watched, site: Site) -> None:
    print(
        f"{title}: {nodes} nodes, status {found.status}, {found.wall_s:.0f} s, at most {found.most['leaders']} waiting "
        f"processes and {found.most['scripts']} POST scripts at once, {found.cpu_s:.1f} CPU seconds of POST scripts "
        f"({found.cpu_s / nodes * 1000:.0f} ms for each node), {delivered(site, nodes)} delivered",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the DAG without and with stageout."""
    parser = argparse.ArgumentParser("python -m tests.pool.large_dag", description=__doc__)
    parser.add_argument("--nodes", type=int, default=200, help="number of nodes (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1, help="nodes of each chain (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=0, help="time of a node's program (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of DAGs without and with (default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=16, help="CPUs of the execute point (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each DAG (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="take the short intervals of tests")
    parser.add_argument("--only", choices=("without", "with"), help="run only one of both")
    options = parser.parse_args(argv)
    failed = 0
    kinds = (("without", "", "MY.StageOutAsync = false"), ("with", _INCLUDE, ""))
    with open_directory("large-dag") as home, Destination(home) as destination:
        settings: dict[str, Any] = {"version": "25.14", "execute_points": 1, "cpus": options.cpus}
        quick = {"ap_config": QUICK_AP, "ep_config": QUICK_EP} if options.quick else {}
        with Pool(**settings, **quick, base_config=LEAN) as pool:
            wait_until_acquainted(pool)
            for pair, (title, last_lines, extra) in itertools.product(range(options.pairs), kinds):
                if options.only in (None, title):
                    site = Site(pool, destination, f"{title}-{pair}", home)
                    dag = submit(site, options.nodes, last_lines, extra, options.length, options.seconds)
                    found = watch(site, dag, options.timeout)
                    _say(title, options.nodes, found, site)
                    failed += found.status != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
