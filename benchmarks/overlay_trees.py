"""A tree of 20,000 files of 1 KiB in 1,653 directories over 30 ms and 50 MB/s, beside rsync on the same link.

``put -r`` to a router, ``get -r`` from it, both again with ``--update`` when nothing has changed, and ``rm -r``; the
same with the client of HTTP (``https``), and with an rsync daemon. ``rm`` is one for both clients. All are processes on
the near side, so their start counts. They take turns, and ratios are of one round. Files of the overlay are on the far
disk under their names when ``put -r`` ends; those of rsync need not be.
Needs root and rsync.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trustme
from common import Figure, main
from overlay_small_files import new_disk, run

from stageout.core.errors import StageoutError
from stageout.core.signing import new_key
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

LINK = Link(50e6, 0.030)
FILES, DIRECTORIES, SIZE_BYTES = 20_000, 1653, 1024
_INNER = 12
PUT, PUT_AGAIN, GET, GET_AGAIN, REMOVE = STEPS = (
    "put -r", "put -r --update, nothing to do", "get -r", "get -r --update, nothing to do", "rm -r",
)  # fmt: skip
GOAL = 1.5
#: Times that lie closer together differ by less than the resolution of ``--update``.
_MARGIN_S = 6.0
_WAYS = ("frames", "https", "rsync")
_PORT = 8730
_SECRET = "not-secret-but-long-enough"
_START_S = 30.0


def make_tree(place: Path, files: int, directories: int) -> None:
    """Directories of up to twelve each, and as many files in each of them."""
    made = [place]
    for number in range(1, directories):
        made.append(made[(number - 1) // _INNER] / f"directory{number}")
    for directory in made:
        directory.mkdir()
    for number in range(files):
        (made[number % directories] / f"file{number:05}").write_bytes(os.urandom(SIZE_BYTES))


class Trees:
    """A tree here, a router and an rsync daemon on the far side."""

    def __init__(self, folder: Path, area: WideArea, files: int, directories: int, stack: ExitStack) -> None:
        self._folder, self._near, self._files = folder, area.near, files
        self._source, self._empty = folder / "source", folder / "empty"
        make_tree(self._source, files, directories)
        self._empty.mkdir()
        authority, key = trustme.CA(), new_key()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        authority.issue_cert(area.far_address).private_key_and_cert_chain_pem.write_to_path(str(folder / "cert.pem"))
        key.store("key", folder / "alice.key")
        (folder / "router.keys").write_text(f"site {_SECRET} /\nalice {key.public} /\n")
        (folder / "site.key").write_text(f"site {_SECRET}\n")
        for name in ("alice.key", "router.keys", "site.key"):
            (folder / name).chmod(0o600)
        settings = {
            "STAGEOUT_ROUTER_HOST": area.far_address, "STAGEOUT_ROUTER_ADDRESS": area.far_address,
            "STAGEOUT_ROUTER_CERT": str(folder / "cert.pem"), "STAGEOUT_ROUTER_KEYS": str(folder / "router.keys"),
        }  # fmt: skip
        self._router = stack.enter_context(RouterProcess(folder / "router", settings, wrapper=area.far))
        stack.enter_context(_rsync_daemon(folder / "rsync", area))
        place = f"{area.far_address}:{self._router.port}"
        self._urls = {"frames": f"overlay://{place}/tree", "https": f"https://{place}/tree-https"}
        self._keys = {
            "frames": ["--key", str(folder / "site.key")],
            "https": ["--key", str(folder / "alice.key"), "--user", "alice", "--cacert", str(folder / "ca.pem")],
        }
        self._rsync_url = f"rsync://{area.far_address}:{_PORT}/all/tree/"
        time.sleep(_MARGIN_S)

    def frames(self, step: str) -> None:
        """One step with the client by frames. :raises StageoutError: it did something else."""
        self._ours("frames", step)

    def https(self, step: str) -> None:
        """One step with the client of HTTP. :raises StageoutError: it did something else."""
        self._ours("https", step)

    def _ours(self, way: str, step: str) -> None:
        into, url = str(self._folder / f"back-{way}"), self._urls[way]
        if step == REMOVE:
            url, way = url.replace("https://", "overlay://"), "frames"
        words = {
            PUT: ["put", "-r", str(self._source), url],
            GET: ["get", "-r", url, into],
            REMOVE: ["rm", "-r", url],
        }[step.replace(" --update, nothing to do", "")]
        more = ["--update"] if "--update" in step else []
        program = [*self._near, sys.executable, "-m", "stageout.cli.main"]
        said = run([*program, *words, *more, *self._keys[way]], self._folder / "bytecode")
        done = f"{self._files} were there already" if more else f": {self._files} files, "
        if step != REMOVE and done not in said:
            raise StageoutError(f"{step}: {said}")

    def rsync(self, step: str) -> None:
        """The same with rsync."""
        source, there, back = f"{self._source}/", self._rsync_url, f"{self._folder}/back-rsync/"
        words = {PUT: [source, there], PUT_AGAIN: [source, there], GET: [there, back], GET_AGAIN: [there, back]}
        said = run([*self._near, "rsync", "-a", "--stats", "--delete", *words.get(step, [f"{self._empty}/", there])])
        if "--update" in step and "files transferred: 0\n" not in said:
            raise StageoutError(f"rsync, {step}: {said}")

    def clear(self) -> None:
        """Remove what came back."""
        for name in ("back-frames", "back-https", "back-rsync"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        run(["sync", "-f", str(self._folder)])


@contextmanager
def _rsync_daemon(folder: Path, area: WideArea) -> Iterator[None]:
    files = folder / "files"
    files.mkdir(parents=True)
    config = folder / "rsyncd.conf"
    config.write_text(f"use chroot = no\nuid = root\ngid = root\n[all]\npath = {files}\nread only = no\n")
    log = folder / "log"
    command = ["rsync", "--daemon", "--no-detach", f"--config={config}", f"--port={_PORT}", f"--log-file={log}"]
    with subprocess.Popen([*area.far, *command, f"--address={area.far_address}"], stdin=subprocess.DEVNULL) as daemon:
        try:
            ask = [*area.near, "rsync", f"rsync://{area.far_address}:{_PORT}/"]
            end_s = time.monotonic() + _START_S
            while subprocess.run(ask, capture_output=True, check=False).returncode:
                if daemon.poll() is not None or time.monotonic() > end_s:
                    raise StageoutError(f"rsync --daemon does not answer: {log}")
                time.sleep(0.1)
            yield
        finally:
            daemon.terminate()


def _timed(step: Callable[[str], None], name: str) -> float:
    start_s = time.perf_counter()
    step(name)
    return time.perf_counter() - start_s


def measure(quick: bool) -> list[Figure]:
    """Each step of ours and of rsync, in turn."""
    if os.geteuid() or not shutil.which("rsync"):
        raise StageoutError("this needs root, for network namespaces, and rsync")
    rounds, files, directories = (2, FILES // 10, DIRECTORIES // 4) if quick else (5, FILES, DIRECTORIES)
    took: dict[str, dict[str, list[float]]] = {
        way: {step: [] for step in STEPS} for way in ("frames", "https", "rsync")
    }
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="stageout-bench-", dir="/var/tmp"))
        area = stack.enter_context(WideArea(LINK))
        folder = stack.enter_context(new_disk(Path(name)))
        trees = Trees(folder, area, files, directories, stack.enter_context(ExitStack()))
        for _ in range(rounds):
            for step in STEPS:
                if step == GET:
                    time.sleep(_MARGIN_S)
                for way, seconds in took.items():
                    seconds[step].append(_timed(getattr(trees, way), step))
                print(
                    f"{step}: {', '.join(f'{way} {seconds[step][-1]:.2f} s' for way, seconds in took.items())}",
                    flush=True,
                )
            trees.clear()
    figures = []
    peers = took.pop("rsync")
    for way, seconds in took.items():
        for step in STEPS:
            ratio = statistics.median(mine / other for mine, other in zip(seconds[step], peers[step]))
            name = f"{way}: {step}"
            figures += [
                Figure(name, statistics.median(seconds[step]), "s", "rsync", statistics.median(peers[step])),
                Figure(f"{name}: of rsync's time", ratio, "ratio", goal=None if step == PUT else GOAL),
            ]
    return figures


if __name__ == "__main__":
    sys.exit(main("overlay_trees", measure))
