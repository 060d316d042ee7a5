"""The process at the other end of a Unix socket, and the condor_starter from which it descends.

Nothing here believes a command line by itself: a job can start a process that calls itself condor_starter. A starter
counts only when it is a child of a startd that is a child of *our* condor_master. Both must run as root or, below an
unprivileged master, as ourselves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from stageout.core.synchronous import NotTaken

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
_MAX_ANCESTORS = 64
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = "/proc"
_READ_BYTES = 65536


class NotIdentified(NotTaken):
    """The peer is not a process of a job that may hand off; the text says why and what to do."""

    code = "Unidentified"


class Peer(NamedTuple):
    """A process that connected, as the kernel recorded it at that moment.

    :param handle: pidfd of that very process, None where the kernel has none.
    """

    pid: int
    uid: int
    gid: int
    handle: int | None = None

    def is_alive(self) -> bool:
        """Tell whether the process may still live. A pid may belong to another process after the end."""
        if self.handle is None:
            return Path(_PROC, str(self.pid)).exists()
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Give back the pidfd."""
        if self.handle is not None:
            os.close(self.handle)


def peer_of(connection: socket.socket) -> Peer:
    """Identify the peer. Close the answer after use. :raises NotIdentified: the peer has ended or is invisible here."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    if pid <= 0:
        raise NotIdentified("the plugin is outside the process namespace of the sandbox manager")
    try:
        return Peer(pid, uid, gid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as problem:
        if problem.errno != errno.ENOPROTOOPT:
            raise NotIdentified("the plugin has ended") from None
    try:
        return Peer(pid, uid, gid, os.pidfd_open(pid))
    except ProcessLookupError:
        raise NotIdentified("the plugin has ended") from None
    except OSError:
        return Peer(pid, uid, gid)


class Process(NamedTuple):
    """A line of the process table.

    :param started_ticks: clock ticks between boot and its start. :param real_uid: not changed by condor's switching.
    """

    pid: int
    parent: int
    started_ticks: int
    real_uid: int
    argv: tuple[str, ...]
    program: str

    @property
    def started_s(self) -> float:
        """Seconds of :func:`stageout.core.clock.boot_clock_s` at its start, rounded down to a tick."""
        return self.started_ticks / _TICKS_PER_S

    def option(self, name: str) -> str:
        """Return the word behind ``name`` in the command line, "" when there is none."""
        with contextlib.suppress(ValueError, IndexError):
            return self.argv[self.argv.index(name) + 1]
        return ""


#: The tick of :attr:`Process.started_s`, in seconds.
TICK_S = 1.0 / _TICKS_PER_S


def read_process(pid: int) -> Process:
    """Read one process from /proc. :raises NotIdentified: there is none (any more)."""
    return described(read_kinship(pid))


def read_kinship(pid: int) -> Process:
    """Read only parent and start of a process, because every hand-off waits for it.

    :raises NotIdentified: there is none (any more).
    """
    try:
        stat = _read(f"{_PROC}/{pid}/stat")
    except OSError:
        raise NotIdentified(f"process {pid} has ended") from None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return Process(pid=pid, parent=int(fields[1]), started_ticks=int(fields[19]), real_uid=-1, argv=(), program="")


def described(known: Process) -> Process:
    """Add users, command line and program to a process. :raises NotIdentified: the process has ended."""
    place = f"{_PROC}/{known.pid}"
    try:
        status, command = _read(f"{place}/status"), _read(f"{place}/cmdline")
    except OSError:
        raise NotIdentified(f"process {known.pid} has ended") from None
    argv = tuple(os.fsdecode(word) for word in command.split(b"\0")[:-1])
    start = status.index(b"\nUid:") + 5
    real = status[start : status.index(b"\n", start)].split()[0]
    return known._replace(real_uid=int(real), argv=argv, program=_program(place, argv))


def _read(path: str) -> bytes:
    """Read a file of /proc without objects of the io module, and with one read where that is enough.

    The kernel fills a buffer that is large enough at once.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = part = os.read(descriptor, _READ_BYTES)
        while len(part) == _READ_BYTES:
            part = os.read(descriptor, _READ_BYTES)
            data += part
        return data
    finally:
        os.close(descriptor)


def _program(place: str, argv: Sequence[str]) -> str:
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"{place}/exe").replace(" (deleted)", ""))  # noqa: PTH115, PTH119 - quicker
    return os.path.basename(argv[0]) if argv else ""  # noqa: PTH119


def ancestors(pid: int, last: int, read: Callable[[int], Process] = read_process) -> list[Process]:
    """Find the process and its parents, nearest first, up to the child of ``last`` or to one that is not shown here.

    :raises NotIdentified: the process has ended, or a pid was used again while we looked.
    """
    chain = [read(pid)]
    while chain[-1].parent not in (0, last) and len(chain) < _MAX_ANCESTORS:
        parent = read(chain[-1].parent)
        if parent.started_ticks > chain[-1].started_ticks:
            raise NotIdentified(f"process {parent.pid} is younger than its child: its parent has ended")
        chain.append(parent)
    return chain


class Lineage(NamedTuple):
    """The daemons above a plugin.

    :param child: the starter's child on the way to the plugin: what runs for the job.
    """

    startd: Process
    starter: Process
    child: Process

    @property
    def slot(self) -> str:
        """The slot that the startd gave to its starter, such as ``slot1_1``."""
        return self.starter.option("-a").split("@", 1)[0]

    @property
    def local_name(self) -> str:
        """The startd's own ``-local-name``, "" for the only one of a machine."""
        return self.startd.option("-local-name")


class Families:
    """Processes below one condor_master. A startd outlives many plugins, so the last one is remembered."""

    def __init__(self) -> None:
        self._startd: Process | None = None

    def of(self, pid: int, master: int) -> list[Process]:
        """Find the :func:`ancestors` up to the child of ``master``, described as far as :func:`lineage` looks at them.

        :raises NotIdentified: the process or one above it has ended.
        """
        chain = ancestors(pid, master, read_kinship)
        chain[-2:-1] = map(described, chain[-2:-1])
        known = self._startd
        if known is None or (known.pid, known.parent, known.started_ticks) != chain[-1][:3]:
            known = self._startd = described(chain[-1])
        chain[-1] = known
        return chain


def lineage(chain: Sequence[Process], master: int, own_uid: int) -> Lineage:
    """Find startd and starter of our master in a chain of :func:`ancestors`.

    :param master: pid of the condor_master that started this manager. :param own_uid: user of this manager.
    :raises NotIdentified: the peer does not descend from a starter of this master.
    """
    place = next((at for at, process in enumerate(chain) if process.parent == master), -1)
    if place < 2:
        raise NotIdentified(
            "the process does not descend from a condor_starter below the condor_master of this sandbox manager; "
            "start the manager with the master that starts the startd (DAEMON_LIST)"
        )
    found = Lineage(chain[place], chain[place - 1], chain[place - 2])
    for process, part in ((found.startd, "startd"), (found.starter, "starter")):
        if part not in process.program:
            raise NotIdentified(f"process {process.pid} is {process.program!r} where a condor_{part} is expected")
        if process.real_uid != own_uid:
            raise NotIdentified(
                f"the condor_{part} runs as uid {process.real_uid}, the sandbox manager as {own_uid}; "
                "start both with the same condor_master and user"
            )
    if not found.slot:
        raise NotIdentified(f"the condor_starter {found.starter.pid} does not say which slot it serves")
    return found
