"""The emulated service as a server on the loopback interface, and what tests may do with it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.harness.globus.mover import Mover
from tests.harness.globus.transfer_api import TransferApi
from tests.harness.globus.world import ACTIVE, GUEST, TRANSFER, ApiError, Collection, Refusal, Task, World

_PIECE_BYTES = 1 << 20
_LIFE_S = 172800.0
_REFRESH = "refresh"


class Emulator:
    """One emulated Globus.

    :param home: where it keeps what it knows, and the directories of collections made without one.
    :param active: tasks of one user that run at once. :param pause_s: between two attempts of a file that failed.
    :param setup_s: that a task takes before its first byte (the public service: some seconds).
    :param latency_s: that each request takes more.
    """

    def __init__(
        self, home: Path, active: int = 3, pause_s: float = 0.05, setup_s: float = 0.0, latency_s: float = 0.0
    ) -> None:
        self._home = home
        self._rules = (active, pause_s, setup_s)
        self.latency_s = latency_s
        self._port = 0
        self.start()

    def __enter__(self) -> Emulator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- the server --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to answer, at the same address as before, and go on with the tasks that were not over."""
        self.world = World(self._home / "service")
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._port = self._server.server_port
        self.mover = Mover(self.world, *self._rules)
        self._server.emulator = self
        self._server.api = TransferApi(self.world, self.mover, self.address)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        for task in self.world.tasks.values():
            if task.status == ACTIVE:
                self.mover.start(task)

    def stop(self) -> None:
        """End it: connections are refused, and no byte moves."""
        self.mover.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server.cut_connections()

    @property
    def address(self) -> str:
        """Base URL of Auth and Transfer."""
        return f"http://127.0.0.1:{self._port}"

    # ---- what there is -----------------------------------------------------------------------------------------------

    def collection(self, name: str, root: Path | None = None, **facts: Any) -> Collection:
        """Make a collection over a directory; see :class:`Collection` for ``facts``."""
        root = root or self._home / name
        root.mkdir(parents=True, exist_ok=True)
        made = Collection(str(uuid.uuid4()), str(root), name, **{"kind": GUEST, **facts})
        with self.world.lock:
            self.world.collections[made.id] = made
        self.world.save()
        return made

    def change(self, collection: str, **facts: Any) -> None:
        """Change what is wrong with a collection."""
        self.world.change(collection, **facts)

    def token(self, resource_server: str = TRANSFER, user: str = "alice", life_s: float = _LIFE_S) -> dict[str, Any]:
        """A new token, as the document that Auth would send (and a credmon would write)."""
        scope = "urn:globus:auth:scope:transfer.api.globus.org:all"
        if resource_server != TRANSFER:
            scope = f"https://auth.globus.org/scopes/{resource_server}/https"
        name = self.world.issue(resource_server, user, scope, life_s)
        return _token_document(name, resource_server, scope, life_s)

    def consent(self, user: str, collection: str) -> None:
        """The user lets the Transfer service into a mapped collection."""
        with self.world.lock:
            self.world.consents.setdefault(user, set()).add(collection)
        self.world.save()

    def refresh_token(self, user: str, scope: str) -> str:
        """Return the tokens of a person's login with offline access."""
        return self.world.issue(_REFRESH, user, scope, _LIFE_S)

    def client(self, client_id: str, secret: str) -> None:
        """Let this application ask for tokens of its own (client credentials)."""
        self.world.clients[client_id] = secret
        self.world.save()

    def revoke(self) -> None:
        """All tokens end now."""
        with self.world.lock:
            self.world.tokens.clear()
        self.world.save()

    def refuse(self, path: str, **facts: Any) -> Refusal:
        """Plan a fault of the service; see :class:`Refusal`."""
        planned = Refusal(path, **facts)
        self.world.refusals.append(planned)
        return planned

    # ---- what happened -----------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[Task]:
        """All tasks, oldest first."""
        return sorted(self.world.tasks.values(), key=lambda task: task.requested_at)

    def calls(self, pattern: str = ".*") -> list[str]:
        """Requests that came, as ``METHOD PATH``, whose text this regular expression matches."""
        with self.world.lock:
            lines = [f"{method} {path}" for method, path in self.world.calls]
        return [line for line in lines if re.fullmatch(pattern, line)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    emulator: Emulator
    api: TransferApi

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def cut_connections(self) -> None:
        """End those that clients keep for further requests."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up, or is killed, is no news."""


class _Cut(Exception):
    """The connection is to be cut."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """A connection begins."""
        cast("_Server", self.server).connections.add(self.request)
        super().setup()

    def finish(self) -> None:
        """Tell whether the process has ended."""
        cast("_Server", self.server).connections.discard(self.request)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _serve(self) -> None:
        server = cast("_Server", self.server)
        self.emulator, self.world = server.emulator, server.emulator.world
        address = urlsplit(self.path)
        with self.world.lock:
            self.world.calls.append((self.command, address.path))
        if self.emulator.latency_s:
            time.sleep(self.emulator.latency_s)
        self.refusal = self.world.refusal(self.command, address.path)
        try:
            if address.path.startswith("/relay/"):
                self._relay(address.path.rpartition("/")[2])
            elif address.path.startswith("/c/"):
                self._https(address.path)
            else:
                self._documents(server, address.path, dict(parse_qsl(address.query)))
        except ApiError as refused:
            self._send(refused.status, json.dumps(refused.document).encode())
        except _Cut:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def _documents(self, server: _Server, path: str, query: dict[str, str]) -> None:
        raw = self.rfile.read(self._length)
        if self.refusal and not self.refusal.acts:
            self._refuse()
            return
        if path == "/v2/oauth2/token":
            status, document = self._token(raw)
        else:
            user = self.world.user_of(self.headers.get("Authorization", ""), TRANSFER)
            body = json.loads(raw) if raw else None
            status, document = server.api.answer(user, self.command, path.replace("/v0.10/", "", 1), query, body)
        if self.refusal:
            self._refuse()
            return
        self._send(status, json.dumps(document).encode())

    def _relay(self, key: str) -> None:
        """A personal endpoint is online as long as its program keeps this connection."""
        found = next((one for one in self.world.collections.values() if one.setup_key == key), None)
        if found is None:
            raise ApiError(404, "NotFound", "no such setup key")
        self.world.change(found.id, offline=False)
        self.rfile.read(1)
        with self.world.lock:
            gone = found.id not in self.world.collections
        if not gone:
            self.world.change(found.id, offline=True)
        raise _Cut

    @property
    def _length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _refuse(self) -> None:
        assert self.refusal is not None
        if not self.refusal.status:
            raise _Cut
        document = {"code": self.refusal.code, "message": "planned", "request_id": "emulated", **self.refusal.facts}
        text = self.refusal.body or json.dumps(document)
        self._send(self.refusal.status, text.encode(), self.refusal.headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # ---- Auth --------------------------------------------------------------------------------------------------------

    def _token(self, raw: bytes) -> tuple[int, dict[str, Any]]:
        """Client credentials and renewal, by HTTP Basic only, as Auth's metadata says."""
        form = dict(parse_qsl(raw.decode()))
        given = base64.b64decode(self.headers.get("Authorization", "").partition("Basic ")[2]).decode()
        client, _, secret = given.partition(":")
        if self.world.clients.get(client) != secret or not client:
            return 401, {"error": "invalid_client"}
        user, scopes = client, form.get("scope", "")
        if form.get("grant_type") == "refresh_token":
            login = self.world.tokens.get(form.get("refresh_token", ""))
            if login is None or login.resource_server != _REFRESH:
                return 400, {"error": "invalid_grant"}
            user, scopes = login.user, login.scope
        elif form.get("grant_type") != "client_credentials":
            return 400, {"error": "unsupported_grant_type"}
        made = [self._grant(user, scope) for scope in re.findall(r"[^\s\[]+(?:\[[^\]]*\])?", scopes)]
        return 200, {**made[0], "other_tokens": made[1:]}

    def _grant(self, user: str, scope: str) -> dict[str, Any]:
        base = scope.partition("[")[0]
        for collection in re.findall(r"scopes/([0-9a-f-]{36})/data_access", scope):
            self.emulator.consent(user, collection)
        server = base.split("/")[4] if base.startswith("https:") else TRANSFER
        return _token_document(self.world.issue(server, user, base, _LIFE_S), server, base, _LIFE_S)

    # ---- the HTTPS side of a collection ------------------------------------------------------------------------------

    def _https(self, path: str) -> None:
        if self.refusal and not self.refusal.cut_bytes and not self.refusal.lacks:
            self.rfile.read(self._length)
            self._refuse()
            return
        _, _, name, rest = path.split("/", 3)
        try:
            collection = self.world.collection(name)
            self.world.user_of(self.headers.get("Authorization", ""), name)
            if collection.denies("/" + unquote(rest)):
                raise ApiError(403, "PermissionDenied", "Permission denied")
            place = collection.place(unquote(rest))
        except ApiError:
            self.rfile.read(self._length)
            raise
        {"GET": self._get, "PUT": self._put, "DELETE": self._delete}[self.command](place, collection)

    def _missing(self) -> None:
        self._send(404, b"GlobusError: v=1 c=PATH_NOT_FOUND\r\nGridFTP-Errno: 2\r\n")

    def _get(self, place: Path, collection: Collection) -> None:
        if not place.is_file():
            self._missing()
            return
        facts = place.stat()
        size, tag = facts.st_size, f'"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"'
        if self.headers.get("If-Match", tag) != tag:
            self._send(412, b"")
            return
        lacks = self.refusal.lacks if self.refusal else ()
        first, last, status = 0, size - 1, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and "Content-Range" not in lacks:
            first, last, status = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1), 206
            if first >= size:
                self._send(416, b"", {"Content-Range": f"bytes */{size}"})
                return
        self.send_response(status)
        headers = {"Content-Length": str(last - first + 1), "ETag": tag}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        for name in set(headers).difference(lacks):
            self.send_header(name, headers[name])
        self.close_connection = "Content-Length" in lacks
        self.end_headers()
        self._pour(place, first, last - first + 1, collection.rate_bytes_s)

    def _pour(self, place: Path, first: int, left: int, rate_bytes_s: float | None) -> None:
        cut_at = self.refusal.cut_bytes if self.refusal else None
        with place.open("rb") as file:
            file.seek(first)
            sent = 0
            while left > 0:
                piece = file.read(min(_PIECE_BYTES, left, (cut_at - sent) if cut_at else left))
                self.wfile.write(piece)
                left, sent = left - len(piece), sent + len(piece)
                if cut_at and sent >= cut_at:
                    raise _Cut
                if rate_bytes_s:
                    time.sleep(len(piece) / rate_bytes_s)

    def _put(self, place: Path, collection: Collection) -> None:
        if self.path.endswith("/"):
            self.rfile.read(self._length)
            place.mkdir(exist_ok=True)
            self._send(200, b"")
            return
        if not place.parent.is_dir():
            self.rfile.read(self._length)
            self._missing()
            return
        left = self._length
        with place.open("wb") as file:
            while left > 0:
                piece = self.rfile.read(min(_PIECE_BYTES, left))
                if not piece:
                    return
                file.write(piece)
                left -= len(piece)
        if collection.owner and os.geteuid() == 0:
            shutil.chown(place, *collection.owner)
        self._send(200, b"")

    def _delete(self, place: Path, collection: Collection) -> None:
        del collection
        if not place.is_file():
            self._missing()
            return
        place.unlink()
        self._send(200, b"")


def _token_document(name: str, resource_server: str, scope: str, life_s: float) -> dict[str, Any]:
    return {
        "access_token": name,
        "expires_in": int(life_s),
        "expires_at": time.time() + life_s,
        "token_type": "Bearer",
        "resource_server": resource_server,
        "scope": scope,
    }
