"""A real WebDAV server behind a narrow link, for the demonstration, benchmarks and tests.

The server is WsgiDAV on cheroot, in a process of its own; it needs neither root nor packages of the system. All
connections together get ``rate_mb_s`` in each direction, shared block by block in the order of asking, so every
connection gets the same. A file appears under its name only when it is whole. Every transfer is recorded with the
wall clock when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Callable

from stageout.core.errors import StageoutError

LINK_MB_S = 12.5
"""A link of 100 Mbit/s."""

_BLOCK_BYTES = 65536
_BURST_BLOCKS = 2
_START_TIMEOUT_S = 30.0


class DestinationError(StageoutError):
    """The server did not start, and why."""


@dataclass(frozen=True)
class Transfer:
    """One request with a body, as the server saw it.

    :param method: PUT or GET. :param path: as in the URL.
    :param start_s: wall clock at the request. :param end_s: when its last byte was there.
    :param size_bytes: of the body. :param status: HTTP status.
    """

    method: str
    path: str
    start_s: float
    end_s: float
    size_bytes: int
    status: int


class NarrowDestination:
    """Runs the server; a context manager. Collections on the way to a file are made as it is put.

    :param root: directory that the server shows; made when it is not there.
    :param rate_mb_s: MB (10^6 bytes) per second in each direction, all connections together; 0: no limit.
    """

    def __init__(self, root: Path, rate_mb_s: float = LINK_MB_S) -> None:
        self.root = root
        self.rate_mb_s = rate_mb_s
        self.port = 0
        self._records = root.with_name(f"{root.name}.transfers")
        self._log = root.with_name(f"{root.name}.log")
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NarrowDestination:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> NarrowDestination:
        """Start the server (again on the same port after :meth:`close`) and return when it listens.

        :raises DestinationError: it did not start; the text ends with what it said.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", __name__, str(self.root), str(self._records)]
        command += [f"--rate={self.rate_mb_s}", f"--port={self.port}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with open(self._log, "ab") as log:
            self._child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self._child.stdout is not None
        line = _first_line(self._child.stdout)
        if not line:
            self.close()
            raise DestinationError(f"The destination did not start: {self._log.read_text()[-1000:]}")
        self.port = int(line)
        return self

    def close(self) -> None:
        """End the server at once; files that were being written are gone at its next start."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()

    def set_rate(self, rate_mb_s: float) -> None:
        """Make the link faster or slower, transfers that are under way included.

        :param rate_mb_s: MB (10^6 bytes) per second in each direction; 0: no limit.
        """
        assert self._child is not None and self._child.stdin is not None
        self.rate_mb_s = rate_mb_s
        self._child.stdin.write(f"{rate_mb_s}\n".encode())
        self._child.stdin.flush()

    def most_uploads_at_once(self) -> int:
        """Most uploads that were under way at the same time, those that were cut off not counted."""
        uploads = [transfer for transfer in self.transfers() if transfer.method == "PUT"]
        changes = sorted([(one.start_s, 1) for one in uploads] + [(one.end_s, -1) for one in uploads])
        return max(itertools.accumulate(change for _, change in changes), default=0)

    def transfers(self) -> list[Transfer]:
        """All ended transfers, oldest first; those that were cut off are not among them."""
        if not self._records.exists():
            return []
        lines = self._records.read_text().splitlines()
        return [Transfer(**json.loads(line)) for line in lines]

    def cpu_s(self) -> float:
        """CPU seconds that the server has used."""
        assert self._child is not None
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _first_line(stream: IO[bytes]) -> bytes:
    """First line, or b"" when the stream ends or nothing comes in time."""
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(_START_TIMEOUT_S)
    return found[0] if found else b""


# ---- the server's process ------------------------------------------------------------------------------------------


class Link:
    """Shares a rate between threads: each block waits for its turn, in the order of asking.

    :param rate_mb_s: 0 for no limit.
    """

    def __init__(self, rate_mb_s: float) -> None:
        self.rate_mb_s = rate_mb_s
        self._lock = threading.Lock()
        self._free_at_s = time.monotonic()

    def take(self, size_bytes: int) -> None:
        """Return when that many bytes may pass."""
        rate_bytes_s = self.rate_mb_s * 1e6
        if not rate_bytes_s:
            return
        with self._lock:
            # A late sleeper may catch up by two blocks; more would be a burst.
            earliest_s = time.monotonic() - _BURST_BLOCKS * _BLOCK_BYTES / rate_bytes_s
            start_s = max(self._free_at_s, earliest_s)
            self._free_at_s = start_s + size_bytes / rate_bytes_s
        time.sleep(max(0.0, start_s - time.monotonic()))


class _SlowBody:
    """A request's body that passes the link as it is read."""

    def __init__(self, stream: Any, link: Link) -> None:
        self._stream = stream
        self._link = link
        self.size_bytes = 0

    def read(self, size: int = _BLOCK_BYTES) -> bytes:
        data: bytes = self._stream.read(min(size, _BLOCK_BYTES) if size >= 0 else _BLOCK_BYTES)
        self._link.take(len(data))
        self.size_bytes += len(data)
        return data


class NarrowServer:
    """WSGI middleware: the link's rate, whole files only, and the records.

    :param app: the WebDAV application that writes below `root`.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], root: Path, records: Path, rate_mb_s: float) -> None:
        self._app = app
        self._root = root
        self._records = records
        self._lock = threading.Lock()
        self.links = self._in, self._out = Link(rate_mb_s), Link(rate_mb_s)
        self._numbers = itertools.count()
        for left in root.rglob(".*.part"):
            left.unlink()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        method = environ["REQUEST_METHOD"]
        if method == "PUT":
            return self._put(environ, start_response)
        if method == "GET":
            return self._get(environ, start_response)
        return self._app(environ, start_response)

    def _put(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Let the application write under another name, and rename: nobody sees half a file."""
        start_s, path = time.time(), environ["PATH_INFO"]
        aside = f"{path.rpartition('/')[0]}/.{next(self._numbers)}.part"
        length = int(environ.get("CONTENT_LENGTH") or -1)
        body = environ["wsgi.input"] = _SlowBody(environ["wsgi.input"], self._in)
        environ["PATH_INFO"] = aside
        answer: list[Any] = []
        self._file(aside).parent.mkdir(parents=True, exist_ok=True)
        try:
            text = b"".join(self._app(environ, lambda *given: answer.extend(given)))
            status = int(answer[0].split()[0])
            if status in (201, 204):
                if length not in (-1, body.size_bytes):
                    raise ConnectionError(f"{path}: {body.size_bytes} of {length} bytes came")
                self._file(aside).replace(self._file(path))
                self._record("PUT", path, start_s, body.size_bytes, status)
        finally:
            self._file(aside).unlink(missing_ok=True)
        start_response(*answer)
        return [text]

    def _get(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_s, size, status = time.time(), 0, [0]

        def started(line: str, *rest: Any) -> Any:
            status[0] = int(line.split()[0])
            return start_response(line, *rest)

        for block in self._app(environ, started):
            self._out.take(len(block))
            size += len(block)
            yield block
        self._record("GET", environ["PATH_INFO"], start_s, size, status[0])

    def _record(self, method: str, path: str, start_s: float, size_bytes: int, status: int) -> None:
        transfer = Transfer(method, path, start_s, time.time(), size_bytes, status)
        with self._lock, open(self._records, "a") as stream:
            stream.write(json.dumps(asdict(transfer)) + "\n")

    def _file(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def serve(root: Path, records: Path, port: int, rate_mb_s: float) -> None:
    """Serve until standard input ends; prints the port when it listens. A line of standard input is a new rate."""
    from cheroot import wsgi
    from wsgidav.fs_dav_provider import FilesystemProvider
    from wsgidav.wsgidav_app import WsgiDAVApp

    app = WsgiDAVApp(
        {
            "provider_mapping": {"/": FilesystemProvider(str(root), fs_opts={})},
            "simple_dc": {"user_mapping": {"*": True}},
            "block_size": _BLOCK_BYTES,
            "verbose": 1,
        }
    )
    narrow = NarrowServer(app, root, records, rate_mb_s)
    server = wsgi.Server(("127.0.0.1", port), narrow, numthreads=32, timeout=120, shutdown_timeout=1)
    server.prepare()
    # A deep buffer would take megabytes at once, which no narrow link does.
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _BLOCK_BYTES)
    print(server.bind_addr[1], flush=True)
    threading.Thread(target=_obey, args=(narrow.links,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()


def _obey(links: Iterable[Link]) -> None:
    """Take new rates over; end with the parent."""
    for line in sys.stdin:
        for link in links:
            link.rate_mb_s = float(line)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Command line of the server's process."""
    parser = argparse.ArgumentParser(description="A WebDAV server behind a narrow link.")
    parser.add_argument("root", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, default=LINK_MB_S, help="MB/s in all, each direction; 0: no limit")
    given = parser.parse_args()
    serve(given.root, given.records, given.port, given.rate)


if __name__ == "__main__":
    main()
