"""Small places to move files from and to, for tests of plugins: a directory, and an HTTP server over one."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import quote, unquote, urlsplit

__all__ = ["Endpoint", "HttpEndpoint"]

STALLED = "stalled"  # a file of this name never arrives whole


class Endpoint:
    """Files below a directory that are also below a URL.

    :param url_base: without a slash at the end. :param folder: the same place as a directory of this machine.
    """

    def __init__(self, url_base: str, folder: Path) -> None:
        self.url_base = url_base.rstrip("/")
        self.folder = folder

    def url(self, name: str) -> str:
        """Make the URL of a file; what cannot stand in a URL is encoded."""
        return f"{self.url_base}/{quote(name)}"

    def put(self, name: str, data: bytes) -> None:
        """Make a file there, without the plugin."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get(self, name: str) -> bytes | None:
        """Return the content of a file there, None when there is none."""
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def stall(self) -> str:
        """Make the URL of a file whose download begins and does not end."""
        path = self.folder / STALLED
        if not path.exists():
            os.mkfifo(path)
        return self.url(STALLED)

    def close(self) -> None:
        """End it."""


class HttpEndpoint(Endpoint):
    """An HTTP server on the loopback address: GET, HEAD, PUT, DELETE; no digests, no ranges."""

    def __init__(self, folder: Path) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.folder = folder
        self._server.closing = threading.Event()
        super().__init__(f"http://127.0.0.1:{self._server.server_port}", folder)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stall(self) -> str:
        """Make the URL of a file of which only the first half comes."""
        return self.url(STALLED)

    def close(self) -> None:
        """End the server."""
        self._server.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    folder: Path
    closing: threading.Event

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: a plugin that hangs up, or is killed, is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server, path = cast("_Server", self.server), self._path()
        if path.name == STALLED:
            self._answer(200, b"x" * 1000, body=False)
            self.wfile.write(b"x" * 500)
            self.wfile.flush()
            server.closing.wait()
            self.close_connection = True
        elif path.is_file():
            self._answer(200, path.read_bytes())
        else:
            self._answer(404, b"no such file\n")

    def do_HEAD(self) -> None:
        path = self._path()
        if path.is_file():
            self._answer(200, path.read_bytes(), body=False)
        else:
            self._answer(404, b"", body=False)

    def do_PUT(self) -> None:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        data, path = self._body(), self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self._answer(201, b"")

    def do_DELETE(self) -> None:
        path = self._path()
        found = path.is_file()
        path.unlink(missing_ok=True)
        self._answer(204 if found else 404, b"")

    def _path(self) -> Path:
        name = unquote(urlsplit(self.path).path, errors="surrogateescape").lstrip("/")
        return cast("_Server", self.server).folder / name

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, data: bytes, body: bool = True) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and status != 204:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args
