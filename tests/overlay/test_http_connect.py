"""CONNECT: standard tools reach a terminal through a relay, with TLS to the terminal."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tests.harness.pool.waiting import wait_until
from tests.harness.ports import free_ports
from tests.overlay.http_site import NAME, Site, site

_CONTENT = os.urandom(3 * 1024 * 1024 + 5)


@dataclass
class _Through:
    """A terminal, and a relay to it, to a port where nobody listens, and to ``echo``, which this test serves."""

    relay: Site
    terminal: Site
    dead: str
    echo: socket.socket

    @property
    def to(self) -> str:
        return f"localhost:{self.terminal.router.port}"

    @property
    def to_echo(self) -> str:
        return f"127.0.0.1:{self.echo.getsockname()[1]}"

    def far(self, first: bytes) -> socket.socket:
        """The connection at ``echo`` on which these bytes came. The relay itself comes, too, to measure the link."""
        while True:
            far, _ = self.echo.accept()
            far.settimeout(30)
            came = far.recv(len(first))
            if came[:1] != b"\x01":  # of a greeting between routers
                assert came == first
                return far
            far.close()

    def token(self, to: str = "", user: str = "alice", **claims: object) -> str:
        now = time.time()
        said = {"aud": NAME, "iat": now, "exp": now + 60, "jti": os.urandom(8).hex(), "scope": f"relay:{to or self.to}"}
        return self.relay.token(user, **{**said, **claims})

    def connect(self, token: str, to: str = "", tls: bool = False) -> tuple[int, str, socket.socket]:
        """Status and head, with the body of a refusal, and the connection."""
        sock = socket.create_connection(("127.0.0.1", self.relay.router.port), timeout=30)
        if tls:
            sock = ssl.create_default_context(cafile=str(self.relay.ca)).wrap_socket(sock, server_hostname="localhost")
        to = to or self.to
        field = f"Proxy-Authorization: Bearer {token}\r\n" if token else ""
        sock.sendall(f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{field}\r\n".encode())
        text = b""
        while not text.endswith(b"\r\n\r\n"):
            part = sock.recv(1)
            if not part:
                break
            text += part
        head = text.decode()
        if " 200 " not in head:
            head += b"".join(iter(lambda: sock.recv(65536), b"")).decode()
        return int(head.split()[1]), head, sock

    def status(self, token: str, to: str = "", tls: bool = False) -> int:
        status, _, sock = self.connect(token, to, tls)
        sock.close()
        return status

    def curl(self, *options: str, token: str, scheme: str = "http", path: str = "/f") -> tuple[int, str]:
        """Status of a request at the terminal, "000" without one, and curl's complaint."""
        command = [
            "curl", "--silent", "--show-error", "--max-time", "60", "--cacert", str(self.terminal.ca),
            "--proxy", f"{scheme}://localhost:{self.relay.router.port}", "--proxy-cacert", str(self.relay.ca),
            "--proxy-header", f"Proxy-Authorization: Bearer {token}",
            "--header", f"Authorization: Bearer {self.terminal.token()}", "--write-out", "%{http_code}", *options,
            f"https://{self.to}{path}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return int(done.stdout[-3:]), done.stderr


@contextlib.contextmanager
def _through(home: Path, settings: dict[str, str] | None = None) -> Iterator[_Through]:
    authority = trustme.CA()
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as echo, site(home / "terminal", authority=authority) as terminal:
        echo.settimeout(30)
        listed = f"localhost:{terminal.router.port}, localhost:{port}, 127.0.0.1:{echo.getsockname()[1]}"
        (home / "relay").mkdir()
        own = {
            "STAGEOUT_ROUTER_ROOT": "", "STAGEOUT_ROUTER_NEIGHBOURS": listed,
            "STAGEOUT_ROUTER_KEY": str(home / "relay/hop.key"), "STAGEOUT_ROUTER_INTERVAL": "3600", **(settings or {}),
        }  # fmt: skip
        with site(home / "relay", own, {"alice": "-", "bob": "-"}, authority) as relay:
            yield _Through(relay, terminal, f"localhost:{port}", echo)


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Through]:
    with _through(tmp_path_factory.mktemp("through")) as found:
        yield found


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_curl_puts_and_gets_a_file(through: _Through, tmp_path: Path, scheme: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(_CONTENT)
    put = through.curl("--upload-file", str(source), token=through.token(), scheme=scheme, path=f"/{scheme}/f")
    assert put == (201, "")
    assert (through.terminal.root / f"{scheme}/f").read_bytes() == _CONTENT
    got = through.curl("--output", str(target), token=through.token(), scheme=scheme, path=f"/{scheme}/f")
    assert got == (200, "") and target.read_bytes() == _CONTENT


def test_the_command_makes_such_a_token(through: _Through, tmp_path: Path) -> None:
    through.relay.keys["bob"].store("key", tmp_path / "bob.key")
    command = [sys.executable, "-m", "stageout.cli.main", "token", str(tmp_path / "bob.key"), "--user", "bob"]
    command += ["--router", NAME, "--relay-to", through.to]
    token = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert through.status(token) == 200
    assert through.status(token) == 407
    wrong = subprocess.run([*command, "--scope", "relay"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 64 and "--relay-to" in wrong.stderr


def test_a_token_counts_once(through: _Through) -> None:
    token = through.token()
    assert through.status(token) == 200
    status, text, _ = through.connect(token)
    assert status == 407 and "used already" in text and "application/problem+json" in text
    assert "Proxy-Authenticate: Bearer" in text
    assert through.status(through.token()) == 200


def test_tokens_that_give_nothing(through: _Through) -> None:
    now = time.time()
    for claims in (
        {"exp": now + 600}, {"aud": "other"}, {"jti": None}, {"jti": ""}, {"iat": now - 200, "exp": now - 100},
        {"scope": f"relay:{through.to} relay"}, {"scope": f"relay:{through.to} storage.read:/"}, {"iss": "nobody"},
    ):  # fmt: skip
        assert through.status(through.token(**claims)) == 407, claims
    assert through.status("") == 407
    assert through.status(through.terminal.token()) == 407, "of another router"
    for scope in ("storage.read:/", None, f"relay:{through.dead}", "relay:", f"relay:{through.to}0", "relay"):
        assert through.status(through.token(scope=scope)) == 403, scope
    assert through.status(through.token(scope="relay"), tls=True) == 200
    assert through.status(through.token(scope="storage.read:/"), tls=True) == 403


def test_a_token_as_password_of_a_proxy(through: _Through) -> None:
    password = b64encode(f"any:{through.token()}".encode()).decode()
    with socket.create_connection(("127.0.0.1", through.relay.router.port), timeout=30) as sock:
        head = f"CONNECT {through.to} HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic {password}\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(12) == b"HTTP/1.1 200"


def test_no_other_address(through: _Through) -> None:
    own = f"localhost:{through.relay.router.port}"
    for to in ("example.org:443", f"127.0.0.1:{through.terminal.router.port}", own, "localhost:22"):
        assert through.status(through.token(to), to) == 403, to
    for to in ("localhost", "http://localhost:1/", "/f", f"{through.to}/x", "localhost:0", "localhost:99999", "[::1:5"):
        assert through.status(through.token(), to) == 400, to
    assert through.status(through.token(through.to), through.to.upper()) == 200
    status, text, _ = through.connect(through.token(through.dead), through.dead)
    assert status == 502 and '"status": 502' in text


def test_ends_pass_one_by_one(through: _Through) -> None:
    """In TLS, too."""
    for tls in (False, True):
        status, _, near = through.connect(through.token(through.to_echo), through.to_echo, tls)
        assert status == 200
        near.sendall(b"question")
        with near, through.far(b"question") as far:
            if not tls:  # Python's TLS has no end of one direction
                near.shutdown(socket.SHUT_WR)
                assert far.recv(100) == b""
            far.sendall(b"answer")
            far.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda sock=near: sock.recv(100), b"")) == b"answer"  # type: ignore[misc]


def test_what_comes_at_once_behind_the_head_arrives(through: _Through) -> None:
    with socket.create_connection(("127.0.0.1", through.relay.router.port), timeout=30) as near:
        token = through.token(through.to_echo)
        head = f"CONNECT {through.to_echo} HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Bearer {token}\r\n\r\n"
        near.sendall(head.encode() + b"early")
        through.far(b"early").close()


def test_a_subject_has_its_share_and_a_removed_key_ends_its_connections(tmp_path: Path) -> None:
    with _through(tmp_path, {"STAGEOUT_ROUTER_PEER_CONNECTIONS": "2"}) as through:
        held = [through.connect(through.token()) for _ in range(2)]
        assert [status for status, _, _ in held] == [200, 200]
        status, text, _ = through.connect(through.token())
        assert status == 429 and "Retry-After" in text
        assert through.status(through.token(user="bob")) == 200, "others are served"
        keys = Path(through.relay.router.environment["STAGEOUT_ROUTER_KEYS"])
        keys.write_text("".join(line for line in keys.read_text().splitlines(True) if not line.startswith("alice")))
        through.relay.router.reload()
        for _, _, sock in held:
            sock.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            sock.close()
        assert through.status(through.token()) == 407


def test_tokens_made_before_a_restart_are_refused(tmp_path: Path) -> None:
    with _through(tmp_path) as through:
        token = through.token()
        assert through.status(token) == 200
        through.relay.router.stop()
        through.relay.router.start()
        status, text, _ = through.connect(token)
        assert status == 407 and "before this router started" in text
        assert wait_until(lambda: through.status(through.token()) == 200, what="a new one", timeout_s=5)
