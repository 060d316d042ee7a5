"""A real web server to deliver to: nginx with WebDAV's PUT, on the loopback interface, that can be made to misbehave.

>>> with Destination(Path("/tmp/somewhere")) as place:                        # doctest: +SKIP
...     url = place.url("run7")                                               # for output_destination
...     place.refuse("quota exceeded")                                        # answer 403 with these words
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stageout.core.errors import StageoutError
from tests.harness.ports import free_ports

_CONFIG = """\
worker_processes 2;
daemon off;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
    log_format facts escape=json '{{"time": $msec, "method": "$request_method", "path": "$uri",'
        ' "status": $status, "bytes": $request_length, "took_s": $request_time, "sender": "$remote_addr"}}';
    access_log {home}/access.log facts;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/unused; fastcgi_temp_path {home}/unused;
    uwsgi_temp_path {home}/unused; scgi_temp_path {home}/unused;
    client_max_body_size 0;
    client_body_timeout 600s;
    server {{
        listen {host}:{port};
        root {home}/files;
        location / {{
            {refusal}
            dav_methods PUT DELETE MKCOL MOVE;
            create_full_put_path on;
            min_delete_depth 1;
            autoindex on;
        }}
    }}
}}
"""


@dataclass
class Destination:
    """One server and the directory behind it.

    :param home: its directory; files appear below ``home/files``.
    :param port: TCP port; a free one when 0. :param host: address to listen on.
    """

    home: Path
    port: int = 0
    host: str = "127.0.0.1"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _refusal: str = field(default="", repr=False)

    def __enter__(self) -> Destination:
        for name in ("files", "body", "unused"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)
        if os.getuid() == 0:
            for name in ("files", "body"):
                shutil.chown(self.home / name, "nobody", "nogroup")
        self.port = self.port or free_ports(1)[0]
        self._configure("")
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def url(self, path: str = "") -> str:
        """Address of a path on the server."""
        return f"http://{self.host}:{self.port}/{path.lstrip('/')}"

    def file(self, path: str) -> Path:
        """Return the server's file for ``path``."""
        return self.home / "files" / path.lstrip("/")

    def start(self) -> None:
        """Start it and wait until it answers."""
        nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if nginx is None:
            raise StageoutError(
                "nginx is not installed; tools/install does it (as root), or: apt-get install nginx-light"
            )
        user = ["-g", "user nobody nogroup;"] if os.getuid() == 0 else []
        command = [
            nginx,
            "-p",
            str(self.home),
            "-e",
            str(self.home / "error.log"),
            "-c",
            str(self.home / "nginx.conf"),
            *user,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 10
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise StageoutError(f"nginx did not start, see {self.home}/error.log")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it; connections are refused from now on."""
        if self._process is not None:
            self.resume()
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def start_again(self) -> None:
        """Start it when it was stopped."""
        if self._process is None:
            self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing moves."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._signal(signal.SIGCONT)

    def refuse(self, words: str, status: int = 403) -> None:
        """Answer every request with this status and text."""
        self._configure(f'default_type text/plain; return {status} "{words}\\n";')
        self._reload(status)

    def require(self, tokens: Sequence[str]) -> None:
        """Answer 401 to requests that bring none of these bearer tokens."""
        marks = "|".join(re.escape(token) for token in tokens)
        self._configure(f'if ($http_authorization !~ "^Bearer ({marks})$") {{ return 401; }}')
        self._reload(401)

    def accept(self) -> None:
        """Serve again."""
        self._configure("")
        self._reload(200)

    def requests(self, method: str = "", path: str = "") -> list[dict[str, Any]]:
        """Requests that were answered, oldest first.

        :param method: only these, such as "PUT". :param path: only those whose path starts so.
        """
        log = self.home / "access.log"
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        prefix = "/" + path.lstrip("/")
        return [row for row in rows if (not method or row["method"] == method) and row["path"].startswith(prefix)]

    def be_well(self) -> None:
        """Serve every request, whatever a test has done to the server."""
        self.start_again()
        self.resume()
        if self._refusal:
            self.accept()

    def _configure(self, refusal: str) -> None:
        self._refusal = refusal
        (self.home / "nginx.conf").write_text(
            _CONFIG.format(home=self.home, host=self.host, port=self.port, refusal=refusal)
        )

    def _reload(self, status: int) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while self._status() != status:
            if time.monotonic() > deadline:
                raise StageoutError(f"nginx did not take its new configuration, see {self.home}/error.log")
            time.sleep(0.02)

    def _status(self) -> int:
        import http.client

        try:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
            connection.request("GET", "/")
            return connection.getresponse().status
        except OSError:
            return 0

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)
