"""Movers: one plugin process per call, as the job's user, in a directory of its own, with a time limit.

A mover runs any registered transfer plugin exactly as condor_starter does (protocols 1, 2 and 4), but later.
:mod:`stageout.movers.launch` kills it with all its processes, in any session. When the manager dies, the kernel kills
the plugin before the manager can restart and send the same files again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stageout.core import durable, log
from stageout.core.children import MOVER_MARK, having
from stageout.core.classads import ClassAd, decode, unparse_ad, unparse_old
from stageout.core.errors import ErrorClass
from stageout.core.sockets import readable
from stageout.movers import launch, trees
from stageout.movers.plugins_table import Plugin
from stageout.movers.results import (
    Answer,
    Delivered,
    Ending,
    Failure,
    Gone,
    InCustody,
    SentFile,
    only_delivered,
    read_answers,
    read_single,
)
from stageout.movers.scrub import Secrets
from stageout.wire.handoff import OfferedCredential

_LAUNCH = Path(launch.__file__)
#: Seconds for ``launch.py`` to end the plugin: 2 s for its own clean-up, and time for its other processes.
_END_S = 10.0
#: Seconds to wait for processes that were killed on the plugin's behalf.
_REST_S = 10.0
#: A call with more files than this needs much CPU time. It runs with a lower priority than small ones, and than jobs.
_FEW_FILES = 10
_BULK_NICENESS = 5
_OUTPUT_KEPT = 16384
_OUTLIVED = (
    "started by a plugin that has ended, and could not be killed: D behind a number waits for a disk or a network"
    " filesystem, and ends with that; end others by hand (of another user, perhaps). What they send may come twice"
)
_OUTFILE_BASE = 19264  # as condor_starter reserves, so that a full disk cannot stop the report
_OUTFILE_PER_FILE = 4096
#: Maximum number of bytes to read of each result. An ad with the history of many attempts has several kB.
_READ_BASE = 64 * 1024
_READ_PER_FILE = 16 * 1024
_PASSED = frozenset(
    {"PATH", "TZ", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "CONDOR_CONFIG", "X509_CERT_DIR", "SSL_CERT_FILE"}
    | {"SSL_CERT_DIR", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"}
)
PROXY_NAME = OfferedCredential("proxy", "", 0).file_name
_TOKENS, _PROXY, _JOB_AD = ".condor_creds", ".x509_proxy", ".job.ad"
_NOT_PASSED = frozenset({"STAGEOUT_SPOOL", "STAGEOUT_FAULTS"})


@dataclass(frozen=True)
class Equipment:
    """The environment of a plugin's call, as the starter provides it.

    :param credentials: content by file name. :param job_ad: attributes that the plugin may read.
    :param plugin_data: ``PluginData`` and ``METHOD_PluginData``.
    """

    credentials: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    job_ad: ClassAd = field(default_factory=ClassAd)
    plugin_data: ClassAd = field(default_factory=ClassAd)


@dataclass(frozen=True)
class PluginCall:
    """One call of a plugin.

    :param directory: work directory to make, below ``movers/``. :param uid: the job's user; :param gid: its group.
    :param settings: for the plugin's environment; the administrator's values take precedence.
    :param passing_group: group with access to the directories of the sources; -1: only the user's own.
    :param fetches: download the files from their URLs. :param deletes: delete the files at their URLs; only for the
        methods of ``plugin.deletes``.
    """

    directory: Path
    plugin: Plugin
    uid: int
    gid: int
    files: tuple[SentFile, ...]
    lifetime_s: float
    equipment: Equipment = field(default_factory=Equipment)
    settings: Mapping[str, str] = field(default_factory=dict)
    passing_group: int = -1
    fetches: bool = False
    deletes: bool = False


class Stopped(Exception):
    """The manager stopped the mover.

    :param delivered: by index in the call, the files that the plugin had already reported as delivered or in custody;
        the others have no result.
    """

    def __init__(self, delivered: Mapping[int, Gone] | None = None) -> None:
        super().__init__()
        self.delivered = delivered or {}


class StoppableMover:
    """A mover that can be stopped before it starts.

    :meth:`run` blocks and belongs into a thread; :meth:`stop` may be called from any other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mover: Mover | None = None
        self._stopped = False

    def stop(self) -> None:
        """Kill the plugin. If it has not started, it will not start."""
        with self._lock:
            self._stopped = True
            if self._mover is not None:
                self._mover.stop()

    def run(self, call: PluginCall, may_begin: Callable[[], bool] = lambda: True) -> list[Answer]:
        """Make the call, as :meth:`Mover.run`. :param may_begin: called right before the start; False has the effect of
        :meth:`stop`.

        :raises Stopped: by :meth:`stop`, before or after the start. :raises OSError: the work directory could not be
            made.
        """
        with self._lock:
            if self._stopped or not may_begin():
                raise Stopped
            self._mover = Mover(call)
        return self._mover.run()


class Mover:
    """Execution of one call. :meth:`run` blocks and belongs into a thread; :meth:`stop` may be called from any
    other.
    """

    def __init__(self, call: PluginCall) -> None:
        self._call = call
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop = threading.Event()
        # Third-party plugins get the files in the spool: HTCondor's curl_plugin opens no symbolic link.
        self._links = call.plugin.several or call.fetches
        paths = [str(item.source) for item in call.files]
        self._names = unique_names([item.name for item in call.files]) if self._links else paths
        self._secrets = Secrets(call.equipment.credentials.values(), [item.url for item in call.files])

    def stop(self) -> None:
        """Kill the plugin: :meth:`run` then raises :class:`Stopped`."""
        self._stop.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"x")

    def run(self) -> list[Answer]:
        """Run the plugin and return one answer per file, in their order. Remove the work directory.

        :raises Stopped: by :meth:`stop`. :raises OSError: the work directory could not be made.
        """
        try:
            self._prepare()
            answers = self._run_single() if self._call.plugin.protocol == 1 else self._run_multi()
            if self._call.fetches:
                answers = [self._kept(*one) for one in zip(answers, self._call.files, self._names)]
            told = [_of_the_owners(*one) for one in zip(answers, self._call.files, self._names)]
            return [self._without_secrets(item) for item in told]
        finally:
            os.close(self._wake_out)
            wake_in, self._wake_in = self._wake_in, -1
            os.close(wake_in)
            _remove(self._call.directory)

    def _without_secrets(self, answer: Answer) -> Answer:
        if isinstance(answer, Delivered):
            verified, digest = self._secrets.scrub(answer.verified), self._secrets.scrub(answer.digest)
            return replace(answer, verified=verified, digest=digest)
        if isinstance(answer, InCustody):
            return answer
        return replace(answer, message=self._secrets.scrub(answer.message))

    # ---- the work directory ------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make names for the files, in-file and out-file, and then give the directory to the user.

        Use symbolic links, because a hard link would change the ctime, which detects changes of the content.
        """
        home = self._call.directory
        home.mkdir(mode=0o700)
        for item, name in zip(self._call.files, self._names):
            if self._links and not (self._call.fetches or self._call.deletes):
                (home / name).symlink_to(item.source)
        reserved = _OUTFILE_BASE + _OUTFILE_PER_FILE * len(self._call.files)
        self._put(self._infile, self._requests().encode("ascii"))
        self._put(self._outfile, b" " * reserved)
        self._equip(home)
        self._give_away(home)

    def _requests(self) -> str:
        """Write the in-file. Like HTCondor, put data of the whole call first (protocol 4) or into a request."""
        data = self._call.equipment.plugin_data
        several = self._call.plugin.protocol >= 4
        ads = [
            ClassAd({name: value} if name == "PluginData" else {"Protocol": name.partition("_")[0], name: value})
            for name, value in (data.items() if several else ())
        ]
        own = {} if several else dict(data)
        ads += [
            ClassAd({**own, "Url": item.url, "LocalFileName": str(self._call.directory / name)})
            for item, name in zip(self._call.files, self._names)
        ]
        return "".join(map(unparse_ad, ads))

    def _equip(self, home: Path) -> None:
        """Write credentials and job ad at the paths in :func:`plugin_environment`."""
        given = self._call.equipment
        tokens = home / _TOKENS
        if given.credentials:
            tokens.mkdir(mode=0o700)
            self._give_away(tokens)
        for name, content in given.credentials.items():
            self._put(home / _PROXY if name == PROXY_NAME else tokens / name, content)
        if given.job_ad:
            self._put(home / _JOB_AD, unparse_old(given.job_ad).encode("utf-8", "surrogateescape"))

    def _put(self, path: Path, data: bytes) -> None:
        """Write a file that only the job's user can read."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
            stream.write(data)
        self._give_away(path)

    def _give_away(self, path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, self._call.uid, self._call.gid)

    @property
    def _infile(self) -> Path:
        return self._call.directory / f".{self._call.plugin.path.name}.in"

    @property
    def _outfile(self) -> Path:
        return self._call.directory / f".{self._call.plugin.path.name}.out"

    # ---- running -----------------------------------------------------------------------------------------------------

    def _run_multi(self) -> list[Answer]:
        arguments = ["-infile", str(self._infile), "-outfile", str(self._outfile)]
        if not self._call.fetches:
            arguments.append("-delete" if self._call.deletes else "-upload")
        try:
            ending, _ = self._execute(arguments, time.monotonic() + self._call.lifetime_s)
        except Stopped:
            # A plugin writes each verified result immediately, so these files need not be sent again.
            answers = read_answers(self._sent(), self._read_outfile(), Ending(-signal.SIGKILL))
            raise Stopped(only_delivered([self._without_secrets(item) for item in answers])) from None
        return read_answers(self._sent(), self._read_outfile(), ending)

    def _run_single(self) -> list[Answer]:
        deadline = time.monotonic() + self._call.lifetime_s
        answers = []
        for number, (item, name) in enumerate(zip(self._call.files, self._names)):
            local = str(self._call.directory / name)
            places = [item.url, local] if self._call.fetches else [local, item.url]
            ending, output = self._execute(places, deadline)
            answers.append(read_single(self._sent()[number], output, ending))
        return answers

    def _sent(self) -> list[SentFile]:
        """Return the requests. Downloads get the sizes of their files."""
        return [
            replace(item, name=name, size_bytes=self._size_bytes(name) if self._call.fetches else item.size_bytes)
            for item, name in zip(self._call.files, self._names)
        ]

    def _size_bytes(self, name: str) -> int:
        try:
            return (self._call.directory / name).lstat().st_size
        except OSError:
            return 0

    def _kept(self, answer: Answer, item: SentFile, name: str) -> Answer:
        """Move a fetched file out of the work directory, if it is a regular file."""
        fetched = self._call.directory / name
        if not isinstance(answer, Delivered):
            return answer
        if fetched.is_symlink() or not fetched.is_file():
            return Failure(ErrorClass.PLUGIN_BROKEN, "the plugin calls this file fetched, but there is none")
        fetched.replace(item.source)
        return answer

    def _execute(self, arguments: Sequence[str], deadline: float) -> tuple[Ending, str]:
        try:
            with durable.step("mover-exec"):
                process, note = self._start(arguments)
        except OSError as problem:
            return Ending(None, text=str(problem)), ""
        output = _Tail()
        try:
            in_time = self._watch(process, output, deadline)
            status = self._end(process, in_time)
            self._tell_rest(note)
        finally:
            os.close(note)
            if process.stdout:
                process.stdout.close()
        if self._stop.is_set():
            raise Stopped
        if status != 0:
            text = self._secrets.scrub(output.text)
            log.warn("mover-failed", plugin=self._call.plugin.path, status=status, output=text[-2000:])
        return Ending(status, 0.0 if in_time else self._call.lifetime_s), output.text

    def _tell_rest(self, note: int) -> None:
        """Log the plugin's processes that ``launch.py`` could not end."""
        rest = os.read(note, _OUTPUT_KEPT).decode() if readable([note], 0) else ""
        if rest:
            log.error("plugin-kill-failed", plugin=self._call.plugin.path, pids=rest, advice=_OUTLIVED)

    def _start(self, arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
        """Start the process, with a descriptor for the processes that it could not end. :raises OSError: the start
        failed.
        """
        note, written = os.pipe()
        try:
            return self._popen(arguments, written), note
        except BaseException:
            os.close(note)
            raise
        finally:
            os.close(written)

    def _popen(self, arguments: Sequence[str], note: int) -> subprocess.Popen[bytes]:
        call = self._call
        own = group_list(call.uid, call.gid)
        extra = [call.passing_group] if call.passing_group not in (-1, *own) else []
        groups = ",".join(map(str, own + extra))
        niceness = _BULK_NICENESS if len(call.files) > _FEW_FILES else 0
        shim = [sys.executable, "-I", "-S", str(_LAUNCH), str(os.getpid()), str(call.uid), str(call.gid), groups]
        return subprocess.Popen(
            [*shim, str(niceness), str(note), str(call.directory), str(call.plugin.path), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=plugin_environment(os.environ, call),
            cwd="/",
            start_new_session=True,
            pass_fds=(note,),
        )

    def _watch(self, process: subprocess.Popen[bytes], output: _Tail, deadline: float) -> bool:
        """Wait for the plugin's end. Return False if it still runs at the deadline or after :meth:`stop`."""
        assert process.stdout is not None
        with _exit_descriptor(process.pid) as exit_fd:
            watched = [process.stdout.fileno(), self._wake_out, *([exit_fd] if exit_fd >= 0 else [])]
            while not _has_ended(process.pid):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._stop.is_set():
                    return False
                ready = readable(watched, left_s if exit_fd >= 0 else min(left_s, 0.25))
                if process.stdout.fileno() in ready and not output.read(process.stdout.fileno()):
                    watched.remove(process.stdout.fileno())
        while readable([process.stdout.fileno()], 0) and output.read(process.stdout.fileno()):
            pass
        return True

    def _end(self, process: subprocess.Popen[bytes], in_time: bool) -> int:
        """End all processes of the plugin. Return the exit status, negative for a signal."""
        if not in_time:
            with contextlib.suppress(PermissionError):
                os.kill(process.pid, signal.SIGTERM)  # not reaped yet, so its process id is still valid
            until_s = time.monotonic() + _END_S
            while not _has_ended(process.pid) and time.monotonic() < until_s:
                time.sleep(0.02)
            if not _has_ended(process.pid):
                self._end_for(process.pid)
            process.kill()
        status = process.wait()
        if status < 0:  # it or the plugin was killed; if it was killed, other processes may remain
            kill_all(self._call.directory)
        return status

    def _end_for(self, launcher: int) -> None:
        """End the processes that ``launch.py`` should have ended, which gets no time to do so. Later they cannot be
        identified.

        Halt it first: then it reaps none of them, and their process ids stay valid.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(launcher, signal.SIGSTOP)
        until_s = time.monotonic() + _REST_S
        while (rest := launch.children_of(launcher)) and time.monotonic() < until_s:
            for pid in rest:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if rest:
            log.error("plugin-kill-failed", plugin=self._call.plugin.path, pids=rest, advice=_OUTLIVED)

    def _read_outfile(self) -> str:
        """Read the plugin's output file. The user owns the directory, so read only a regular file of this user."""
        try:
            handle = os.open(self._outfile, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        with open(handle, "rb") as stream:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != self._call.uid:
                return ""
            most = _READ_BASE + _READ_PER_FILE * len(self._call.files)
            if facts.st_size > most:
                log.warn("results-truncated", plugin=self._call.plugin.path, size_bytes=facts.st_size, read_bytes=most)
            return decode(stream.read(most))


class _Tail:
    """The last bytes that a plugin printed."""

    def __init__(self) -> None:
        self._data = b""

    def read(self, descriptor: int) -> bool:
        """Read the available bytes; return False at the end."""
        part = os.read(descriptor, 65536)
        self._data = (self._data + part)[-_OUTPUT_KEPT:]
        return bool(part)

    @property
    def text(self) -> str:
        return self._data.decode("utf-8", "replace")


@contextlib.contextmanager
def _exit_descriptor(pid: int) -> Iterator[int]:
    """Open a descriptor that becomes readable when the process ends; -1 if the kernel has none."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        yield -1
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _has_ended(pid: int) -> bool:
    """Tell whether the child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _of_the_owners(answer: Answer, item: SentFile, name: str) -> Answer:
    """Replace a file's spool name in a plugin's message by the job's name for the file."""
    if name == item.name or not isinstance(answer, Failure):
        return answer
    whole = rf"(?<![\w.]){re.escape(name)}(?![\w.])"  # but not inside a URL
    return replace(answer, message=re.sub(whole, lambda _: item.name, answer.message))


def unique_names(names: Sequence[str]) -> list[str]:
    """Choose local names for the files of a call: their own if safe and unique, otherwise with a number in front."""
    used: set[str] = set()
    chosen = []
    for index, name in enumerate(names):
        base = name.rpartition("/")[2]
        plain = base and not base.startswith(".") and base not in used and len(os.fsencode(base)) < 240
        pick = base if plain else f"{index}.{_beginning(base.lstrip('.'))}"
        while pick in used:
            pick = f"{index}.{pick}"
        used.add(pick)
        chosen.append(pick)
    return chosen


def _beginning(name: str) -> str:
    """Shorten a name that is too long with a number in front. File systems limit the bytes of a name."""
    return os.fsencode(name)[:100].decode("utf-8", "ignore")


def plugin_environment(ours: Mapping[str, str], call: PluginCall) -> dict[str, str]:
    """Select the environment of a plugin: paths, proxies, certificates and the manager's own STAGEOUT settings."""
    kept = {
        name: value
        for name, value in ours.items()
        if name in _PASSED
        or name.startswith("LC_")
        or name.lower().endswith("_proxy")
        or (name.startswith(("STAGEOUT_", "_CONDOR_STAGEOUT_")) and name not in _NOT_PASSED)
    }
    home = str(call.directory)
    given = call.equipment
    places = {
        "_CONDOR_CREDS": _TOKENS if any(name != PROXY_NAME for name in given.credentials) else "",
        "X509_USER_PROXY": _PROXY if PROXY_NAME in given.credentials else "",
        "_CONDOR_JOB_AD": _JOB_AD if given.job_ad else "",
    }
    return {
        "PATH": os.defpath,
        **call.settings,
        **kept,
        **{variable: f"{home}/{name}" for variable, name in places.items() if name},
        "HOME": home,
        "TMPDIR": home,
        "STAGEOUT_MOVER": "1",
        MOVER_MARK: home,
        "STAGEOUT_PLUGIN_LIFETIME_S": str(int(call.lifetime_s)),
    }


def _remove(directory: Path) -> None:
    """Remove a work directory in any state that its user may have left, because it contained credentials."""
    try:
        trees.remove(directory.parent, directory.name)
    except OSError as problem:
        log.error("mover-cleanup-failed", directory=directory, problem=problem)


def group_list(uid: int, gid: int) -> list[int]:
    """List all groups of a user, as at a login."""
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]


def end_leftovers(movers: Path, timeout_s: float = 10.0) -> int:
    """Kill the processes that plugins of an earlier manager left, and remove their directories. Return their number.

    The kernel kills a plugin together with the manager, but the plugin's children may survive.

    :param timeout_s: seconds to wait for their end. :raises OSError: some do not end, or a directory cannot be removed.
    """
    killed = set()
    deadline = time.monotonic() + timeout_s
    while found := set(_marked(movers)):
        killed |= found
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise OSError(f"processes of earlier movers do not end: {sorted(found)}")
        time.sleep(0.02)
    for path in movers.iterdir():
        _remove(path)
    return len(killed)


def kill_all(directory: Path) -> int:
    """Kill all processes of the plugin of a call, identified by its work directory. Return their number."""
    found = list(_marked(directory.parent, directory.name))
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def _marked(movers: Path, name: str = "") -> Iterator[int]:
    """Find the processes of the plugins of one call, or (without a name) of all calls whose directories exist."""
    place = f"{movers}/{name}"
    return (pid for pid, value in having(MOVER_MARK) if value == place or (not name and value.startswith(place)))
