"""10,000 files of 4 KiB back from a router, beside tar to tar and every peer that is installed here, in the same run.

All servers are on the loopback interface, and have the same files. curl and tar know the names before; ``get -r``, the
copy with ``get_many``, globus-url-copy and xrdcp ask for them. Files are whole and checked under their names here with
ours; nothing is checked by the peers. On the disk everybody's time includes a ``sync`` of what came. The best tool
beside ours is chosen anew in each round, and ratios are of that round.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from common import Figure, main_in_parts
from overlay_small_files import COMMAND_BACK, FILES, OURS, SIZE_BYTES, TAR, figures_of, new_disk, rounds_of, run
from routers import peers

from stageout.core.errors import StageoutError, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.gatherer import Wanted
from stageout.overlay.key_file import read_key
from stageout.overlay.many import below, get_many, put_many
from stageout.overlay.operations import Session
from tests.harness.destination import Destination
from tests.harness.gridftp import GridFtpServer
from tests.harness.router import RouterProcess

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("memory", "disk")


class Back:
    """A directory of small files at every server, and everybody who can bring it here."""

    def __init__(self, folder: Path, files: int, stack: ExitStack) -> None:
        folder.chmod(0o755)
        self.files, self._folder = files, folder
        self._source, self._into = folder / "source", folder / "back"
        for place in (self._source, self._into):
            place.mkdir()
        self._names = [f"file{number:05}" for number in range(files)]
        for name in self._names:
            (self._source / name).write_bytes(os.urandom(SIZE_BYTES))
        self._router = stack.enter_context(RouterProcess(folder / "router"))
        self._gateway = Gateway("127.0.0.1", self._router.port, *read_key(self._router.key_file("site")))
        put_many(self._gateway, ((one, one.local, f"source/{one.path}") for one in below(self._source)), _arrived)
        self.ways: dict[str, Callable[[str], None]] = {OURS: self._ours, COMMAND_BACK: self._command, TAR: self._tar}
        if shutil.which("globus-url-copy"):
            self._gridftp = stack.enter_context(GridFtpServer(folder / "gridftp"))
            self._copied_to(self._gridftp.files)
            self.ways["globus-url-copy -pp -cc 4"] = self._globus
        if shutil.which("xrdcp") and shutil.which("xrootd"):
            self._xrootd_port = stack.enter_context(peers.xrootd(folder))
            self._copied_to(folder / "xrootd")
            self.ways["xrdcp -r --parallel 4"] = self._xrdcp
        if shutil.which("curl"):
            self._web = stack.enter_context(Destination(folder / "web"))
            self._copied_to(self._web.file(""))
            self.ways["curl --parallel-max 8"] = self._curl

    def _copied_to(self, place: Path) -> None:
        shutil.copytree(self._source, place / "source")

    def time_s(self, way: str, into: str) -> float:
        """Wall time of one way to bring everything, and of the sync of it; the copy is removed afterwards."""
        self._sync()
        start_s = time.perf_counter()
        self.ways[way](into)
        self._sync()
        took_s = time.perf_counter() - start_s
        copies = sorted(path for path in self._into.glob(f"{into}/**/*") if path.is_file())
        if [path.stat().st_size for path in copies] != [SIZE_BYTES] * self.files:
            raise StageoutError(f"{way} did not bring all {self.files} files")
        shutil.rmtree(self._into / into)
        return took_s

    def _sync(self) -> None:
        run(["sync", "-f", str(self._folder)])

    def _ours(self, into: str) -> None:
        (self._into / into).mkdir()
        with Session(self._gateway) as session:
            get_many(self._gateway, self._wanted(session, self._into / into), _arrived)

    def _wanted(self, session: Session, into: Path) -> Iterator[Wanted[str]]:
        listed = [(entry.name, entry.size_bytes) for entry in session.entries("source")]
        return ((name, f"source/{name}", f"{into}/{name}", size_bytes) for name, size_bytes in listed)

    def _command(self, into: str) -> None:
        url, key = f"overlay://127.0.0.1:{self._router.port}/source", str(self._router.key_file("site"))
        command = [sys.executable, "-m", "stageout.cli.main", "get", "-r", url, str(self._into / into), "--key", key]
        run(command, self._folder / "bytecode")

    def _tar(self, into: str) -> None:
        (self._into / into).mkdir()
        run(["sh", "-c", f"tar -C '{self._source}' -cf - . | tar -C '{self._into / into}' -xf -"])

    def _globus(self, into: str) -> None:
        there, here = self._gridftp.url("source/"), f"file://{self._into / into}/"
        run(["globus-url-copy", "-q", "-cd", "-r", "-pp", "-cc", "4", there, here])

    def _xrdcp(self, into: str) -> None:
        (self._into / into).mkdir()
        url = f"root://127.0.0.1:{self._xrootd_port}//source"
        run(["xrdcp", "-s", "-r", "--parallel", "4", url, str(self._into / into)])

    def _curl(self, into: str) -> None:
        here, there = self._into / into, self._web.url("source")
        here.mkdir()
        lines = [f'url = "{there}/{name}"\noutput = "{here / name}"' for name in self._names]
        config = self._folder / "curl.config"
        config.write_text("\nnext\nfail\nsilent\n".join(["fail\nsilent", *lines]) + "\n")
        run(["curl", "--parallel", "--parallel-max", "8", "--config", str(config)])


def _arrived(key: object, result: object) -> None:
    """Called for each file. :raises TransferFailure: it has not."""
    if isinstance(result, TransferFailure):
        raise result


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    """The figures of some parts."""
    rounds, files = (3, FILES // 4) if quick else (8, FILES)
    figures: list[Figure] = []
    for part in parts:
        if part == "memory" and not Path("/dev/shm").is_dir():
            continue
        parent = "/dev/shm" if part == "memory" else "/var/tmp"
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageout-bench-", dir=parent)))
            folder.chmod(0o755)  # servers have users of their own
            folder = folder if part == "memory" else stack.enter_context(new_disk(folder))
            servers = stack.enter_context(ExitStack())
            figures += figures_of(part, rounds_of(Back(folder, files, servers), rounds), None, None)
    return figures


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_small_back", PARTS, measure))
