"""The client of HTTP beside the client by frames, in one run: whole commands, their start included.

Rounds go in turn, and figures are medians of the ratios of one round. Plain stands beside plain, and TLS beside TLS.
The client of HTTP signs what it puts (sha-256), and stands beside frames that sign, with a capability (BLAKE2b);
``token`` is the same without signatures (xxh3), and stands beside frames with a key. Nothing is signed in a get.
Large files stand also beside bare system calls: the same digest on both sides and the same sync, in one connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
import xxhash
from common import Figure, main_in_parts

from stageout.core.errors import StageoutError
from stageout.core.signing import new_key
from stageout.overlay.wire.capability import issue
from tests.harness.router import RouterProcess

_MIB = 1 << 20
_PARTS = ("memory", "disk", "small", "start", "waiting", "gets")
_DAY_S = 86_400
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: Ways of the client by frames, for each way of the client of HTTP.
_PEERS = {"signed": "frames signed", "token": "frames"}
_FRAMES = frozenset(_PEERS.values())
_LEAST = 0.9
_LEAST_BARE = 0.8


@dataclass(frozen=True)
class Run:
    """One command. :param cpu_s: of the command and of the router."""

    took_s: float
    cpu_s: float


@dataclass
class Place:
    """A router with keys for both clients, and a directory for the files of this machine."""

    router: RouterProcess
    home: Path

    def words(self, way: str, cover: str) -> tuple[list[str], str]:
        """Options of a way, and the beginning of its URLs."""
        port, keys = self.router.port, self.home / "keys"
        if way in _FRAMES:
            return ["--key", str(keys / f"{way}-{cover}.key")], f"overlay://localhost:{port}"
        scheme = "http" if cover == "plain" else "https"
        shown = ["--cacert", str(self.home / "ca.pem")]
        if way == "token":
            return [*shown, "--token", str(self.token)], f"{scheme}://localhost:{port}"
        return [*shown, "--key", str(keys / "alice.key"), "--user", "alice"], f"{scheme}://localhost:{port}"

    @property
    def token(self) -> Path:
        """Return a file with a new token."""
        file = self.home / "keys/token"
        command = [sys.executable, "-m", "stageout.cli.main", "token", str(self.home / "keys/alice.key")]
        command += ["--user", "alice", "--router", "localhost"]
        file.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return file

    def run(self, words: Sequence[str]) -> Run:
        """Run a command to its end. :raises StageoutError: it failed."""
        before_s, start_s = self._cpu_s(), time.monotonic()
        environment = {**os.environ, "_CONDOR_STAGEOUT_OVERLAY_PLAIN": "true"}
        command = [sys.executable, "-m", "stageout.cli.main", *words]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        took_s = time.monotonic() - start_s
        process.returncode = status
        if status:
            raise StageoutError(f"{' '.join(words)}: {said.decode()[:500]}")
        return Run(took_s, used.ru_utime + used.ru_stime + self._cpu_s() - before_s)

    def memory_bytes(self) -> int:
        """Return the memory of the router's processes; what they share counts once."""
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self._pids()]
        return sum(int(text.partition("\nPss:")[2].split()[0]) << 10 for text in texts)

    def _pids(self) -> set[int]:
        return {self.router.pid, *self.router.workers(), *self.router.makers()}

    def _cpu_s(self) -> float:
        return _spent_s(self._pids())


def _spent_s(pids: Iterable[int]) -> float:
    """Return the processor time of processes."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(words[11]) + int(words[12]) for words in fields) / _TICKS_PER_S


@contextmanager
def _place(folder: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir=folder, prefix="stageout-") as text:
        home, authority, key = Path(text), trustme.CA(), new_key()
        authority.cert_pem.write_to_path(str(home / "ca.pem"))
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(home / "cert.pem"))
        (home / "keys").mkdir()
        key.store("key", home / "keys/alice.key")
        secret = "not-secret-but-long-enough"
        (home / "router.keys").write_text(f"site {secret} /\nalice {key.public} /\n")
        issuer, holder = new_key(), new_key()
        (home / "issuers").write_text(f"site {issuer.public} /\n")
        signed = issue(
            issuer, holder.public, "", ("write", "read"), int(time.time()) + _DAY_S, terminals=("localhost",)
        )
        for cover, authority_line in (("plain", ""), ("TLS", f"ca {home / 'ca.pem'}\n")):
            line = f"site {secret}\n{authority_line}"
            (home / f"keys/frames-{cover}.key").write_text(line)
            (home / f"keys/frames signed-{cover}.key").write_text(f"{line}capability {signed} {holder.private}\n")
        settings = {
            "STAGEOUT_ROUTER_ISSUERS": str(home / "issuers"),
            "STAGEOUT_ROUTER_CERT": str(home / "cert.pem"), "STAGEOUT_ROUTER_KEYS": str(home / "router.keys"),
            "STAGEOUT_ROUTER_ADDRESS": "localhost", "STAGEOUT_ROUTER_HTTP_PLAIN": "true",
            "STAGEOUT_ROUTER_PEER_CONNECTIONS": "4096",
        }  # fmt: skip
        for path in (*(home / "keys").iterdir(), home / "router.keys"):
            path.chmod(0o600)
        with RouterProcess(home / "router", settings) as router:
            yield Place(router, home)


def measure(wanted: Sequence[str], quick: bool) -> list[Figure]:
    """The figures of some parts."""
    found: list[Figure] = []
    for part in wanted:
        folder = "/dev/shm" if part != "disk" else str(Path.cwd())
        with _place(folder) as place:
            if part == "small":
                found += _small(place, quick)
            elif part == "start":
                found += _start(place, quick)
            elif part == "waiting":
                found += _waiting(place, quick)
            elif part == "gets":
                found += _gets(place, quick)
            else:
                found += _large(part, place, quick)
    return found


def _rounds(ways: Mapping[str, Callable[[], Run]], count: int) -> dict[str, list[Run]]:
    """Run all ways in turn; the first round warms caches and counts nowhere."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(count + 1):
        order = list(ways)[:: 1 if number % 2 else -1]
        for name in order:
            run = ways[name]()
            if number:
                runs[name].append(run)
    return runs


def _ratio(runs: Mapping[str, list[Run]], way: str, peer: str, what: str = "took_s") -> float:
    """The median of the ratios of rates (or of costs) of one round."""
    pairs = zip(runs[way], runs[peer])
    if what == "took_s":
        return statistics.median(theirs.took_s / mine.took_s for mine, theirs in pairs)
    return statistics.median(mine.cpu_s / max(theirs.cpu_s, 1e-9) for mine, theirs in pairs)


def _large(part: str, place: Place, quick: bool) -> list[Figure]:
    size, count = (64 * _MIB, 3) if quick else (512 * _MIB, 7)
    source = place.home / "source"
    source.write_bytes(b"".join(os.urandom(_MIB) for _ in range(64)) * (size // (64 * _MIB)))
    target = place.home / "back"
    found: list[Figure] = []
    for verb in ("put", "get"):
        # A signed list has SHA-256. A get compares the digests that the router has kept.
        digest = hashlib.sha256 if verb == "put" else xxhash.xxh3_128
        ways: dict[str, Callable[[], Run]] = {
            "bare": lambda syncs=verb == "put", digest=digest: _bare(  # type: ignore[misc]
                source, place.home / "bare", syncs, digest
            )
        }
        for cover in ("plain", "TLS"):
            for way in ("frames", "frames signed", "signed", "token"):
                options, url = place.words(way, cover)
                name = f"f-{way}-{cover}"
                files = [str(source), f"{url}/{name}"] if verb == "put" else [f"{url}/{name}", str(target)]
                ways[f"{way}, {cover}"] = lambda words=(verb, *options, *files): place.run(words)  # type: ignore[misc]
        if verb == "get":
            for cover in ("plain", "TLS"):
                del ways[f"frames signed, {cover}"], ways[f"signed, {cover}"]
        runs = _rounds(ways, count)
        for cover in ("plain", "TLS"):
            for way, frames in _PEERS.items():
                name, old = f"{way}, {cover}", f"{frames}, {cover}"
                if name not in runs:
                    continue
                rate, peer = _rate(runs[name], size), _rate(runs[old], size)
                found.append(Figure(f"{part}: {verb}, {name}: rate", rate, "MB/s", old, peer))
                found.append(
                    Figure(
                        f"{part}: {verb}, {name}: of the frames' rate",
                        _ratio(runs, name, old),
                        "",
                        goal=_LEAST,
                        more=True,
                    )
                )
                cpu = _ratio(runs, name, old, "cpu_s")
                found.append(Figure(f"{part}: {verb}, {name}: of the frames' processor", cpu, ""))
        way = "signed, plain" if verb == "put" else "token, plain"
        bare = _ratio(runs, way, "bare")
        found.append(Figure(f"{part}: {verb}, {way}: of bare calls", bare, "", goal=_LEAST_BARE, more=True))
        found.append(Figure(f"{part}: {verb}, bare calls: rate", _rate(runs["bare"], size), "MB/s"))
    return found


def _rate(runs: Sequence[Run], size: int) -> float:
    return statistics.median(size / run.took_s / 1e6 for run in runs)


def _bare(source: Path, target: Path, syncs: bool, digest: Callable[[memoryview], Any]) -> Run:
    """Two processes and one connection: read, digest, send; receive, digest, write, sync."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near, (far, _) = socket.create_connection(listening.getsockname()), listening.accept()
    before, start_s = os.times(), time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            near.close()
            _receive(far, target, syncs, digest)
        finally:
            os._exit(0)
    far.close()
    memory = memoryview(bytearray(_MIB))
    with source.open("rb", buffering=0) as file:
        offset = 0
        while count := file.readinto(memory):
            digest(memory[:count]).digest()
            end = offset + count
            while offset < end:
                offset += os.sendfile(near.fileno(), file.fileno(), offset, end - offset)
    near.shutdown(socket.SHUT_WR)
    near.recv(1)
    took_s = time.monotonic() - start_s
    near.close()
    _, status, used = os.wait4(pid, 0)
    if status:
        raise StageoutError("the bare receiver failed")
    after = os.times()
    return Run(took_s, after.user + after.system - before.user - before.system + used.ru_utime + used.ru_stime)


def _receive(sock: socket.socket, target: Path, syncs: bool, digest: Callable[[memoryview], Any]) -> None:
    memory, filled = memoryview(bytearray(_MIB)), 0
    with target.open("wb", buffering=0) as file:
        while True:
            count = sock.recv_into(memory[filled:])
            filled += count
            if filled == _MIB or (not count and filled):
                digest(memory[:filled]).digest()
                file.write(memory[:filled])
                filled = 0
            if not count:
                break
        if syncs:
            os.fdatasync(file.fileno())
    sock.sendall(b".")


def _small(place: Place, quick: bool) -> list[Figure]:
    found: list[Figure] = []
    for size, number in ((4096, 5000), (100 << 10, 2000), (_MIB, 300)):
        number = number // 10 if quick else number
        tree = place.home / f"tree{size}"
        tree.mkdir()
        for at in range(number):
            (tree / f"f{at}").write_bytes(os.urandom(size))
        for verb, pair in (("put", ("frames signed", "signed")), ("get", ("frames", "token"))):
            ways: dict[str, Callable[[], Run]] = {}
            for cover in ("plain", "TLS"):
                for at, way in enumerate(pair):
                    options, url = place.words(way, cover)
                    there, back = f"{url}/t{size}-{at}-{cover}", str(place.home / f"back{size}")
                    files = [str(tree), there] if verb == "put" else [there, back]
                    words = (verb, "-r", *options, *files)
                    ways[f"{way}, {cover}"] = lambda words=words: place.run(words)  # type: ignore[misc]
            runs = _rounds(ways, 2 if quick else 5)
            for cover in ("plain", "TLS"):
                old, name = (f"{way}, {cover}" for way in pair)
                what = f"small: {verb} of {size // 1024} KiB, {cover}"
                rates = [number / statistics.median(run.took_s for run in runs[one]) for one in (name, old)]
                found.append(Figure(f"{what}: rate", rates[0], "1/s", old, rates[1]))
                ratio = _ratio(runs, name, old)
                found.append(Figure(f"{what}: of the frames' rate", ratio, "", goal=_LEAST, more=True))
    return found


def _start(place: Place, quick: bool) -> list[Figure]:
    file = place.home / "one"
    file.write_bytes(b"1")
    ways: dict[str, Callable[[], Run]] = {}
    for cover in ("plain", "TLS"):
        for way in ("frames", "signed", "token"):
            options, url = place.words(way, cover)
            words = ("put", *options, str(file), f"{url}/one-{way}-{cover}")
            ways[f"{way}, {cover}"] = lambda words=words: place.run(words)  # type: ignore[misc]
    ways["python"] = lambda: _python(place)
    runs = _rounds(ways, 5 if quick else 21)
    found = []
    for cover in ("plain", "TLS"):
        old = 1e3 * statistics.median(run.took_s for run in runs[f"frames, {cover}"])
        for way in ("signed", "token"):
            took = 1e3 * statistics.median(run.took_s for run in runs[f"{way}, {cover}"])
            goal = 100.0 if (way, cover) == ("token", "TLS") else None
            found.append(Figure(f"start: put of a byte, {way}, {cover}", took, "ms", f"frames, {cover}", old, goal))
    python = 1e3 * statistics.median(run.took_s for run in runs["python"])
    found.append(Figure("start: Python that does nothing", python, "ms"))
    return found


def _connected(place: Place) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(place.home / "ca.pem"))
    raw = socket.create_connection(("127.0.0.1", place.router.port))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(raw, server_hostname="localhost")


def _head(place: Place, method: str, target: str, body: bytes = b"", **fields: str) -> bytes:
    told = {"Host": "localhost", "Authorization": f"Bearer {place.token.read_text().strip()}", **fields}
    if body:
        told["Content-Length"] = str(len(body))
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in told.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _waiting(place: Place, quick: bool) -> list[Figure]:
    """Memory of clients that wait for the end of an operation, each on a connection of its own, in TLS."""
    count, origin, now = 200 if quick else 2000, os.urandom(16).hex(), int(time.time())
    fields = {
        "origin": origin, "seq": 1, "kind": "file", "path": "/waited-for", "second": "", "terminal": "localhost",
        "made": now, "expires": now + 3600, "size": _MIB, "mode": 0o644, "mtime": now, "after": [], "all_below": 0,
        "precondition": "", "block_kind": "sha-256", "digest_kind": "sha-256",
    }  # fmt: skip
    target = f"/.stageout/v1/o/{origin}/1"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(_connected(place)))
        first.sendall(_head(place, "PUT", target, json.dumps(fields).encode(), Content_Type="application/json"))
        if not (said := first.recv(65536)).startswith(b"HTTP/1.1 201"):
            raise StageoutError(f"{said.decode()[:500]}")
        before = place.memory_bytes()
        ask = _head(place, "GET", target, Prefer="wait=60")
        for _ in range(count):
            stack.enter_context(contextlib.closing(_connected(place))).sendall(ask)
        used = before
        while (now_used := place.memory_bytes()) > used:  # while the last of them are met
            used = now_used
            time.sleep(1)
        return [Figure(f"waiting: memory of {count} clients", (used - before) / 1e6, "MB", goal=100.0)]


def _gets(place: Place, quick: bool) -> list[Figure]:
    """GETs of 4 KiB over four connections in TLS, eight on their way on each."""
    (place.router.root / "small").write_bytes(os.urandom(4096))
    count, deep, ends = 500 if quick else 5000, 8, []
    ask = _head(place, "GET", "/small")

    def client() -> None:
        with contextlib.closing(_connected(place)) as connection:
            reader = connection.makefile("rb")
            for _ in range(count // deep):
                connection.sendall(ask * deep)
                for _ in range(deep):
                    size = 0
                    while (line := reader.readline()) != b"\r\n":
                        if line.lower().startswith(b"content-length:"):
                            size = int(line.partition(b":")[2])
                    ends.append(len(reader.read(size)))

    daemon_s, start_s = _spent_s([place.router.pid]), time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - start_s
    if ends != [4096] * (4 * (count // deep) * deep):
        raise StageoutError("a GET had another body")
    rate = len(ends) / took_s
    share = (_spent_s([place.router.pid]) - daemon_s) / len(ends) * 5000
    return [
        Figure("gets: of 4 KiB, in TLS, beside their client on the same cores: rate", rate, "1/s"),
        Figure("gets: share of a core that the daemon has at 5,000 GETs/s", share, "", goal=0.3),
    ]


def _python(place: Place) -> Run:
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return Run(time.monotonic() - start_s, 0.0)


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_http", _PARTS, measure))
