"""One large file through a custodian: on one disk, with its spool on another device, and with all of it in memory.

``put`` waits for the delivery, so its sender keeps the bytes (release = delivered), and the spool gets what the next
hop does not take at once. ``put --custody`` has everything spooled. Beside them: ``cp`` and fdatasync, and in memory a
relay of a hundred lines of C (``relay.c``) between the same sender and terminal.

The limit of one disk is measured in the same rounds: two processes that write the same bytes past the page cache, as
custodian and terminal do, and nothing else. The other device is an ext4 in memory behind a loop: no disk of its own,
but nothing that the first one has to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from common import Figure

from stageout.core.errors import StageoutError
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for

_ROOT = Path(__file__).resolve().parents[2]
_WRITERS = str(Path(__file__).with_name("two_writers.py"))
_MIB = 1 << 20
#: Those of a put: two for blocks, and one for control.
_CONNECTIONS = 3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def figures(quick: bool, folder: Path) -> list[Figure]:
    """Rates of a put that ends when the terminal has the file, or the custodian; what its processes cost."""
    source, size_bytes = folder / "source", (256 if quick else 1024) * _MIB
    with source.open("wb") as file:
        for _ in range(size_bytes // _MIB):
            file.write(os.urandom(_MIB))
        os.fsync(file.fileno())
    rounds = 3 if quick else 6
    with RouterProcess(folder / "end") as end:
        with custodian_for(folder / "custodian", [end]) as custodian:
            one = _Rounds(source, size_bytes, end, custodian).run(rounds)
        found = [
            Figure("through a custodian, one disk, of cp + fdatasync", _of(one, "put", "cp"), "ratio", goal=0.9,
                   more=True),
            Figure("through a custodian, one disk, of what two writers have", _of(one, "put", "writers"), "ratio"),
            Figure("everything spooled, until it is (--custody), of cp + fdatasync", _of(one, "custody", "cp"),
                   "ratio"),
            Figure("through a custodian, one disk", _rate(one, "put", size_bytes), "MB/s", "cp + fdatasync",
                   _rate(one, "cp", size_bytes)),
            Figure("everything spooled, until it is (--custody)", _rate(one, "custody", size_bytes), "MB/s",
                   "each of two writers at once", _rate(one, "writers", size_bytes)),
            Figure("custodian's processor time", statistics.median(one["cost"]), "s/GB", goal=1.2),
        ]  # fmt: skip
        with another_device(folder / "other", 3 * size_bytes) as other:
            if other is not None:
                with custodian_for(other / "custodian", [end]) as custodian:
                    two = _Rounds(source, size_bytes, end, custodian).run(rounds)
                found.append(
                    Figure("its spool on a device in memory, of cp + fdatasync", _of(two, "put", "cp"), "ratio",
                           goal=1.2, more=True)
                )  # fmt: skip
                found.append(
                    Figure("its spool on a device in memory", _rate(two, "put", size_bytes), "MB/s", "cp + fdatasync",
                           _rate(two, "cp", size_bytes))
                )  # fmt: skip
    return found


def in_memory(memory: Path, disk: Path, size_bytes: int, rounds: int, relay: Path) -> list[Figure]:
    """The cost of a custodian whose next hop keeps up: source and target are in ``memory``.

    Its spool is on the disk, where room is reserved and nothing written: in memory, reserving would be writing.

    :param relay: program that passes bytes on and does nothing else: it stands in the custodian's place in each round,
        between the same sender and the same terminal: copying, copying with one look at each byte, and splicing.
    """
    source = memory / "source"
    source.write_bytes(os.urandom(size_bytes))
    costs, rates = [], []
    relayed: dict[str, list[float]] = {"copy": [], "sum": [], "splice": []}
    with RouterProcess(memory / "end") as end, custodian_for(disk / "custodian", [end]) as custodian:
        files = _Rounds(source, size_bytes, end, custodian)
        for number in range(rounds):
            spent_s = _tree_s(custodian.pid)
            took_s = files.put()
            cost = (_tree_s(custodian.pid) - spent_s) / size_bytes * 1e9
            relay_costs = {way: files.relayed(relay, way) for way in relayed}
            if number:
                costs.append(cost)
                rates.append(size_bytes / took_s / 1e6)
                for way, relay_cost in relay_costs.items():
                    relayed[way].append(relay_cost)
    ratio = _ratio(costs, relayed["copy"])
    return [
        Figure("memory to memory: custodian's processor time", statistics.median(costs), "s/GB",
               "the C relay that copies, in its place", statistics.median(relayed["copy"])),
        Figure("memory to memory: the C relay that looks at each byte, in its place",
               statistics.median(relayed["sum"]), "s/GB"),
        Figure("memory to memory: that one, of the C relay that copies", _ratio(relayed["sum"], relayed["copy"]),
               "ratio"),
        Figure("memory to memory: the C relay that splices, in its place", statistics.median(relayed["splice"]),
               "s/GB"),
        Figure("memory to memory: custodian's processor time, of the C relay that copies", ratio, "ratio", goal=1.15),
        Figure("memory to memory, put until it is delivered", statistics.median(rates), "MB/s"),
    ]  # fmt: skip


class _Rounds:
    """All that is compared, in turn."""

    def __init__(self, source: Path, size_bytes: int, end: RouterProcess, custodian: RouterProcess) -> None:
        self._source, self._size_bytes, self._end, self._custodian = source, size_bytes, end, custodian
        self._folder = source.parent

    def run(self, count: int) -> dict[str, list[float]]:
        """Seconds of each, and what the custodian's processes cost, in seconds for a GB; the first round warms up."""
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(count):
            spent_s = _tree_s(self._custodian.pid)
            once = {"put": self.put()}
            once["cost"] = (_tree_s(self._custodian.pid) - spent_s) / self._size_bytes * 1e9
            script = 'cp "$0" "$1" && sync -d "$1"'
            once["cp"] = self._gone(_timed(["sh", "-c", script, str(self._source), str(self._folder / "copy")]))
            once["custody"] = self.put("--custody")
            once["writers"] = self._gone(_timed([sys.executable, _WRITERS, str(self._folder), str(self._size_bytes)]))
            for name, value in once.items() if number else ():
                found[name].append(value)
        return found

    def put(self, *options: str) -> float:
        """``stageout put --through``: on return the file is on the disk at the terminal, or at the custodian."""
        url = f"overlay://{self._end.address}/file"
        command = [sys.executable, "-m", "stageout.cli.main", "put", str(self._source), url]
        command += ["--through", self._custodian.address, "--key", str(self._custodian.key_file("site")), *options]
        took_s = _timed(command)
        wait_until((self._end.root / "file").exists, timeout_s=60, what="the file to be delivered")
        return self._gone(took_s)

    def relayed(self, program: Path, way: str) -> float:
        """The time of that relay in the place of the custodian, in s/GB.

        :param way: ``copy``, ``sum`` or ``splice``.
        """
        command = [str(program), way, str(_CONNECTIONS), str(self._end.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
            assert relay.stdout is not None
            url = f"overlay://127.0.0.1:{int(relay.stdout.readline())}/file"
            put = [sys.executable, "-m", "stageout.cli.main", "put", str(self._source), url, "--routes", "direct"]
            self._gone(_timed([*put, "--key", str(self._end.key_file("site"))]))
            return float(json.loads(relay.stdout.readline())["cpu_s"]) / self._size_bytes * 1e9

    def _gone(self, took_s: float) -> float:
        """The next one finds the disk as this one did."""
        for path in (self._end.root / "file", self._folder / "copy"):
            path.unlink(missing_ok=True)
        subprocess.run(["sync"], check=True)
        return took_s


@contextlib.contextmanager
def another_device(folder: Path, size_bytes: int) -> Iterator[Path | None]:
    """Where a filesystem in memory is mounted; None where that cannot be (it takes root, and memory)."""
    memory, folder_s = Path("/dev/shm"), str(folder)
    image = memory / f"{folder.parent.name}.img"
    if os.geteuid() or not memory.is_dir() or shutil.disk_usage(memory).free < size_bytes:
        print("a device in memory takes root and room in /dev/shm: the custodian with another device is left out")
        yield None
        return
    try:
        with image.open("wb") as file:
            file.truncate(size_bytes)
        folder.mkdir()
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), folder_s], check=True)
        try:
            folder.chmod(0o755)
            yield folder
        finally:
            subprocess.run(["umount", folder_s], check=True)
    finally:
        image.unlink(missing_ok=True)


def _ratio(ones: list[float], others: list[float]) -> float:
    """Median of the paired ratios."""
    return statistics.median(one / other for one, other in zip(ones, others))


def _of(found: dict[str, list[float]], one: str, other: str) -> float:
    """Median of the paired ratios of rates."""
    return statistics.median(theirs / ours for ours, theirs in zip(found[one], found[other]))


def _rate(found: dict[str, list[float]], name: str, size_bytes: int) -> float:
    return size_bytes / statistics.median(found[name]) / 1e6


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
