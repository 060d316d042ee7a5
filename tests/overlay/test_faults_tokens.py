"""Faults of tokens (21): identities of one issuer, tokens that end on an open connection, issuers that are removed."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from tests.harness.pool.waiting import wait_until
from tests.overlay.http_site import NAME, Site, site

_ISSUER = "https://issuer.example.org"
_KEY = ec.generate_private_key(ec.SECP256R1())
_TOLERANCE_S = 60


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    """A router with one issuer, for all that is below vo."""
    keys = {"keys": [{**json.loads(ECAlgorithm.to_jwk(_KEY.public_key())), "kid": "ec"}]}
    (tmp_path / "jwks.json").write_text(json.dumps(keys))
    (tmp_path / "issuers").write_text(f"{_ISSUER} /vo jwks.json\n")
    with site(tmp_path, {"STAGEOUT_ROUTER_TOKEN_ISSUERS": str(tmp_path / "issuers")}) as found:
        for name in ("vo/alice/d/f", "vo/bob/f", "alice/d/f"):
            (found.root / name).parent.mkdir(parents=True, exist_ok=True)
            (found.root / name).write_bytes(b"x")
        yield found


def _of_issuer(sub: str, scope: str | None, ends: float = 3600) -> str:
    now = int(time.time())
    said = {"iss": _ISSUER, "sub": sub, "aud": NAME, "iat": now, "nbf": now, "exp": now + ends}
    if scope is not None:
        said["scope"] = scope
    return jwt.encode(said, _KEY, "ES256", headers={"kid": "ec"})


def test_bob_does_not_touch_what_is_alices(here: Site) -> None:
    """The issuer has one line and one prefix for both."""
    everything = "storage.read:/bob storage.modify:/bob storage.create:/bob"
    bob = _of_issuer("bob", everything)
    for scope in (everything, "storage.modify:/bob/../alice", "storage.modify:/bob%2F..%2Falice", "storage.modify", ""):
        token = _of_issuer("bob", scope)
        for method, path, *fields in (
            ("DELETE", "/vo/alice/d"), ("DELETE", "/vo/alice/d/f"), ("PUT", "/vo/alice/d/f"), ("GET", "/vo/alice/d/f"),
            ("MKCOL", "/vo/alice/new"), ("DELETE", "/alice/d"), ("PUT", "/alice/d/f"),
            ("MOVE", "/vo/alice/d", "Destination: /vo/bob/d"), ("MOVE", "/vo/bob/f", "Destination: /vo/alice/d/f"),
            ("COPY", "/vo/alice/d/f", "Destination: /vo/bob/g"),
        ):  # fmt: skip
            options = [word for field in fields for word in ("--header", field)]
            status, _ = here.curl(path, "--request", method, *options, token=token)
            assert status == 403, (scope, method, path)
    assert here.curl("/vo/bob/f", "--request", "DELETE", token=_of_issuer("bob", None))[0] == 403
    assert here.curl("/vo/bob/f", "--request", "DELETE", token=bob)[0] == 204
    assert (here.root / "vo/alice/d/f").read_bytes() == (here.root / "alice/d/f").read_bytes() == b"x"
    assert not (here.root / "vo/bob/d").exists()


def test_identities_of_one_issuer_have_shares_of_their_own(tmp_path: Path, here: Site) -> None:
    """One that takes all its connections keeps the other waiting for nothing."""
    here.router.stop()
    here.router.environment["STAGEOUT_ROUTER_PEER_CONNECTIONS"] = "2"
    here.router.start()
    alice, bob = (_of_issuer(sub, "storage.read:/") for sub in ("alice", "bob"))
    held = [_connected(here) for _ in range(2)]
    for sock in held:
        assert _get(sock, "/vo/bob/f", alice) == 200
    assert here.curl("/vo/bob/f", token=alice)[0] == 429
    assert here.curl("/vo/bob/f", token=bob)[0] == 200
    for sock in held:
        sock.close()


def _connected(here: Site) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", here.router.port), timeout=30)
    return ssl.create_default_context(cafile=str(here.ca)).wrap_socket(sock, server_hostname="localhost")


def _answered(sock: ssl.SSLSocket) -> int:
    answer = HTTPResponse(sock)
    answer.begin()
    answer.read()
    return answer.status


def _get(sock: ssl.SSLSocket, path: str, token: str) -> int:
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    return _answered(sock)


def test_a_body_may_end_after_its_token_and_nothing_may_begin(here: Site) -> None:
    now = int(time.time())
    ends = now + 5 - _TOLERANCE_S
    token = here.token(iat=now - 600, nbf=now - 600, exp=ends)
    with _connected(here) as sock:
        head = f"PUT /late HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 4\r\n\r\n"
        sock.sendall(head.encode() + b"ab")
        staging = here.root / ".stageout/staging"
        wait_until(lambda: [*staging.iterdir()], what="its data", timeout_s=20)
        wait_until(lambda: time.time() > ends + _TOLERANCE_S + 1, what="the end of the token")
        sock.sendall(b"cd")
        assert _answered(sock) == 201
        assert (here.root / "late").read_bytes() == b"abcd"
        assert _get(sock, "/late", token) == 401
    assert here.curl("/late", "--request", "DELETE", token=token)[0] == 401
    assert (here.root / "late").exists()


def test_an_issuer_that_is_removed_writes_and_reads_nothing_more(here: Site, tmp_path: Path) -> None:
    """A reload counts for open connections, and for tokens that were verified before."""
    token = _of_issuer("bob", "storage.read:/bob storage.modify:/bob")
    with _connected(here) as issued, _connected(here) as other:
        assert _get(issued, "/vo/bob/f", token) == 200
        assert _get(other, "/vo/bob/f", here.token()) == 200
        (tmp_path / "issuers").write_text("# nobody\n")
        here.router.reload()
        issued.settimeout(20)
        assert issued.recv(1) == b""
        assert _get(other, "/vo/bob/f", here.token()) == 200
    assert here.curl("/vo/bob/f", token=token)[0] == 401


def test_a_prefix_that_is_another_now_counts_at_once(here: Site, tmp_path: Path) -> None:
    token = _of_issuer("bob", "storage.read:/bob")
    with _connected(here) as issued:
        assert _get(issued, "/vo/bob/f", token) == 200
        (tmp_path / "issuers").write_text(f"{_ISSUER} /other jwks.json\n")
        here.router.reload()
        issued.settimeout(20)
        assert issued.recv(1) == b""
    assert here.curl("/vo/bob/f", token=token)[0] == 403
