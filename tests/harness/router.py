"""A real router on this machine, for tests and demonstrations."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from stageout.core.errors import StageoutError
from stageout.overlay.wire.route import written
from tests.harness.pool.waiting import wait_until

_SECRET = "not-secret-but-long-enough"


def relay(
    home: Path, neighbours: Iterable[RouterProcess | str], wrapper: tuple[str, ...] = (), host: str = "127.0.0.1"
) -> RouterProcess:
    """A router without a root that passes circuits on to these routers (running ones, or addresses)."""
    allowed = (one if isinstance(one, str) else one.address for one in neighbours)
    return RouterProcess(
        home,
        {
            "STAGEOUT_ROUTER_ROOT": "",
            "STAGEOUT_ROUTER_NEIGHBOURS": ", ".join(allowed),
            "STAGEOUT_ROUTER_KEY": str(home / "hop.key"),
            "STAGEOUT_ROUTER_HOST": host,
        },
        wrapper=wrapper,
    )


def custodian_for(
    home: Path, terminals: Iterable[RouterProcess], environment: dict[str, str] | None = None
) -> RouterProcess:
    """A router with a root of its own that takes custody for these running routers, and trusts the same issuers."""
    for_these = list(terminals)
    names = " ".join(one.address for one in for_these)
    issuers = next(filter(None, (one.environment.get("STAGEOUT_ROUTER_ISSUERS") for one in for_these)), "")
    settings = {
        "STAGEOUT_ROUTER_TERMINALS": names,
        "STAGEOUT_ROUTER_KEY": str(home / "site.key"),
        "STAGEOUT_ROUTER_ISSUERS": issuers,
    }
    return RouterProcess(home, {**settings, **(environment or {})})


@dataclass
class RouterProcess:
    """A router below a directory; :attr:`port` stays the same over restarts.

    :param home: its root, records, keys and log lie below it.
    :param environment: further settings. :param wrapper: put before the command, such as ``ip netns exec NAME``.
    """

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    wrapper: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> RouterProcess:
        self.root.mkdir(parents=True, exist_ok=True)
        keys = self.home / "keys"
        keys.write_text(f"site {_SECRET} /\nsmall {_SECRET} small\nhop {_SECRET} - router\n"
                        f"carrier {_SECRET} / router\n")  # fmt: skip
        keys.chmod(0o600)
        for name in ("hop", "site", "small", "carrier"):
            self.key_file(name)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """As it stands in a route."""
        return f"127.0.0.1:{self.port}"

    @property
    def own_address(self) -> str:
        """As it names itself, and capabilities name it."""
        return self.environment.get("STAGEOUT_ROUTER_ADDRESS") or written(socket.getfqdn(), self.port)

    @property
    def root(self) -> Path:
        """Files arrive below it."""
        return self.home / "root"

    @property
    def log(self) -> str:
        """Return the log since the router's first start."""
        return (self.home / "log").read_text() if (self.home / "log").exists() else ""

    @property
    def pid(self) -> int:
        """Of the daemon; 0 when it does not run."""
        return self._process.pid if self._process else 0

    def key_file(self, name: str) -> Path:
        """A client's file with that key."""
        path = self.home / f"{name}.key"
        path.write_text(f"{name} {_SECRET}\n")
        path.chmod(0o600)
        return path

    def workers(self) -> list[int]:
        """Pids of its worker processes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def makers(self) -> list[int]:
        """Pids of its processes that make small files."""
        children = [pid for one in Path(f"/proc/{self.pid}/task").glob("*/children") for pid in one.read_text().split()]
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        return [pid for pid, command in commands.items() if b"'overlay_router.local.maker'" in command]

    @property
    def _command(self) -> list[str]:
        return [*self.wrapper, sys.executable, "-m", "overlay_router.daemon", "--alone"]

    @property
    def _settings(self) -> dict[str, str]:
        return {
            **os.environ,
            "STAGEOUT_ROUTER_ROOT": str(self.root),
            "STAGEOUT_ROUTER_DIR": str(self.home / "records"),
            "STAGEOUT_ROUTER_HOST": "127.0.0.1",
            "STAGEOUT_ROUTER_PORT": str(self.port),
            "STAGEOUT_ROUTER_KEYS": str(self.home / "keys"),
            **self.environment,
        }

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """The same program with these options, to its end."""
        command = [*self._command, *options]
        return subprocess.run(command, env=self._settings, capture_output=True, text=True, check=False)

    def start(self) -> None:
        """Start it and wait until it listens. :raises StageoutError: it ended instead."""
        said = len(self.log)
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._settings,
                start_new_session=True,
            )
        process = self._process

        def listening() -> int:
            found = re.search(r" daemon-started .*port=(\d+)", self.log[said:])
            if process.poll() is not None:
                raise StageoutError(f"the router ended at once: {self.log[said:]}")
            return int(found.group(1)) if found else 0

        what, describe = "the router to listen", lambda: self.log[said:]
        self.port = wait_until(listening, timeout_s=30, what=what, interval_s=0.02, describe=describe)

    def wait_for_end(self) -> None:
        """Wait until it has ended by itself."""
        if self._process is not None:
            self._process.wait(60)
            self._process = None

    def kill(self) -> None:
        """kill -9 of the daemon; its workers notice and end."""
        self._end(signal.SIGKILL)

    def reload(self) -> None:
        """Have it read its keys and settings again."""
        os.kill(self.pid, signal.SIGHUP)

    def stop(self) -> None:
        """End it as an administrator does."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None
