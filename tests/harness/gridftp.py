"""A real GridFTP server on the loopback interface, for tests and benchmarks: anonymous, or with GSI.

>>> with GridFtpServer(Path("/tmp/somewhere")) as server:                     # doctest: +SKIP
...     url = server.url("run7/out.root")
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from stageout.core.errors import StageoutError
from tests.harness.ports import free_ports

_PROGRAM = "globus-gridftp-server"
_START_S = 20.0


@dataclass
class GridFtpServer:
    """One server and the directory behind it.

    :param home: its directory; files appear below ``home/files``. :param port: TCP port; a free one when 0.
    :param gsi: environment for GSI (``X509_CERT_DIR``, ``X509_USER_CERT``, ``X509_USER_KEY``, ``GRIDMAP``); empty:
        everybody is anonymous.
    :param address: to listen on. :param wrapper: put before the command, such as ``ip netns exec NAME``.
    :param no_checksums: the server is not to offer CKSM.
    """

    home: Path
    port: int = 0
    gsi: dict[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"
    wrapper: tuple[str, ...] = ()
    no_checksums: bool = False
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> GridFtpServer:
        self.files.mkdir(parents=True, exist_ok=True)
        if os.getuid() == 0 and not self.gsi:
            shutil.chown(self.files, "nobody", "nogroup")
        self.port = self.port or free_ports(1)[0]
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def files(self) -> Path:
        """The directory that it serves."""
        return self.home / "files"

    @property
    def pid(self) -> int:
        """Of the server, 0 when it does not run; sessions are its children."""
        return self._process.pid if self._process else 0

    def url(self, path: str = "") -> str:
        """Address of a path."""
        scheme = "gsiftp" if self.gsi else "ftp"
        host = "localhost" if self.gsi else self.address
        return f"{scheme}://{host}:{self.port}{self.files}/{path.lstrip('/')}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        program = shutil.which(_PROGRAM, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            raise StageoutError(
                f"{_PROGRAM} is not installed; tools/install does it (as root), or: "
                "apt-get install globus-gridftp-server-progs globus-gass-copy-progs"
            )
        user = ["-anonymous-user", "nobody"] if os.getuid() == 0 else []
        mode = ["-allow-disabled-login", "-hostname", "localhost"] if self.gsi else ["-aa", *user]
        mode += ["-disable-command-list", "CKSM"] if self.no_checksums else []
        addresses = ["-control-interface", self.address, "-data-interface", self.address]
        restricted = ["-rp", f"RW{self.files}", "-home-dir", "/"]
        logs = ["-d", "error,warn", "-l", str(self.home / "server.log")]
        self._process = subprocess.Popen(
            [*self.wrapper, program, "-s", *mode, *addresses, "-p", str(self.port), *restricted, *logs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath), **self.gsi},
            start_new_session=True,
        )
        deadline_s = time.monotonic() + _START_S
        while not self._answers():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                self.stop()
                raise StageoutError(f"{_PROGRAM} did not start, see {self.home}/server.log")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it and its sessions."""
        if self._process is not None:
            for pid in [*_children(self._process.pid), self._process.pid]:
                _kill(pid)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        if self.wrapper:  # in a namespace of its own it cannot be reached from here
            probe = f"import socket; socket.create_connection(({self.address!r}, {self.port}), 1)"
            command = [*self.wrapper, "python3", "-c", probe]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            socket.create_connection((self.address, self.port), 1).close()
        except OSError:
            return False
        return True


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return
