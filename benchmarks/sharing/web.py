"""nginx with what these benchmarks need: another address, a command prefix, TLS."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from stageout.core.errors import StageoutError

_CONFIG = """\
worker_processes 2; daemon off; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {home}/body; client_max_body_size 0;
    proxy_temp_path {home}/u; fastcgi_temp_path {home}/u; uwsgi_temp_path {home}/u; scgi_temp_path {home}/u;
    server {{
        listen {address}:{port}{tls};
        root {home}/files;
        location / {{ dav_methods PUT DELETE MKCOL MOVE; create_full_put_path on; }}
    }}
}}
"""


def authority(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that is its own authority, with its key in the same file."""
    made = folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


class WebServer:
    """nginx.

    :param wrapper: command prefix. :param certificate: PEM file, with ``key.pem`` beside it; None: without TLS.
    """

    def __init__(
        self, home: Path, address: str, port: int, wrapper: tuple[str, ...] = (), certificate: Path | None = None
    ) -> None:
        self._home = home
        self._address = address
        self._port = port or free_port()
        self._wrapper = wrapper
        self._certificate = certificate

    def __enter__(self) -> WebServer:
        for name in ("files", "body", "u"):
            (self._home / name).mkdir(parents=True)
            shutil.chown(self._home / name, "nobody", "nogroup")
        tls = ""
        if self._certificate:
            key = self._certificate.with_name("key.pem")
            tls = f" ssl; ssl_certificate {self._certificate}; ssl_certificate_key {key}"
        config = self._home / "nginx.conf"
        config.write_text(_CONFIG.format(home=self._home, address=self._address, port=self._port, tls=tls))
        nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if nginx is None:
            raise StageoutError("nginx is not installed; tools/install does it")
        command = [*self._wrapper, nginx, "-p", str(self._home), "-e", str(self._home / "error.log"), "-c", str(config)]
        self._process = subprocess.Popen([*command, "-g", "user nobody nogroup;"], stdin=subprocess.DEVNULL)
        end_s = time.monotonic() + 10
        while not (self._home / "nginx.pid").exists():
            if time.monotonic() > end_s or self._process.poll() is not None:
                self._process.kill()
                raise StageoutError(f"nginx did not start: {(self._home / 'error.log').read_text()[-300:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Of the master process."""
        return self._process.pid

    def url(self, path: str) -> str:
        """Address of a path."""
        return f"http{'s' if self._certificate else ''}://{self._address}:{self._port}/{path}"

    def make(self, name: str, size_bytes: int) -> None:
        """A file of random bytes, as old as is needed to name its version by date too."""
        path = self._home / "files" / name
        block = os.urandom(1 << 22)
        with path.open("wb") as file:
            for _ in range(size_bytes // len(block)):
                file.write(block)
        os.utime(path, (1, 1))


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
