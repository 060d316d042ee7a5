"""The data plane: a process without an event loop that moves blocks between sockets and files.

It is given connections by the daemon over a Unix socket (descriptors with a JSON message each) and reports blocks that
are on the disk. A thread serves each connection, with one page-aligned buffer: whole blocks go to the disk past the
page cache where the filesystem allows it (rule 16), so the memory used is one block a connection. Another one syncs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
from dataclasses import asdict, replace
from functools import partial

from overlay_router.data.gathering import gathered
from overlay_router.data.jobs import Again, Job, Report
from overlay_router.data.known import Damaged, Digests
from overlay_router.data.receiving import Gate, Gates, Receiver, beginning
from overlay_router.data.ring import Shelf
from overlay_router.data.sending import Sending, ordered
from overlay_router.data.splice import Circuit
from overlay_router.data.tunnels import cover
from overlay_router.http.serving import Connection, Service, busy
from overlay_router.http.stream import Stream, TlsStream
from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.core.threads import NoThread, started
from stageout.overlay.links import Claim, links
from stageout.overlay.tcp import acked_bytes, fill, wait_at_most
from stageout.overlay.tls import Tunnel
from stageout.overlay.wire import frames, packs
from stageout.overlay.wire.frames import BadFrame
from stageout.overlay.wire.messages import Refuse, encode

_IDLE_S = 60.0
#: A client that has got a file may ask for another one within this time.
_KEPT_S = 15.0
#: So many of a process may wait for that, each with a thread and a descriptor; who is one more connects anew.
_MOST_WAITING = 256
#: Characters of what a peer is told.
_WORDS = 1000
#: Kinds of jobs whose peers take a REFUSE: at both ends of the others something else is under way.
_TOLD = ("receive", "send", "send-pack", "http")
_waiting = threading.BoundedSemaphore(_MOST_WAITING)
#: The interpreter's lock changes hands sooner, so that a thread that has data does not wait for one that computes.
_SWITCH_INTERVAL_S = 0.0002


def _pass_on(near: socket.socket, far: socket.socket, hop: str, owner: str) -> None:
    with links().lane(hop, Claim(owner=owner)) as lane:
        Circuit(near, far, take=lane.tap(partial(acked_bytes, far)).take, turn=lane.turn).run()


_http = Service(_pass_on)


def send_files(job: Job, connection: socket.socket, root: int) -> None:
    """The answer to a GET_PACK. It is read whole before its turn comes, so that one that waits keeps no file open."""
    frame = memoryview(packs.encode_found(*gathered(root, job.paths), frames.checksums()[job.checksum]))
    with ordered(replace(job, size_bytes=len(frame)), connection) as tap:
        piece_bytes = tap.piece_bytes if tap is not None and tap.held else len(frame)
        for start in range(0, len(frame), piece_bytes):
            piece = frame[start : start + piece_bytes]
            if tap is not None:
                tap.take(len(piece))
            connection.sendall(piece)


def _wanted_again(job: Job, connection: socket.socket) -> bytes:
    """The frame that a peer sends when it has its file and wants another one; b"" when none comes, or many wait."""
    if not _waiting.acquire(blocking=False):
        return b""
    try:
        return _next_frame(job, connection)
    finally:
        _waiting.release()


def _next_frame(job: Job, connection: socket.socket) -> bytes:
    checksum, head = frames.checksums()[job.checksum], memoryview(bytearray(frames.HEADER_BYTES))
    wait_at_most(connection, _KEPT_S)
    with contextlib.suppress(OSError):  # it has gone, or is silent: nothing is owed to it
        if fill(connection, head):
            return beginning(connection, head, frames.decode_header(head, checksum))
    return b""


class Reporter:
    """Reports of all threads to the daemon; one of very many blocks takes several messages."""

    def __init__(self, daemon: socket.socket) -> None:
        self._daemon, self._lock = daemon, threading.Lock()

    def __call__(self, report: Report) -> None:
        """Send one; the daemon records it before it tells the sender. Without a daemon this process is about to end."""
        with self._lock, contextlib.suppress(ConnectionError):
            for part in report.in_messages():
                self._daemon.send(json.dumps(asdict(part)).encode())

    def give_back(self, connection: socket.socket, again: Again) -> None:
        """The daemon decides what becomes of a connection now."""
        with self._lock, contextlib.suppress(ConnectionError):
            socket.send_fds(self._daemon, [json.dumps({"again": asdict(again)}).encode()], [connection.fileno()])


def serve(
    job: Job,
    connection: socket.socket,
    file: int,
    report: Reporter,
    gate: Gate,
    shelf: Shelf,
    digests: Digests | None = None,
) -> bytes:
    """One job to its end; what goes wrong is told to the peer and the daemon.

    :param digests: of a file that is sent, None: nothing is known of it.
    :return: the frame behind it, if the connection is wanted for something else now.
    """
    if job.kind == "relay":
        with connection, socket.socket(fileno=file) as far:
            moved = partial(_moved, report, job.hop)
            claim, target = Claim(job.flow, job.owner, job.priority, job.deadline), connection if job.to else far
            with links().lane(job.to or job.hop, claim) as lane:
                take = lane.tap(partial(acked_bytes, target)).take
                try:
                    Circuit(connection, far, moved=moved, take=take, back=bool(job.to), turn=lane.turn).run()
                except NoThread as problem:
                    report(Report(0, problem=str(problem)))
        return b""
    if job.kind == "http":
        Connection(_http, Stream(connection), socket.socket(fileno=file)).run()
        return b""
    if job.kind == "tls":
        told, plain = partial(_problem, report), socket.socket(fileno=file)
        cover(connection, plain, job.cert, job.cert_key, job.host, told, partial(_serve_http, plain))
        return b""
    try:
        try:
            wait_at_most(connection, _IDLE_S)
            if job.kind == "receive":
                receiver = Receiver(job, connection, file, report, gate, shelf)
                receiver.run()
                return receiver.again
            if job.kind == "send-pack":
                send_files(job, connection, file)
            else:
                Sending(job, connection, file, digests or Digests(job)).run()
        finally:
            os.close(file)  # a file that was deleted meanwhile takes no room while the connection waits for another
        return _wanted_again(job, connection)
    except Damaged as problem:
        report(Report(0, damaged=job.path, block=problem.block))
        words = Refuse(str(problem)[:_WORDS], code=ErrorClass.CONTENT_MISMATCH.code)
        with contextlib.suppress(OSError):
            connection.sendall(encode(words, frames.checksums()[job.checksum]))
        return b""
    except (BadFrame, OSError) as problem:
        if gate.closed:
            return b""  # the sender knows that all is here, and drops the rest
        if isinstance(problem, BlockingIOError):
            problem = TimeoutError(f"nothing moved for {_IDLE_S:.0f} s")
        report(Report(job.tid, problem=str(problem), errno=getattr(problem, "errno", 0) or 0))
        with contextlib.suppress(OSError):
            connection.sendall(encode(Refuse(str(problem), 1), frames.checksums()[job.checksum]))
        return b""


def _serve_to_its_end(
    job: Job,
    connection: socket.socket,
    file: int,
    report: Reporter,
    gate: Gate,
    gates: Gates,
    shelf: Shelf,
    digests: Digests,
) -> None:
    with connection:
        again = b""
        try:
            again = serve(job, connection, file, report, gate, shelf, digests)
        finally:
            gates.remove(job.tid, gate)
            report(Report(job.tid, ended=job.peer))
        if again:
            report.give_back(
                connection, Again(job.peer, job.checksum, job.digest, job.nonce, again.hex(), job.to, job.ends)
            )


def begin(job: Job, descriptors: list[int], report: Reporter, gates: Gates, shelf: Shelf) -> None:
    """Serve a job in a thread of its own. One for which there is no descriptor or thread is refused: others go on.

    :param descriptors: of the connection, of the file, and of digests; they belong to the job from now on.
    """
    if len(descriptors) < 2:  # the kernel drops what does not fit; whoever sends comes again
        for descriptor in descriptors:
            os.close(descriptor)
        words = "a worker has as many descriptors as it may: allow more (ulimit -n), or have more workers"
        report(Report(job.tid, problem=words, errno=errno.EMFILE))
        report(Report(job.tid, ended=job.peer))
        return
    connection, digests = socket.socket(fileno=descriptors[0]), Digests(job, *descriptors[2:])
    gate = gates.add(job.tid, connection, job.peer, job.ends)
    try:
        started(_serve_to_its_end, job, connection, descriptors[1], report, gate, gates, shelf, digests)
    except NoThread as problem:
        gates.remove(job.tid, gate)
        os.close(descriptors[1])
        with connection:
            if job.kind in _TOLD:
                _refuse(job, connection, problem)
        report(Report(job.tid, problem=str(problem.strerror), errno=errno.EAGAIN))
        report(Report(job.tid, ended=job.peer))


def _refuse(job: Job, connection: socket.socket, problem: NoThread) -> None:
    """Nothing waits for whoever does not take it at once."""
    words = f"the router is short of threads: {problem.strerror}"
    told = encode(Refuse(words, 1, ErrorClass.SERVER_BUSY.code), frames.checksums()[job.checksum])
    with contextlib.suppress(OSError):
        connection.send(busy(words) if job.kind == "http" else told, socket.MSG_DONTWAIT)


def _serve_http(channel: socket.socket, tunnel: Tunnel, first: bytes) -> None:
    """Serve HTTP in TLS. The daemon takes the letter for a request, and goes on with questions."""
    channel.sendall(b"H")
    Connection(_http, TlsStream(tunnel, first), channel).run()


def _problem(report: Reporter, problem: str) -> None:
    report(Report(0, problem=problem))


def _moved(report: Reporter, hop: str, size_bytes: int) -> None:
    report(Report(0, hop=hop, moved_bytes=size_bytes))


def main(argv: list[str]) -> None:
    """Serve connections until the daemon goes away. ``argv[1]`` is the descriptor of its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the daemon ends, and this with it
    log.open_child_log()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a circuit takes six
    daemon = socket.socket(fileno=int(argv[1]))
    report, gates, shelf = Reporter(daemon), Gates(), Shelf()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(daemon, 65536, 3)
        except ConnectionError:  # it was killed, and left reports unread
            message, descriptors = b"", []
        if not message:
            log.warn("worker-stopped", reason="the daemon has ended")
            return
        job = Job(**json.loads(message))
        if job.kind == "close":
            for late in gates.close(job.tid):
                report(late)
            report(Report(job.tid, closed=True))
            continue
        if job.kind == "hang-up":
            gates.hang_up(job.tid)
            continue
        if job.kind == "end":
            gates.end_of(job.peer, job.ends)
            continue
        if job.kind == "access":
            for descriptor in descriptors:
                with open(descriptor, "rb") as facts:
                    facts.seek(0)
                    _http.become(facts.read())
            continue
        if job.kind == "share":
            for descriptor in descriptors:
                shelf.connect(socket.socket(fileno=descriptor))
            continue
        begin(job, descriptors, report, gates, shelf)


if __name__ == "__main__":
    main(sys.argv)
