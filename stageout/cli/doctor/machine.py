"""The machine on which the command runs, as checks see it."""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stageout.cli import node
from stageout.cli.condor import Pool, load_bindings
from stageout.cli.doctor import probe
from stageout.cli.doctor.findings import Ran, Unseen
from stageout.cli.exits import Unavailable
from stageout.condor.ads import Expression, plain
from stageout.condor.bindings import CondorError
from stageout.condor.collector import Collector
from stageout.condor.configuration import condor_settings, parameter_names, running_value
from stageout.core.children import having
from stageout.core.classads import ClassAd
from stageout.core.config import Settings
from stageout.core.http import exchange
from stageout.overlay.channel import Channel
from stageout.overlay.key_file import gateway_of

Result = TypeVar("Result")
_READ_BYTES = 4096
#: A stored answer of a plugin begins with the size and time of each of its modules.
_BEGINNING_BYTES = 65536
_VERSION = re.compile(r"CondorVersion: (\d+\.\d+\.\d+)")
_LATEST_S = 10.0


class ThisMachine:
    """See :class:`stageout.cli.doctor.findings.Machine`."""

    def __init__(self) -> None:
        load_bindings()
        self._settings = condor_settings()
        self._pool = Pool()
        self._seen: dict[object, Any] = {}

    @property
    def settings(self) -> Settings:
        """Return HTCondor's configuration on this machine."""
        return self._settings

    def parameters(self) -> list[str]:
        """List the names of all parameters in HTCondor's configuration on this machine."""
        return parameter_names()

    def run(self, argv: Sequence[str], timeout_s: float, user: str = "") -> Ran:
        """Run a command. Root can run it as another user. Standard output and error are merged."""
        started = time.monotonic()
        who: dict[str, Any] = {}
        if user and os.geteuid() == 0:
            account = pwd.getpwnam(user)
            who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": ()}
        try:
            done = subprocess.run(
                list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", timeout=timeout_s, check=False, cwd="/", **who,
            )  # fmt: skip
        except subprocess.TimeoutExpired as problem:
            return Ran(-1, str(problem), time.monotonic() - started, has_ended=False)
        except OSError as problem:
            return Ran(-1, str(problem), time.monotonic() - started)
        return Ran(done.returncode, done.stdout, time.monotonic() - started)

    def stat(self, path: str) -> os.stat_result:
        """Call os.stat."""
        return Path(path).stat()

    def read(self, path: str) -> str:
        """Read the beginning of a file as text; replace invalid bytes."""
        with open(path, "rb") as stream:
            return stream.read(_BEGINNING_BYTES).decode(errors="replace")

    def end_of(self, path: str) -> str:
        """Read the last lines of a text file; "" when it cannot be read."""
        try:
            with open(path, "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - _READ_BYTES))
                return stream.read(_READ_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def free_bytes(self, path: str) -> tuple[int, int]:
        """Return the size of a filesystem and its free bytes."""
        seen = os.statvfs(path)
        return seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize

    def real(self, path: str) -> str:
        """Resolve the symbolic links of a path."""
        return os.path.realpath(path)

    def user_id(self, name: str) -> int | None:
        """Look up the uid of an account; None if it does not exist."""
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            return None

    def ads(self, constraint: str, pool: str = "") -> list[ClassAd]:
        """Query a collector for ads. A collector that does not answer is not queried again."""
        asked = ("collector", pool)
        if asked in self._seen:
            raise Unseen(self._seen[asked])
        try:
            return (Pool(pool) if pool else self._pool).ads(constraint)
        except Unavailable as problem:
            self._seen[asked] = f"the collector {pool} does not answer, see above".replace("  ", " ")
            raise Unseen(str(problem)) from None

    def ask_daemon(self, kind: str, parameter: str) -> str | None:
        """Ask the running daemon for a parameter."""
        return self._daemon(kind, lambda location: running_value(location, parameter))

    def slots(self) -> list[ClassAd]:
        """Query this machine's startd for its slot ads."""
        return self._daemon("startd", lambda location: [plain(ad) for ad in Collector(location).query("Startd")])

    def _daemon(self, kind: str, question: Callable[[Any], Result]) -> Result:
        """Call a function with the local daemon of a type. :raises Unseen: it cannot be located or does not answer."""
        try:
            return question(Collector().locate(kind.capitalize()))
        except CondorError as problem:
            raise Unseen(f"the running {kind} does not tell ({str(problem).rstrip('.') or 'no answer'})") from None

    def version(self) -> str:
        """Return the version of the running HTCondor, not that of the bindings, which may come from elsewhere."""
        ran = self.run(["condor_version"], _LATEST_S)
        found = _VERSION.search(ran.output)
        if not found:
            raise Unseen("condor_version is not on the PATH")
        return found[1]

    def try_handoff(self, schedd: str, plugin: str) -> str:
        """Return why the manager would refuse a hand-off of this schedd's job now; "" if it would accept."""
        return probe.try_handoff(self._settings, schedd, plugin)

    def manager_answer(self) -> ClassAd:
        """Ask this node's sandbox manager for its status."""
        return node.manager_facts(self._settings)

    def is_expression(self, text: str) -> bool:
        """Tell whether a text is a valid ClassAd expression."""
        try:
            Expression(text)
        except CondorError:
            return False
        return True

    def accepts_generic(self) -> bool:
        """Tell whether the collector accepts a generic ad from this process."""
        probe = {"MyType": "StageOutProbe", "Name": f"stageout-doctor-{os.getpid()}", "ClassAdLifetime": 1}
        try:
            Collector().advertise([probe], "UPDATE_AD_GENERIC")
        except CondorError:
            return False
        return True

    def http_status(self, url: str, token: str) -> int:
        """Return the status of a GET with this bearer token. :raises OSError: no valid answer."""
        return exchange("GET", url, token=token, timeout_s=_LATEST_S)[0]

    def http_text(self, url: str, certificate: str) -> str:
        """Return the content of a page. :raises OSError: nothing answers, or the status is not 200."""
        status, content = exchange("GET", url, timeout_s=_LATEST_S, certificate=certificate)
        if status != 200:
            raise OSError(f"status {status}")
        return content.decode(errors="replace")

    def listens(self, host: str, port: int) -> bool:
        """Tell whether a daemon accepts connections at this address."""
        try:
            socket.create_connection((host, port), _LATEST_S).close()
        except OSError:
            return False
        return True

    def greet(self, host: str, port: int, key: str) -> float:
        """Authenticate to a router with the key in a file. Return its clock's lead in seconds.

        :raises TransferFailure: the router refuses or is unreachable.
        """
        with Channel(gateway_of(host, port, key, _LATEST_S)) as channel:
            return float(channel.ahead_s)

    def processes(self, variable: str) -> tuple[list[tuple[int, str]], bool]:
        """List the processes with an environment variable (number, value), and tell whether all were accessible.

        If /proc is mounted with hidepid (proc(5)), other users' processes are invisible, process 1 among them.
        """
        denied: list[int] = []
        found = list(having(variable, denied.append))
        return found, not denied and Path("/proc/1").exists()

    def now(self) -> float:
        """Return the wall clock time in seconds."""
        return time.time()


class RouterMachine(ThisMachine):
    """A machine without HTCondor, so that checks cannot query its daemons. :param settings: settings of the router."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def parameters(self) -> list[str]:
        """List the names of all settings."""
        return list(self._settings.names)
