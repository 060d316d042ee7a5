"""The worker processes, as the daemon sees them: given connections, they report blocks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict

from overlay_router.data.jobs import Again, Job, Report
from stageout.core import log

_MESSAGE_BYTES = 256 * 1024
#: A worker that has not read yet what it was told is told more after so long.
_TOLD_AGAIN_S = 0.05
OnAgain = Callable[[Again, socket.socket], None]


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[list[int]]:
    """A descriptor of a file that has these bytes and no name; none for no bytes. A message has no room for many.

    None, too, where there can be no such file: then the blocks are read.
    """
    with contextlib.ExitStack() as opened:
        found: list[int] = []
        with contextlib.suppress(OSError, AttributeError):  # the latter of a Python that was built without memfd_create
            if data:
                descriptor = os.memfd_create("digests")
                opened.callback(os.close, descriptor)
                if os.write(descriptor, data) == len(data):
                    found.append(descriptor)
        yield found


class Worker:
    """One process. It ends when this object is closed, or with the daemon.

    :param on_report: called in the loop. :param on_again: likewise, with a connection that is wanted for more.
    :param on_death: called when the process has ended by itself.
    """

    def __init__(
        self, on_report: Callable[[Report], None], on_again: OnAgain, on_death: Callable[[Worker], None]
    ) -> None:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", "overlay_router.data.worker", str(other.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()])
        mine.setblocking(False)
        self._socket, self._on_report, self._on_again, self._on_death = mine, on_report, on_again, on_death
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(mine, self._readable)
        self.jobs: Counter[str] = Counter()
        self._receiving: Counter[int] = Counter()
        self._closing: dict[int, list[asyncio.Future[list[Report]]]] = {}
        self._late: dict[int, list[Report]] = {}

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_behind(self) -> bool:
        """Tell whether it has not read yet what was said to it: it has much to do, or stands still."""
        return struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))) != (0,)

    def give(self, job: Job, connection: socket.socket, file: int, digests: bytes) -> None:
        """As of the pool."""
        with _in_memory(digests) as more:
            told = json.dumps(asdict(job)).encode()
            socket.send_fds(self._socket, [told], [connection.fileno(), file, *more])
        self.jobs[job.peer] += 1
        self._receiving[job.tid] += 1

    def share(self, link: socket.socket) -> None:
        """Have it share with a carrier what it receives. :param link: the worker's end; the caller closes its own."""
        socket.send_fds(self._socket, [json.dumps(asdict(Job("share"))).encode()], [link.fileno()])

    def admit(self, access: bytes) -> None:
        """As of the pool. :raises OSError: it cannot be told now."""
        with tempfile.TemporaryFile() as file:
            file.write(access)
            file.flush()
            socket.send_fds(self._socket, [json.dumps(asdict(Job("access"))).encode()], [file.fileno()])

    def ask_to_close(self, tid: int) -> asyncio.Future[list[Report]]:
        """Done when this process writes nothing more of a transfer, or has ended; what it wrote just before.

        One that has no connection of it has told all that came by those before, and is not asked: it may stand still.
        """
        done = self._loop.create_future()
        if not self._receiving[tid]:
            done.set_result([])
            return done
        self._closing.setdefault(tid, []).append(done)
        socket.send_fds(self._socket, [json.dumps(asdict(Job("close", tid))).encode()], [])
        return done

    def hang_up(self, tid: int) -> None:
        """As of the pool."""
        socket.send_fds(self._socket, [json.dumps(asdict(Job("hang-up", tid))).encode()], [])

    def end_of(self, peer: str, ends: float) -> None:
        """As of the pool. :raises OSError: it cannot be told now."""
        if self.jobs[peer]:
            socket.send_fds(self._socket, [json.dumps(asdict(Job("end", peer=peer, ends=ends))).encode()], [])

    def _closed(self, tid: int) -> None:
        late = self._late.pop(tid, [])
        for done in self._closing.pop(tid, ()):
            if not done.done():
                done.set_result(late)

    def close(self) -> None:
        """End the process and wait for it."""
        self._loop.remove_reader(self._socket)
        self._process.kill()
        self._process.wait()
        self._socket.close()
        for tid in list(self._closing):
            self._closed(tid)

    def _readable(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        if not message:
            self.close()
            self._on_death(self)
            return
        values = json.loads(message)
        if "again" in values:
            for descriptor in descriptors:  # none, where the daemon has as many as it may
                self._on_again(Again(**values["again"]), socket.socket(fileno=descriptor))
            return
        if values["closed"]:
            self._closed(values["tid"])
            return
        values["blocks"] = tuple((block, digest) for block, digest in values["blocks"])
        values["parts"] = tuple((start, size_bytes) for start, size_bytes in values["parts"])
        report = Report(**values)
        if report.late:
            self._late.setdefault(report.tid, []).append(report)
        elif report.ended:
            self.jobs[report.ended] -= 1
            self.jobs = +self.jobs
            self._receiving[report.tid] -= 1
            self._receiving = +self._receiving
        else:
            self._on_report(report)


class Pool:
    """A fixed number of workers; one that dies is replaced.

    :param on_report: called in the loop with each report. :param on_again: with each connection that is given back.
    """

    def __init__(self, count: int, on_report: Callable[[Report], None], on_again: OnAgain) -> None:
        self._on_report, self._on_again = on_report, on_again
        self._carrier: socket.socket | None = None
        self._access = b""
        self._workers = [self._start() for _ in range(count)]

    def give(self, job: Job, connection: socket.socket, file: int, digests: bytes = b"") -> None:
        """Hand a connection and a file to the worker that has fewest, of those that have read what they were given.

        The caller closes its own descriptors.

        :param digests: of the blocks that the job is about, as far as they are known.
        """
        worker = min(self._workers, key=lambda one: (one.is_behind, sum(one.jobs.values())))
        worker.give(job, connection, file, digests)

    def share_with(self, carrier: socket.socket) -> None:
        """All workers share what they receive with this carrier from now on, and with none before it.

        :param carrier: it takes its ends of the connections from there; belongs to the pool from now on.
        """
        if self._carrier is not None:
            self._carrier.close()
        self._carrier = carrier
        for worker in self._workers:
            self._share(worker, carrier)

    async def admit(self, access: bytes) -> None:
        """All workers take requests in HTTP by these keys from now on. :param access: as their service reads it."""
        self._access = access
        await self._tell_all(lambda worker: worker.admit(access))

    def _share(self, worker: Worker, carrier: socket.socket) -> None:
        """Where that cannot be, what comes goes on by the disk."""
        with contextlib.suppress(OSError):
            one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with one, other:
                socket.send_fds(carrier, [b"\0"], [other.fileno()])
                worker.share(one)

    def connections(self, peer: str) -> int:
        """Return how many connections of a key the workers have."""
        return sum(worker.jobs[peer] for worker in self._workers)

    async def no_more(self, tid: int) -> list[Report]:
        """On return no worker writes anything of a transfer any more. The blocks that they wrote and did not report."""
        late = await asyncio.gather(*(worker.ask_to_close(tid) for worker in self._workers))
        return [report for some in late for report in some]

    def hang_up(self, tid: int) -> None:
        """End the connections by which nothing more of a transfer is written: what comes again must come by others.

        A worker that sends by them could not know that it is dropped. Where that cannot be said to a worker, they end
        when they have been idle for long enough.
        """
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.hang_up(tid)

    def peers(self) -> set[str]:
        """Return the names of keys whose connections the workers have."""
        return {peer for worker in self._workers for peer in worker.jobs}

    async def end_of(self, peer: str, ends: float = 0) -> None:
        """End the connections of a key, as soon as the workers can be told.

        :param ends: those alone whose tokens have ended by that time; 0: all.
        """
        await self._tell_all(lambda worker: worker.end_of(peer, ends))

    async def _tell_all(self, tell: Callable[[Worker], None]) -> None:
        untold = list(self._workers)
        while untold:
            with contextlib.suppress(OSError):
                tell(untold[0])
                untold.pop(0)
                continue
            if untold[0] not in self._workers:  # it has died, with all its connections
                untold.pop(0)
            await asyncio.sleep(_TOLD_AGAIN_S)

    def close(self) -> None:
        """End all."""
        if self._carrier is not None:
            self._carrier.close()
        for worker in self._workers:
            worker.close()

    def _start(self) -> Worker:
        return Worker(self._on_report, self._on_again, self._replace)

    def _replace(self, dead: Worker) -> None:
        log.error("worker-died", pid=dead.pid)
        fresh = self._workers[self._workers.index(dead)] = self._start()
        if self._access:
            with contextlib.suppress(OSError):  # without keys it takes nobody's token
                fresh.admit(self._access)
        if self._carrier is not None:
            self._share(fresh, self._carrier)
