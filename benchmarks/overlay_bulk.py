"""The overlay's data plane: one large file, memory to memory and disk to disk, direct and through a relay.

Memory to memory runs the loops of the product's worker processes without a disk, beside iperf3 (with one stream and
with as many as there are connections; the faster one counts) and beside a relay of a hundred lines of C that does the
same (``routers/relay.c``). Disk to disk runs the product: a router, a relay, ``put``; beside ``cp`` and its fdatasync;
beside curl to nginx, globus-url-copy, xrdcp and rclone, as they come and with a sync of the file in their time; and
beside the system calls alone (``routers/floor.c``), with nothing around them: what is left to be gained.
Everything runs over the loopback interface on this machine's cores, in turn; medians of paired runs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from common import Figure, main_in_parts
from routers import peers, spooling

from stageout.core.errors import StageoutError
from tests.harness.destination import Destination
from tests.harness.gridftp import GridFtpServer
from tests.harness.router import RouterProcess, custodian_for, relay

ROOT = Path(__file__).resolve().parents[1]
PLANE = Path(__file__).resolve().parent / "routers" / "plane.py"
SOURCE = Path(__file__).resolve().parent / "routers" / "relay.c"
FLOOR = Path(__file__).resolve().parent / "routers" / "floor.c"
SUMMING = Path(__file__).resolve().parent / "routers" / "summing.py"
MIB = 1 << 20
#: Connections that carry a file, by default of ``stageout put``.
CONNECTIONS = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """One transfer.

    :param took_s: until the bytes are where they shall be; on disks: synced.
    :param cpu_s: of each party, seconds of the processor.
    :param came_s: of a program that does not sync, until it ended.
    """

    size_bytes: int
    took_s: float
    cpu_s: Mapping[str, float]
    came_s: float = 0.0

    @property
    def rate(self) -> float:
        """MB/s."""
        return self.size_bytes / self.took_s / 1e6

    def cost(self, party: str) -> float:
        """Seconds of the processor for a GB."""
        return self.cpu_s[party] / self.size_bytes * 1e9


def _plane(*arguments: object) -> list[str]:
    return [sys.executable, str(PLANE), *map(str, arguments)]


def _started(command: list[str]) -> tuple[subprocess.Popen[str], int]:
    """A part that listens, and its port."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line.isdigit():
        raise StageoutError(f"{command[0]} did not start")
    return process, int(line)


def _figures(process: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = process.communicate(timeout=600)
    if process.returncode:
        raise StageoutError(f"{process.args!r} ended with {process.returncode}")
    return dict(json.loads(out))


def memory(blocks: int, between: list[str] | None = None) -> Run:
    """Blocks from one process to another, with a relay between them if there is one."""
    receiver, port = _started(_plane("receive", blocks, CONNECTIONS))
    middle = None
    if between:
        middle, port = _started([*between, str(CONNECTIONS), str(port)])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    sender = subprocess.Popen(_plane("send", blocks, CONNECTIONS, port), stdout=subprocess.PIPE, text=True, env=env)
    sent, received = _figures(sender), _figures(receiver)
    cpu_s = {"sender": sent["cpu_s"], "receiver": received["cpu_s"]}
    if middle is not None:
        cpu_s["relay"] = _figures(middle)["cpu_s"]
    return Run(blocks * MIB, sent["took_s"], cpu_s)


def iperf(blocks: int, streams: int = 1) -> Run:
    """The same bytes by iperf3, which looks at none of them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ["iperf3", "-s", "-1", "--forceflush", "-p", str(port), "-B", "127.0.0.1"]
    with subprocess.Popen(server, stdout=subprocess.PIPE) as listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        listening.stdout.readline()  # "Server listening on ..."
        command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-n", str(blocks * MIB), "-l", str(MIB), "-J"]
        command += ["-P", str(streams)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        listening.wait(60)
    end = json.loads(done.stdout)["end"]
    size_bytes = end["sum_received"]["bytes"]
    cpu, seconds = end["cpu_utilization_percent"], end["sum_received"]["seconds"]
    cpu_s = {"sender": cpu["host_total"] * seconds / 100, "receiver": cpu["remote_total"] * seconds / 100}
    return Run(size_bytes, seconds, cpu_s)


def _tree_s(pid: int) -> float:
    """Seconds of the processor of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0.0
    for one in [str(pid), *children]:
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return total


class Disk:
    """A router on this disk, a relay, a source file and what stands beside them.

    :param connections: that carry the file.
    """

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        terminal: RouterProcess,
        between: RouterProcess,
    ) -> None:
        self._folder, self._size_bytes, self._terminal, self._between = folder, size_bytes, terminal, between
        self.source = folder / "source"
        with self.source.open("wb") as file:
            for _ in range(size_bytes // MIB):
                file.write(os.urandom(MIB))
            os.fsync(file.fileno())

    def put(self, routes: str) -> Run:
        """``stageout put``, started once for each file."""
        return self._put(self.source, routes)

    def through(self, custodian: RouterProcess) -> Run:
        """``stageout put --through`` a custodian, until the terminal has the file."""
        before_s = _tree_s(custodian.pid)
        url = f"overlay://127.0.0.1:{self._terminal.port}/file"
        command = [sys.executable, "-m", "stageout.cli.main", "put", str(self.source), url]
        command += ["--key", str(custodian.key_file("site")), "--through", custodian.address]
        took_s, cpu_s = self._command(command)
        spent_s = _tree_s(custodian.pid) - before_s
        self._gone(self._terminal.root / "file")
        return Run(self._size_bytes, took_s, {"sender": cpu_s, "custodian": spent_s})

    def publish(self) -> None:
        """The source is at the router, too, and in the page cache, for :meth:`get`."""
        self._put_to(self.source, "published", "")

    def get(self) -> Run:
        """``stageout get``, started once for each file. It is not synced: that is no part of the router's work."""
        target = self._folder / "back"
        before_s = _tree_s(self._terminal.pid)
        url = f"overlay://127.0.0.1:{self._terminal.port}/published"
        command = [sys.executable, "-m", "stageout.cli.main", "get", url, str(target)]
        took_s, cpu_s = self._command([*command, "--key", str(self._terminal.key_file("site"))])
        spent_s = _tree_s(self._terminal.pid) - before_s
        if target.stat().st_size != self._size_bytes:
            raise StageoutError(f"{target} is not whole")
        self._gone(target)
        return Run(self._size_bytes, took_s, {"sender": spent_s, "receiver": cpu_s})

    def start(self) -> Run:
        """A put of an empty file, as if it were the start of a put of the whole file."""
        empty = self._folder / "empty"
        empty.touch()
        return self._put(empty, "")

    def _put(self, source: Path, routes: str) -> Run:
        routers = {"receiver": self._terminal} | ({"relay": self._between} if routes else {})
        before = {name: _tree_s(router.pid) for name, router in routers.items()}
        took_s, cpu_s = self._put_to(source, "file", routes)
        spent = {name: _tree_s(router.pid) - before[name] for name, router in routers.items()}
        self._gone(self._terminal.root / "file")
        return Run(self._size_bytes, took_s, {"sender": cpu_s, **spent})

    def _put_to(self, source: Path, name: str, routes: str) -> tuple[float, float]:
        url = f"overlay://127.0.0.1:{self._terminal.port}/{name}"
        command = [sys.executable, "-m", "stageout.cli.main", "put", str(source), url]
        command += ["--key", str(self._terminal.key_file("site")), "--routes", routes or "direct"]
        return self._command(command)

    def cp(self) -> Run:
        """cp and fdatasync."""
        return self._beside(["cp", str(self.source)], self._folder / "copy")

    def peers(self, stack: ExitStack) -> dict[str, Callable[[], Run]]:
        """Other programs that bring a file to a server of theirs, as far as they are installed. The servers run."""
        web = stack.enter_context(Destination(self._folder / "nginx"))
        grid = stack.enter_context(GridFtpServer(self._folder / "gridftp"))
        source = str(self.source)
        put = ["globus-url-copy", "-fast", "-p", "4", "-bs", "4M", f"file://{source}"]
        found: dict[str, Callable[[], Run]] = {
            "curl": lambda: self._beside(["curl", "-fsST", source], web.home / "files" / "file", web.url("file")),
            "globus-url-copy": lambda: self._beside(put, grid.files / "file", grid.url("file")),
        }
        if shutil.which("xrdcp") and shutil.which("xrootd"):
            root = f"root://127.0.0.1:{stack.enter_context(peers.xrootd(self._folder))}//file"
            there = self._folder / "xrootd" / "file"
            found["xrdcp"] = lambda: self._beside(["xrdcp", "-s", source], there, root)
        if shutil.which("rclone"):
            url = f"http://127.0.0.1:{stack.enter_context(peers.rclone(self._folder))}"
            copy = ["rclone", "--config", "", "--webdav-url", url, "copyto", source]
            found["rclone"] = lambda: self._beside(copy, self._folder / "rclone" / "file", ":webdav:file")
        return found

    def writing(self, floor: Path) -> Run:
        """As many bytes past the page cache, by as many processes as there are connections, and nothing else."""
        target = self._folder / "floor"
        start_s = time.monotonic()
        process = subprocess.Popen(self._floor(floor, "write", target), stdout=subprocess.PIPE, text=True)
        cpu_s = _figures(process)["cpu_s"]
        took_s = time.monotonic() - start_s
        self._gone(target)
        return Run(self._size_bytes, took_s, {"all": cpu_s})

    def calls(self, floor: Path, between: Path | None = None, look: str = "") -> Run:
        """sendfile, recv and write past the page cache, and the relay in C if there is one, and nothing else.

        :param look: the sender digests each block, too, as ``routers/summing.py`` takes it.
        """
        target = self._folder / "floor"
        start_s = time.monotonic()
        receiver, port = _started(self._floor(floor, "receive", target))
        middle = None
        if between is not None:
            middle, port = _started([str(between), "splice", str(CONNECTIONS), str(port)])
        sending = [*self._floor(floor, look or "send", self.source), str(port)]
        if look:
            sending[:1] = [sys.executable, str(SUMMING)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        sender = subprocess.Popen(sending, stdout=subprocess.PIPE, text=True, env=env)
        cpu_s = {"sender": _figures(sender)["cpu_s"], "receiver": _figures(receiver)["cpu_s"]}
        took_s = time.monotonic() - start_s
        if middle is not None:
            cpu_s["relay"] = _figures(middle)["cpu_s"]
        self._gone(target)
        return Run(self._size_bytes, took_s, cpu_s)

    def _floor(self, floor: Path, part: str, file: Path) -> list[str]:
        return [str(floor), part, str(file), str(self._size_bytes), str(CONNECTIONS)]

    def _beside(self, command: list[str], target: Path, name: str = "") -> Run:
        """Another program, and a sync of what it wrote. :param name: of the target for the program, "" is its path."""
        came_s, cpu_s = self._command([*command, name or str(target)])
        synced_s, sync_cpu_s = self._command(["sync", "-d", str(target)])
        if target.stat().st_size != self._size_bytes:
            raise StageoutError(f"{command[0]}: {target} is not whole")
        self._gone(target)
        return Run(self._size_bytes, came_s + synced_s, {"all": cpu_s + sync_cpu_s}, came_s)

    def _command(self, command: list[str]) -> tuple[float, float]:
        before_s = sum(os.times()[2:4])
        start_s = time.monotonic()
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed command is compiled: the round before sees to it
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False)
        took_s = time.monotonic() - start_s
        if done.returncode:
            raise StageoutError(f"{command} ended with {done.returncode}: {done.stderr[:300]}")
        return took_s, sum(os.times()[2:4]) - before_s

    def _gone(self, path: Path) -> None:
        """The next run finds the disk as this one did."""
        path.unlink()
        subprocess.run(["sync"], check=True)


def _rounds(count: int, runs: Mapping[str, Callable[[], Run]]) -> dict[str, list[Run]]:
    """All of them, so many times, in an order that is turned each time; one round before is not counted."""
    found: dict[str, list[Run]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(count + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            done = runs[name]()
            if number:
                found[name].append(done)
    return found


def _rate(runs: list[Run]) -> float:
    return statistics.median(run.rate for run in runs)


def _cost(runs: list[Run], party: str) -> float:
    return statistics.median(run.cost(party) for run in runs)


def _share(runs: list[Run], peers: list[Run]) -> float:
    """Median of the paired ratios of rates."""
    return statistics.median(run.rate / peer.rate for run, peer in zip(runs, peers))


def _compiled(source: Path, folder: Path) -> Path:
    program = folder / f"{source.stem}.program"
    if not program.exists():
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
    return program


def in_memory(quick: bool, folder: Path) -> list[Figure]:
    """Memory to memory."""
    compiled = _compiled(SOURCE, folder)
    blocks = 1024 if quick else 4096
    runs: dict[str, Callable[[], Run]] = {
        "direct": lambda: memory(blocks),
        "relay": lambda: memory(blocks, _plane("relay")),
        "splice": lambda: memory(blocks, [str(compiled), "splice"]),
        "copy": lambda: memory(blocks, [str(compiled), "copy"]),
    }
    if shutil.which("iperf3"):
        runs["iperf"] = lambda: iperf(blocks)
        runs["streams"] = lambda: iperf(blocks, CONNECTIONS)
    else:
        print("iperf3 is not installed: memory to memory stands beside nothing (apt-get install iperf3)")
    found = _rounds(3 if quick else 9, runs)
    figures = [
        Figure("direct, digest and checksum on", _rate(found["direct"]), "MB/s"),
        Figure("through a relay", _rate(found["relay"]), "MB/s", "through the C relay that splices",
               _rate(found["splice"])),
        Figure("through the C relay that copies", _rate(found["copy"]), "MB/s"),
        Figure("relay's processor time", _cost(found["relay"], "relay"), "s/GB", "the C relay that splices",
               _cost(found["splice"], "relay"), goal=0.25),
        Figure("the C relay that copies", _cost(found["copy"], "relay"), "s/GB"),
        Figure("direct: sender", _cost(found["direct"], "sender"), "s/GB"),
        Figure("direct: receiver", _cost(found["direct"], "receiver"), "s/GB"),
    ]  # fmt: skip
    if "iperf" in found:
        best = [max(pair, key=lambda run: run.rate) for pair in zip(found["iperf"], found["streams"])]
        figures += [
            Figure("direct, of the better iperf3", _share(found["direct"], best), "ratio", goal=0.9, more=True),
            Figure("relay, of the better iperf3", _share(found["relay"], best), "ratio", goal=0.5, more=True),
            Figure("iperf3, one stream", _rate(found["iperf"]), "MB/s"),
            Figure(f"iperf3, {CONNECTIONS} streams", _rate(found["streams"]), "MB/s"),
            Figure("iperf3, one stream: both ends",
                   _cost(found["iperf"], "sender") + _cost(found["iperf"], "receiver"), "s/GB"),
        ]  # fmt: skip
    return figures


def _ahead(found: dict[str, list[Run]], names: list[str]) -> list[Figure]:
    """Ours over the best of the other programs in each round; and what each of these reached."""
    best = [max(runs, key=lambda run: run.rate) for runs in zip(*(found[name] for name in names))]
    came = [max(runs, key=lambda run: run.size_bytes / run.came_s) for runs in zip(*(found[name] for name in names))]
    figures = [
        Figure(f"{words}, synced, digest on, of the best of {', '.join(names)}, synced", _share(found[name], best),
               "ratio", goal=1.0, more=True)
        for name, words in (("direct", "direct"), ("relay", "through a relay"))
    ]  # fmt: skip
    ratios = (run.rate / (peer.size_bytes / peer.came_s / 1e6) for run, peer in zip(found["direct"], came))
    figures.append(
        Figure("direct, synced, digest on, of the best of them as it comes, not synced", statistics.median(ratios),
               "ratio")
    )  # fmt: skip
    for name in names:
        as_it_comes = statistics.median(run.size_bytes / run.came_s for run in found[name]) / 1e6
        figures.append(
            Figure(f"{name}, synced", _rate(found[name]), "MB/s", "as it comes, not synced", as_it_comes)
        )  # fmt: skip
    return figures


def on_disk(quick: bool, folder: Path) -> list[Figure]:
    """Disk to disk: the source is in the page cache, every target brought to the disk."""
    size_bytes = (256 if quick else 2048) * MIB
    floor, splicing = _compiled(FLOOR, folder), _compiled(SOURCE, folder)
    with ExitStack() as routers:
        terminal = routers.enter_context(RouterProcess(folder / "router"))
        between = routers.enter_context(relay(folder / "between", [terminal]))
        custodian = routers.enter_context(custodian_for(folder / "custodian", [terminal]))
        other = routers.enter_context(spooling.another_device(folder / "other", 3 * size_bytes))
        disk = Disk(folder, size_bytes, terminal, between)
        runs: dict[str, Callable[[], Run]] = {
            "direct": lambda: disk.put(""),
            "relay": lambda: disk.put(between.address),
            "custodian": lambda: disk.through(custodian),
            "cp": disk.cp,
            "writing": lambda: disk.writing(floor),
            "calls": lambda: disk.calls(floor),
            "relayed calls": lambda: disk.calls(floor, splicing),
        }
        if other is not None:
            elsewhere = routers.enter_context(custodian_for(other / "custodian", [terminal]))
            runs["elsewhere"] = lambda: disk.through(elsewhere)
        with ExitStack() as stack:
            beside = disk.peers(stack)
            found = _rounds(2 if quick else 5, {**runs, **beside})
    figures = _ahead(found, list(beside))
    for name, words, goal in (
        ("direct", "direct", 1.3), ("relay", "through a relay", 1.3), ("custodian", "through a custodian", 0.9),
        ("elsewhere", "through a custodian, its spool on a device in memory", 1.2),
    ):  # fmt: skip
        if name not in found:
            continue
        figures.append(
            Figure(f"{words}, synced, of cp + fdatasync", _share(found[name], found["cp"]), "ratio",
                   goal=goal, more=True)
        )  # fmt: skip
        figures.append(
            Figure(f"{words}, synced, digest on", _rate(found[name]), "MB/s", "cp, synced", _rate(found["cp"]))
        )
    for name, words in (
        ("writing", "writing"), ("calls", "direct"), ("relayed calls", "through the C relay"),
    ):  # fmt: skip
        share = _share(found[name], found["cp"])
        figures.append(Figure(f"system calls alone, {words}, of cp + fdatasync", share, "ratio"))
    figures += [
        Figure("direct: sender", _cost(found["direct"], "sender"), "s/GB", "sendfile alone",
               _cost(found["calls"], "sender"), goal=0.15),
        Figure("direct: receiver", _cost(found["direct"], "receiver"), "s/GB", "recv and write alone",
               _cost(found["calls"], "receiver"), goal=0.8),
        Figure("through a relay: relay", _cost(found["relay"], "relay"), "s/GB", "the C relay that splices",
               _cost(found["relayed calls"], "relay"), goal=0.25),
        Figure("through a custodian: custodian", _cost(found["custodian"], "custodian"), "s/GB", goal=1.2),
        Figure("cp + fdatasync", _cost(found["cp"], "all"), "s/GB"),
    ]  # fmt: skip
    return figures


def of_sender(quick: bool, folder: Path) -> list[Figure]:
    """The sender's cost, beside loops that do less: each stands for a step that the product makes, too."""
    size_bytes = (256 if quick else 1024) * MIB
    floor = _compiled(FLOOR, folder)
    with RouterProcess(folder / "router") as terminal, relay(folder / "between", [terminal]) as between:
        disk = Disk(folder, size_bytes, terminal, between)
        runs: dict[str, Callable[[], Run]] = {
            "put": lambda: disk.put(""),
            "start": disk.start,
            "calls": lambda: disk.calls(floor),
            "map": lambda: disk.calls(floor, look="map"),
            "read": lambda: disk.calls(floor, look="read"),
        }
        found = _rounds(2 if quick else 9, runs)
    loops = (
        ("sendfile alone", "calls"),
        ("xxh3-128 through a mapping, sendfile", "map"),
        ("read, xxh3-128, sendfile", "read"),
    )
    put_cost, start_cost = (_cost(found[name], "sender") for name in ("put", "start"))
    figures = [
        Figure("put", put_cost, "s/GB", goal=0.15),
        Figure("put, of it for the start", start_cost, "s/GB"),
        Figure("put: receiver", _cost(found["put"], "receiver"), "s/GB"),
    ]
    for words, name in loops:
        figures.append(Figure(f"put without the start, beside {words}", put_cost - start_cost, "s/GB", words,
                              _cost(found[name], "sender")))  # fmt: skip
        figures.append(Figure(f"{words}: receiver", _cost(found[name], "receiver"), "s/GB"))
    return figures


def of_get(quick: bool, folder: Path) -> list[Figure]:
    """A file back from a router that has it in its page cache: the worker sends it, the client checks and writes it."""
    size_bytes = (512 if quick else 2048) * MIB
    floor = _compiled(FLOOR, folder)
    with RouterProcess(folder / "router") as terminal, relay(folder / "between", [terminal]) as between:
        disk = Disk(folder, size_bytes, terminal, between)
        disk.publish()
        found = _rounds(3 if quick else 7, {"get": disk.get, "calls": lambda: disk.calls(floor)})
    return [
        Figure("rate", _rate(found["get"]), "MB/s"),
        Figure("sender (the router's worker)", _cost(found["get"], "sender"), "s/GB", "sendfile alone",
               _cost(found["calls"], "sender"), goal=0.15),
        Figure("receiver (stageout get)", _cost(found["get"], "receiver"), "s/GB", "recv and write alone",
               _cost(found["calls"], "receiver")),
    ]  # fmt: skip


def custodian_in_memory(quick: bool, folder: Path) -> list[Figure]:
    """A custodian whose sender and terminal have no disk."""
    size_bytes = (256 if quick else 1024) * MIB
    shared = Path("/dev/shm")
    if not shared.is_dir() or shutil.disk_usage(shared).free < 4 * size_bytes:
        print("there is no room in /dev/shm: the custodian from memory to memory is left out")
        return []
    with tempfile.TemporaryDirectory(dir=shared) as memory_folder:
        rounds = 3 if quick else 8
        return spooling.in_memory(Path(memory_folder), folder, size_bytes, rounds, _compiled(SOURCE, folder))


PARTS: dict[str, Callable[[bool, Path], list[Figure]]] = {
    "memory": in_memory,
    "disk": on_disk,
    "sender": of_sender,
    "get": of_get,
    "custodian": spooling.figures,
    "custodian-memory": custodian_in_memory,
}


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    """These parts, in their order."""
    found: list[Figure] = []
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="overlay", dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
            Path(folder).chmod(0o755)
            for figure in PARTS[part](quick, Path(folder)):
                found.append(replace(figure, what=f"{part}: {figure.what.removeprefix(part + ', ')}"))
    return found


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_bulk", list(PARTS), measure))
