"""Short HTTP exchanges: whose certificate counts, what of the environment does not, and what failures say."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from stageout.core.http import exchange


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen = (self.path, self.headers.get("Authorization"), body)  # type: ignore[attr-defined]
        self.send_response(307 if self.path == "/elsewhere" else 200)
        self.send_header("Location", "/")
        self.end_headers()
        self.wfile.write(b"a" * 100)

    def log_message(self, *arguments: object) -> None:
        return None


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture
def tls() -> tuple[ssl.SSLContext, trustme.CA, str]:
    """A server's context, its authority, and the SHA-256 of its certificate."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    der = ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())
    return context, authority, hashlib.sha256(der).hexdigest()


def test_one_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login root password other\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        assert exchange("POST", f"{url}/x", b"{}", token="t", timeout_s=20, most_bytes=40) == (200, b"a" * 40)
        assert server.seen == ("/x", "Bearer t", b"{}")  # type: ignore[attr-defined]
        assert exchange("POST", f"{url}/elsewhere", b"", timeout_s=20)[0] == 307
        assert server.seen == ("/elsewhere", None, b"")  # type: ignore[attr-defined]


def test_the_system_s_authorities_vouch(
    tls: tuple[ssl.SSLContext, trustme.CA, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context, authority, _ = tls
    with serving(context) as server:
        url = f"https://127.0.0.1:{server.server_port}/"
        with pytest.raises(ssl.SSLCertVerificationError):
            exchange("POST", url, b"", timeout_s=20)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        with pytest.raises(ssl.SSLCertVerificationError):
            exchange("POST", url, b"", timeout_s=20)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))  # OpenSSL's own name for the system's file
        assert exchange("POST", url, b"", timeout_s=20)[0] == 200


def test_the_system_s_directory_of_authorities_counts_beside_the_file(
    tls: tuple[ssl.SSLContext, trustme.CA, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context, authority, _ = tls
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ask = ["openssl", "x509", "-noout", "-subject_hash", "-in", str(tmp_path / "ca.pem")]
    name = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "ca.pem").rename(tmp_path / f"{name}.0")
    trustme.CA().cert_pem.write_to_path(tmp_path / "others.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "others.pem"))
    with serving(context) as server:
        url = f"https://127.0.0.1:{server.server_port}/"
        with pytest.raises(ssl.SSLCertVerificationError):
            exchange("POST", url, b"", timeout_s=20)
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        assert exchange("POST", url, b"", timeout_s=20)[0] == 200


def test_a_certificate_that_is_known_needs_no_authority(tls: tuple[ssl.SSLContext, trustme.CA, str]) -> None:
    context, _, digest = tls
    with serving(context) as server:
        url = f"https://127.0.0.1:{server.server_port}/"
        assert exchange("POST", url, b"", timeout_s=20, certificate=digest)[0] == 200
        del server.seen  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="did not match"):
            exchange("POST", url, b"secret", timeout_s=20, certificate="0" * 64)
        assert not hasattr(server, "seen"), "nothing was sent"


def test_failures_are_those_of_the_kernel() -> None:
    with pytest.raises(ConnectionRefusedError, match="Connection refused"):
        exchange("POST", "http://127.0.0.1:9/", b"", timeout_s=20)
    with pytest.raises(OSError):
        exchange("POST", "http://127.0.0.1:9/", b"", token="\u20ac", timeout_s=20)
