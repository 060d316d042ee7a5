"""Runs on the central manager of a pool: ``NODES EACH SECONDS DIRECTORY``. Prints what the web page costs there.

The collector holds the reports of all nodes, and each node reports every 30 s. That goes on for so many seconds
without the page and as long with it: the collector's processor time differs by the page's part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from stageout.core.signing import SigningKey
from stageout.wire.custody import REPORT_ADDRESS, REPORTS, FileReport, Report, SandboxReport, report_ad

KEY = SigningKey(b"k" * 32)
SCHEDD = "schedd.example.org"
PORT = 9622
_REPORT_S = 30
_STEP_S = 5.0
_AT_ONCE = 100
_FILES = 3
_STATES = (
    "Confirmed",
    "Moving",
    "RetryWait",
    "Failed",
    "Leased",
    "Confirmed",
    "Confirmed",
    "Moving",
    "Accepted",
    "Confirmed",
)
_CODES = {"RetryWait": 51, "Failed": 72}
_VIEWS = {"now": "/", "jobs": "/jobs", "nodes": "/nodes", "grid": "/grid.json", "destinations": "/destinations"}


def sandbox(cluster: int, change: int) -> SandboxReport:
    """One sandbox of three files."""
    state, host = _STATES[cluster % len(_STATES)], f"store{cluster % 40}.example.org"
    code = _CODES.get(state, 0)
    words = "the server answered 507: quota of the group is used up, ask its administrator" if code else ""
    files = tuple(
        FileReport(f"out{one}.root", f"https://{host}/store/user/alice/run{cluster}/out{one}.root", 10**8, state,
                   "stageout_curl_plugin", min(code, 1), code, words)
        for one in range(_FILES)
    )  # fmt: skip
    return SandboxReport(
        job=f"{SCHEDD}#{cluster}.0#1700000000", number=1, owner=f"user{cluster % 50}@example.org", state=state,
        change=change, reason=words, error_code=code, tickets=(f"{cluster:032x}",), files_total=_FILES,
        files_left=_FILES, bytes_total=3 * 10**8, bytes_left=3 * 10**8 - change, attempts=min(code, 1),
        attempts_limit=20, next_attempt_at=0, accepted_at=1_700_000_000 + cluster, files=files,
    )  # fmt: skip


class Nodes:
    """All managers. :param each: sandboxes of one."""

    def __init__(self, nodes: int, each: int) -> None:
        self._nodes, self._each, self._next, self._number = nodes, each, 0, 1

    def publish(self, count: int) -> None:
        """Send the reports of the next nodes."""
        import classad2
        import htcondor2

        while count > 0:
            some = [self._ad((self._next + one) % self._nodes) for one in range(min(count, _AT_ONCE))]
            htcondor2.Collector().advertise([classad2.ClassAd(ad) for ad in some], REPORTS.update)
            self._next = (self._next + len(some)) % self._nodes
            count -= len(some)

    def _ad(self, node: int) -> dict[str, object]:
        self._number += 1
        boxes = tuple(sandbox(node * self._each + one, self._number) for one in range(self._each))
        name = f"manager@ep{node}.example.org"
        report = Report(name, KEY.public, self._number, int(time.time()), {}, 3 * 10**8 * self._each, boxes)
        return {**report_ad(report, KEY), **REPORT_ADDRESS}

    def play(self, seconds: float, meanwhile: Callable[[], object] = int) -> float:
        """Let every node report once in 30 s. Return the share of a core that the collector needs."""
        count = round(self._nodes * _STEP_S / _REPORT_S)
        begin_s, used_s = time.monotonic(), collector_s()
        steps = round(seconds / _STEP_S)
        for step in range(steps):
            self.publish(count)
            while (left_s := begin_s + (step + 1) * _STEP_S - time.monotonic()) > 0:
                meanwhile()
                time.sleep(min(0.2, left_s))
        return (collector_s() - used_s) / (time.monotonic() - begin_s)


def collector_s() -> float:
    """Return the processor time of the collector and of its children that have ended, in seconds."""
    found = subprocess.run(["pgrep", "-x", "condor_collecto"], capture_output=True, text=True, check=True)
    fields = (Path("/proc") / found.stdout.split()[0] / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Return the memory of a process and of its children, in MB. Pages that several have count once (PSS)."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    total = 0
    for one in (str(pid), *children):
        for line in (Path("/proc") / one / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def processor_s(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def get_s(path: str) -> float:
    """Return the seconds for one page."""
    start_s = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=60) as answer:
        answer.read()
    return time.monotonic() - start_s


def wait_for_moving() -> None:
    """Wait until the page shows output that moves."""
    end_s = time.monotonic() + 300
    while time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/series.json", timeout=60) as answer:
                found = json.load(answer)
            if found["values"][found["names"].index("moving")][-1:] > [0]:
                return
        except (OSError, TypeError):
            pass
        time.sleep(0.2)
    raise SystemExit("the page shows nothing")


def main() -> None:
    """The program."""
    count, each, seconds = map(int, sys.argv[1:4])
    home = Path(sys.argv[4])
    nodes = Nodes(count, each)
    nodes.publish(count)
    before = nodes.play(seconds)
    knobs = {"_CONDOR_STAGEOUT_WEB_DIR": str(home / "ring"), "_CONDOR_STAGEOUT_WEB_LOG": str(home / "web.log")}
    begin_s = time.monotonic()
    page = subprocess.Popen(["/opt/stageout/bin/stageout-web", "-f"], env={**os.environ, **knobs})
    try:
        wait_for_moving()
        ready_s = time.monotonic() - begin_s
        used_s, begin_s = processor_s(page.pid), time.monotonic()
        sizes: list[float] = []
        after = nodes.play(seconds, lambda: sizes.append(memory_mb(page.pid)))
        used = (processor_s(page.pid) - used_s) / (time.monotonic() - begin_s)
        views = {name: sorted(get_s(path) for _ in range(5))[2] for name, path in _VIEWS.items()}
        print(json.dumps({"collector": after - before, "without": before, "ready_s": ready_s,
                          "memory_mb": max(sizes), "processor": used, "views": views}))  # fmt: skip
    finally:
        page.terminate()
        page.wait()


if __name__ == "__main__":
    main()
