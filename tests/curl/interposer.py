"""Stands between the plugin and a real web server, passes everything on, and misbehaves on request."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "host"}


@dataclass
class Asked:
    """One request; ``headers`` with names in lower case. The body of one that is refused early is not read."""

    method: str
    path: str
    headers: dict[str, str]
    connection: int
    body: bytes = b""


@dataclass
class Reply:
    """The answer to give; after ``cut_after`` bytes of the body the connection is treated as ``cut`` says."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None
    cut: str = "reset"  # or "stall", "end"
    announced_bytes: int | None = None
    chunked: bool = False
    pieces: int = 1
    pause_s: float = 0.0  # between pieces


Fault = Callable[[Asked, Callable[[], Reply]], Reply]


def status(code: int, words: str = "", **headers: str) -> Fault:
    """Answer with a status; the request does not reach the server."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda asked, forward: Reply(code, {"Content-Type": "text/plain", **named}, words.encode())


def cut(after_bytes: int, how: str = "reset", **headers: str | None) -> Fault:
    """Pass on the first bytes of the answer only. Headers: changed; None removes one."""

    def fault(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        reply = changed(**headers)(asked, forward)
        reply.cut_after, reply.cut = after_bytes, how
        return reply

    return fault


def changed(body: Callable[[bytes], bytes] = lambda data: data, **headers: str | None) -> Fault:
    """Pass on the answer with other headers (None removes one), or another body of the same announced length."""

    def fault(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        reply = forward()
        for name, value in headers.items():
            reply.headers = {
                key: kept for key, kept in reply.headers.items() if key.lower() != name.replace("_", "-").lower()
            }
            if value is not None:
                reply.headers[name.replace("_", "-")] = value
        reply.body = body(reply.body)
        return reply

    return fault


def paced(pieces: int, pause_s: float) -> Fault:
    """Pass on the answer slowly."""

    def fault(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        reply = forward()
        reply.pieces, reply.pause_s = pieces, pause_s
        return reply

    return fault


@dataclass
class Early:
    """Answer before the body of the request is read."""

    code: int
    words: str = ""


@dataclass
class Hold:
    """Take so many bytes of the request's body, then nothing more; never answer."""

    after_bytes: int


@dataclass
class Drop:
    """Take so many bytes of the request's body, then reset the connection."""

    after_bytes: int


class Interposer:
    """A server on 127.0.0.1 that passes on to ``upstream_port``.

    :ivar asked: all requests, oldest first. :ivar connections: how many were made.
    """

    def __init__(self, upstream_port: int, continues: bool = True) -> None:
        self.upstream_port = upstream_port
        self.continues = continues
        self.asked: list[Asked] = []
        self.connections = 0
        self._plans: dict[str, deque[object]] = {}
        self._always: dict[str, object] = {}
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.door = self
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, path: str) -> str:
        """Address of a path."""
        return f"http://127.0.0.1:{self.port}/{path.lstrip('/')}"

    def next(self, method: str, *faults: object) -> None:
        """The answers to the next requests with this method, in order; None passes one on."""
        self._plans.setdefault(method, deque()).extend(faults)

    def always(self, method: str, fault: object) -> None:
        """The answers to all requests with this method after those planned."""
        self._always[method] = fault

    def fault(self, method: str) -> object:
        """The fault for a request that has just come."""
        plan = self._plans.get(method)
        return plan.popleft() if plan else self._always.get(method)

    def methods(self) -> list[str]:
        """Methods of all requests."""
        return [asked.method for asked in self.asked]

    def forward(self, asked: Asked) -> Reply:
        """The real server's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream_port, timeout=30)
        headers = {name: value for name, value in asked.headers.items() if name not in _HOP_BY_HOP}
        host = f"127.0.0.1:{self.upstream_port}"
        if "destination" in headers:
            headers["destination"] = headers["destination"].replace(f"127.0.0.1:{self.port}", host)
        connection.request(asked.method, asked.path, asked.body or None, headers)
        answer = connection.getresponse()
        body = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
        connection.close()
        return Reply(answer.status, kept, body)

    def close(self) -> None:
        """End it; what stalls is let go."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    door: Interposer

    def server_bind(self) -> None:
        """The kernel must not take for a stalled server what it has not taken itself."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
        super().server_bind()

    def process_request(self, request: object, client_address: object) -> None:
        self.door.connections += 1
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """A plugin that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        door: Interposer = self.server.door  # type: ignore[attr-defined]
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, self.path, headers, door.connections)
        door.asked.append(asked)
        fault = door.fault(self.command)
        if isinstance(fault, Early):
            self.close_connection = True
            self._answer(Reply(fault.code, {"Connection": "close"}, fault.words.encode()))
            return
        if door.continues and headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if isinstance(fault, (Hold, Drop)):
            self._part(fault)
            return
        asked.body = self.rfile.read(int(headers.get("content-length") or 0))
        self._answer(fault(asked, lambda: door.forward(asked)) if callable(fault) else door.forward(asked))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_MOVE = do_MKCOL = do_PROPFIND = do_OPTIONS = _serve

    def handle_expect_100(self) -> bool:
        return True

    def _part(self, fault: object) -> None:
        assert isinstance(fault, (Hold, Drop))
        left = fault.after_bytes
        while left and (piece := self.rfile.read(min(left, 65536))):
            left -= len(piece)
        if isinstance(fault, Hold):
            self.server.door.closing.wait()  # type: ignore[attr-defined]
        self._reset()

    def _answer(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        names = {name.lower() for name in reply.headers}
        for name, value in reply.headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if reply.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif self.command != "HEAD" or "content-length" not in names:
            announced = len(reply.body) if reply.announced_bytes is None else reply.announced_bytes
            if reply.status not in (204, 304):
                self.send_header("Content-Length", str(announced))
        self.end_headers()
        if self.command != "HEAD":
            self._body(reply)

    def _body(self, reply: Reply) -> None:
        body = reply.body if reply.cut_after is None else reply.body[: reply.cut_after]
        with contextlib.suppress(OSError):
            if reply.chunked:
                self.wfile.write(b"".join(_chunks(body)))
            else:
                self._pace(body, reply)
            self.wfile.flush()
        if reply.cut_after is None:
            return
        if reply.cut == "stall":
            self.server.door.closing.wait()  # type: ignore[attr-defined]
        if reply.cut == "reset":
            self._reset()
        self.close_connection = True

    def _pace(self, body: bytes, reply: Reply) -> None:
        size = max(1, -(-len(body) // reply.pieces))
        for start in range(0, len(body), size):
            self.wfile.write(body[start : start + size])
            if self.server.door.closing.wait(reply.pause_s):  # type: ignore[attr-defined]
                return

    def _reset(self) -> None:
        """RST, but only when the peer has read what was sent."""
        self._drain()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.close()
            self.rfile.close()
            self.wfile.close()

    def _drain(self) -> None:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                unsent = struct.unpack("i", fcntl.ioctl(self.connection, termios.TIOCOUTQ, b"\0" * 4))[0]
                if not unsent:
                    break
            time.sleep(0.01)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def _chunks(body: bytes) -> Iterable[bytes]:
    for start in range(0, len(body), 10_000):
        piece = body[start : start + 10_000]
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"
