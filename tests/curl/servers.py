"""Real servers for the tests: WsgiDAV, Apache, FTP, S3."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar

from cheroot import wsgi
from cheroot.server import HTTPConnection
from cheroot.ssl.builtin import BuiltinSSLAdapter
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import ThreadedFTPServer
from wsgidav.fs_dav_provider import FilesystemProvider
from wsgidav.wsgidav_app import WsgiDAVApp

from tests.harness.ports import free_ports
from tests.polling import wait_for


class WebDav:
    """WsgiDAV on cheroot.

    :param certificate: file with key and chain, for TLS. :param users: name -> password; everybody without.
    :ivar asked: (method, path, headers) of all requests. :ivar connections: how many were made.
    """

    def __init__(self, root: Path, certificate: Path | None = None, users: dict[str, str] | None = None) -> None:
        self.root = root
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.connections = 0
        mapping = {name: {"password": password} for name, password in users.items()} if users else True
        self._app = WsgiDAVApp(
            {
                "provider_mapping": {"/": FilesystemProvider(str(root), fs_opts={})},
                "simple_dc": {"user_mapping": {"*": mapping}},
                "http_authenticator": {"accept_digest": False, "default_to_digest": False},
                "verbose": 0,
                "logging": {"enable": False},
            }
        )
        self._server = wsgi.Server(("127.0.0.1", 0), self._serve, numthreads=12, shutdown_timeout=1)
        self._server.ConnectionClass = self._connection
        if certificate:
            self._server.ssl_adapter = BuiltinSSLAdapter(str(certificate), str(certificate))
        self._server.expiration_interval = 0.05  # how soon it notices that it shall end
        self._server.error_log = lambda *args, **named: None  # type: ignore[method-assign]
        self._server.prepare()
        self.port: int = self._server.bind_addr[1]
        threading.Thread(target=self._server.serve, daemon=True).start()

    def _connection(self, *args: Any, **named: Any) -> HTTPConnection:
        self.connections += 1
        return HTTPConnection(*args, **named)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        headers = {name[5:].lower().replace("_", "-"): value for name, value in environ.items() if name[:5] == "HTTP_"}
        self.asked.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], headers))
        return self._app(environ, start_response)

    def methods(self) -> list[str]:
        """Methods of all requests."""
        return [method for method, _, _ in self.asked]

    def forget(self) -> None:
        """Begin counting anew."""
        self.asked.clear()
        self.connections = 0

    def names(self) -> list[str]:
        """Paths of all files, hidden ones too."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())

    def close(self) -> None:
        """End it."""
        self._server.stop()


_APACHE = """\
ServerRoot {home}
PidFile {home}/pid
ErrorLog {home}/error.log
ServerName 127.0.0.1
Listen 127.0.0.1:{port}
LoadModule mpm_event_module {modules}/mod_mpm_event.so
LoadModule authz_core_module {modules}/mod_authz_core.so
LoadModule dav_module {modules}/mod_dav.so
LoadModule dav_fs_module {modules}/mod_dav_fs.so
{user}
DavLockDB {home}/locks
DocumentRoot {home}/files
<Directory {home}/files>
    Dav On
    Require all granted
</Directory>
"""


class Apache:
    """Apache with mod_dav, in a process of its own.

    :param home: its directory; files appear below ``home/files``. Its user must be able to enter it.
    """

    def __init__(self, home: Path) -> None:
        self.root = home / "files"
        self.root.mkdir()
        (self.port,) = free_ports(1)
        modules, user = "/usr/lib/apache2/modules", ""
        if os.getuid() == 0:
            user = "User nobody\nGroup nogroup"
            for path in (home, self.root):
                shutil.chown(path, "nobody", "nogroup")
        config = home / "httpd.conf"
        config.write_text(_APACHE.format(home=home, port=self.port, modules=modules, user=user))
        program = shutil.which("apache2", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        assert program, "Apache is not installed; tools/install does it (as root), or: apt-get install apache2-bin"
        self._process = subprocess.Popen([program, "-f", str(config), "-DFOREGROUND"], start_new_session=True)
        wait_for(self._answers, lambda: f"Apache: {(home / 'error.log').read_text()}")

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Handler(FTPHandler):
    """Refuses some names as servers with quotas and rules do."""

    use_sendfile = False
    refused: ClassVar = {
        "quota": "552 Quota exceeded.",
        "nospace": "452 No space left.",
        "never": "553 Name not allowed.",
    }

    def ftp_STOR(self, file: str, mode: str = "w") -> Any:
        folder = Path(file).parent.name
        if folder in self.refused:
            self.respond(self.refused[folder])
            return None
        return super().ftp_STOR(file, mode)

    def ftp_DELE(self, path: str) -> Any:
        folder = Path(path).parent.name
        if folder in self.refused:
            self.respond(self.refused[folder])
            return None
        return super().ftp_DELE(path)


class Ftp:
    """pyftpdlib; user ``alice`` with password ``wonder-land``, and anonymous."""

    def __init__(self, root: Path) -> None:
        self.root = root
        authorizer = DummyAuthorizer()
        authorizer.add_user("alice", "wonder-land", str(root), perm="elradfmwMT")
        authorizer.add_anonymous(str(root), perm="elradfmw")
        handler = type("Handler", (_Handler,), {"authorizer": authorizer, "auth_failed_timeout": 0.1})
        self._server = ThreadedFTPServer(("127.0.0.1", 0), handler)
        self.port: int = self._server.address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"timeout": 0.05}, daemon=True)
        self._thread.start()

    def url(self, path: str, user: str = "") -> str:
        """Address of a path."""
        return f"ftp://{user + '@' if user else ''}127.0.0.1:{self.port}/{path}"

    def close(self) -> None:
        """End it."""
        self._server.close_all()


class S3:
    """moto's server with one bucket, and a client for it."""

    def __init__(self) -> None:
        import boto3
        from botocore.config import Config
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.port: int = self._server.get_host_and_port()[1]
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="AKIAEXAMPLE",
            aws_secret_access_key="not-a-secret",
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )
        self.client.create_bucket(Bucket="bucket")

    def signed(self, method: str, key: str, expires_s: int = 600) -> str:
        """A pre-signed URL."""
        operation = {"GET": "get_object", "PUT": "put_object"}[method]
        params = {"Bucket": "bucket", "Key": key}
        return str(self.client.generate_presigned_url(operation, Params=params, ExpiresIn=expires_s))

    def content(self, key: str) -> bytes:
        """An object."""
        return bytes(self.client.get_object(Bucket="bucket", Key=key)["Body"].read())

    def close(self) -> None:
        """End it."""
        self._server.stop()
