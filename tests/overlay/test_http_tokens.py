"""Tokens over HTTP at a real router: whose it takes, for what, and until when."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jwt
import pytest
import requests
import trustme
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from tests.harness.pool.waiting import wait_until
from tests.harness.ports import free_ports
from tests.overlay.http_site import NAME, Site, site

_ISSUER, _OTHER = "https://issuer.example.org", "https://other.example.org"
_RSA = rsa.generate_private_key(65537, 2048)
_WEAK = rsa.generate_private_key(65537, 1024)
_EC = ec.generate_private_key(ec.SECP256R1())


def _jwks() -> str:
    keys = [
        {**json.loads(RSAAlgorithm.to_jwk(_RSA.public_key())), "kid": "rsa"},
        {**json.loads(RSAAlgorithm.to_jwk(_WEAK.public_key())), "kid": "weak"},
        {**json.loads(ECAlgorithm.to_jwk(_EC.public_key())), "kid": "ec"},
    ]
    return json.dumps({"keys": keys})


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("site")
    (home / "jwks.json").write_text(_jwks())
    (home / "issuers").write_text(f"{_ISSUER} /vo jwks.json  # a comment\n{_OTHER} /other jwks.json\n")
    users = {"alice": "/", "bob": "/bob", "nothing": "-"}
    with site(home, {"STAGEOUT_ROUTER_TOKEN_ISSUERS": str(home / "issuers")}, users) as found:
        for name in ("vo/run7/f", "vo/run77/f", "bob/f", "bobby/f", "other/f", "-/f"):
            (found.root / name).parent.mkdir(parents=True, exist_ok=True)
            (found.root / name).write_bytes(b"x")
        yield found


def _wlcg(scope: str, key: object = _RSA, kid: str = "rsa", algorithm: str = "RS256") -> str:
    now = int(time.time())
    said = {"iss": _ISSUER, "sub": "alice", "aud": f"https://{NAME}", "iat": now, "nbf": now, "exp": now + 3600}
    said = {**said, "scope": scope, "wlcg.ver": "1.0"}
    return jwt.encode(said, key, algorithm, headers={"kid": kid} if kid else None)  # type: ignore[arg-type]


def _status(here: Site, token: str, path: str = "/vo/run7/f", *options: str) -> int:
    return here.curl(path, *options, token=token)[0]


_PUT = ("--request", "PUT", "--data", "new")


@pytest.mark.parametrize(
    ("scope", "path", "read", "created", "replaced"),
    [
        ("storage.read:/run7", "run7", 200, 403, 403),
        ("storage.create:/run7", "run7", 403, 201, 403),
        ("storage.modify:/run7", "run7", 403, 201, 204),
        ("storage.read:/ storage.modify:/", "run7", 200, 201, 204),
        ("read:/run7", "run7", 200, 403, 403),
        ("write:/run7", "run7", 403, 201, 204),
        ("storage.read:/run7 storage.modify:/run7", "run77", 403, 403, 403),
        ("storage.read:/run7/../run77", "run77", 403, 403, 403),
        ("storage.read:/run7%2F..%2Frun77", "run77", 403, 403, 403),
        ("storage.readall:/ storage.read openid", "run7", 403, 403, 403),
        ("", "run7", 403, 403, 403),
    ],
)
def test_scopes(here: Site, scope: str, path: str, read: int, created: int, replaced: int) -> None:
    token = _wlcg(scope)
    assert _status(here, token, f"/vo/{path}/f") == read
    fresh = here.root / f"vo/{path}/fresh"
    fresh.unlink(missing_ok=True)
    assert _status(here, token, f"/vo/{path}/fresh", *_PUT) == created
    fresh.write_bytes(b"")
    assert _status(here, token, f"/vo/{path}/fresh", *_PUT) == replaced
    for outside in ("/other/f", "/bob/f"):
        assert _status(here, token, outside) == 403


def test_no_right_says_nothing_about_names(here: Site) -> None:
    answers = {here.curl(path, token=here.token("bob"))[1].split("detail")[1].split("instance")[0]
               for path in ("/vo/run7/f", "/vo/none", "/none/none", "/bobby/f")}  # fmt: skip
    assert len(answers) == 1
    assert _status(here, here.token("bob"), "/bob/f") == 200


def test_algorithms(here: Site) -> None:
    scope = "storage.read:/"
    assert _status(here, _wlcg(scope, _EC, "ec", "ES256")) == 200
    assert _status(here, _wlcg(scope, _RSA, "rsa", "RS384")) == 401
    assert _status(here, _wlcg(scope, _RSA, "rsa", "PS256")) == 401
    assert _status(here, _wlcg(scope, _WEAK, "weak")) == 401
    assert _status(here, _wlcg(scope, _RSA, "ec")) == 401
    assert _status(here, _wlcg(scope, _RSA, "")) == 401, "several keys, and none is named"
    assert _status(here, _wlcg(scope, Ed25519PrivateKey.generate(), "rsa", "EdDSA")) == 401
    # a public key as the secret of a symmetric algorithm
    public = here.keys["alice"].public.encode()
    for secret in (public, base64.urlsafe_b64decode(public.partition(b":")[2] + b"=")):
        assert _status(here, here.token("alice", "HS256", secret)) == 401
    header, body, _ = here.token("alice").split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    for token in (f"{none}.{body}.", f"{header}.{body}.", f"{header}.{body}.AAAA", "a.b.c", "x", "x" * 9000):
        assert _status(here, token) == 401, token[:40]
    assert _status(here, here.token("bob", key=Ed25519PrivateKey.generate())) == 401


@pytest.mark.parametrize("claim", ["iss", "sub", "aud", "exp", "nbf", "iat"])
def test_each_claim_is_required(here: Site, claim: str) -> None:
    assert _status(here, here.token("alice", **{claim: None})) == 401
    if claim not in ("iss", "sub"):
        assert _status(here, here.token("alice", **{claim: True})) == 401


def test_times_and_audiences(here: Site) -> None:
    now = int(time.time())
    for claims in (
        {"exp": now - 120, "iat": now - 600, "nbf": now - 600}, {"nbf": now + 120}, {"iat": now + 120},
        {"exp": now + 3600}, {"exp": 1e300}, {"exp": -1}, {"aud": "other"}, {"aud": []}, {"aud": "localhos"},
        {"aud": "https://wlcg.cern.ch/jwt/v1/any"}, {"iss": "nobody"}, {"cnf": {"jwk": {}}}, {"scope": ["read:/"]},
        {"scope": "storage.read:/", "exp": now + 30 * 86400},
    ):  # fmt: skip
        assert _status(here, here.token("alice", **claims)) == 401, claims
    assert _status(here, here.token("alice", aud=["x", NAME])) == 200
    assert _status(here, here.token("alice", scope="storage.read:/vo", exp=now + 86400)) == 200
    assert _status(here, here.token("bob", scope="storage.read:/ storage.modify:/"), "/vo/run7/f") == 403
    assert _status(here, here.token("nothing", scope="storage.read:/-"), "/-/f") == 403
    assert _status(here, here.token("nothing"), "/-/f") == 403


def test_a_token_as_password(here: Site) -> None:
    for secret, status in ((here.token(), 200), ("wrong", 401), (f"{here.token()}x", 401)):
        answer = requests.get(f"{here.url}/vo/run7/f", auth=("user", secret), verify=str(here.ca), timeout=30)
        assert answer.status_code == status
    assert "Basic" in answer.headers["WWW-Authenticate"]


def _get(sock: ssl.SSLSocket, token: str) -> int:
    sock.sendall(f"GET /vo/run7/f HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    answer = HTTPResponse(sock)
    answer.begin()
    answer.read()
    return answer.status


def _connected(here: Site) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", here.router.port), timeout=30)
    return ssl.create_default_context(cafile=str(here.ca)).wrap_socket(sock, server_hostname="localhost")


def test_the_next_request_on_a_connection_needs_a_token_that_counts(here: Site) -> None:
    now = int(time.time())
    short = here.token("alice", iat=now - 600, nbf=now - 600, exp=now - 57)  # with the tolerance
    with _connected(here) as sock:
        assert _get(sock, short) == 200
        wait_until(lambda: time.time() > now + 4, what="its end")
        assert _get(sock, short) == 401


def test_a_key_that_is_removed_closes_its_connections(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        (here.root / "vo/run7").mkdir(parents=True)
        (here.root / "vo/run7/f").write_bytes(b"x")
        alice, bob = _connected(here), _connected(here)
        with alice, bob:
            assert _get(alice, here.token("alice")) == 200
            assert _get(bob, here.token("bob")) == 403
            keys = Path(here.router.environment["STAGEOUT_ROUTER_KEYS"])
            keys.write_text("".join(line for line in keys.read_text().splitlines(True) if not line.startswith("alice")))
            here.router.reload()
            alice.settimeout(20)
            assert alice.recv(1) == b""
            assert _get(bob, here.token("bob")) == 403
        assert here.curl("/vo/run7/f", token=here.token("alice"))[0] == 401


def test_a_router_takes_tokens_for_all_services_with_a_setting(tmp_path: Path) -> None:
    with site(tmp_path, {"STAGEOUT_ROUTER_TOKEN_ANY_AUDIENCE": "true"}) as here:
        assert here.curl("/", token=here.token("alice", aud="https://wlcg.cern.ch/jwt/v1/any"))[0] == 200


class _Issuer(BaseHTTPRequestHandler):
    """Publishes :attr:`answer` of the class: of any issuer on this machine."""

    answer, asked = b"", list[str]()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = self.answer
        if self.path.endswith("/.well-known/openid-configuration"):
            body = json.dumps({"jwks_uri": f"https://localhost:{self.server.server_port}/found"}).encode()  # type: ignore[attr-defined]
        self.send_response(302 if body.startswith(b"http") else 200)
        self.send_header("Location", body.decode() if body.startswith(b"http") else "")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _published(port: int, authority: trustme.CA, answer: str) -> Iterator[None]:
    """While an issuer answers at this port."""
    _Issuer.answer = answer.encode()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with ThreadingHTTPServer(("127.0.0.1", port), _Issuer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def _key_set(**keys: ec.EllipticCurvePrivateKey) -> str:
    return json.dumps({"keys": [{**json.loads(ECAlgorithm.to_jwk(key.public_key())), "kid": kid}
                                for kid, key in keys.items()]})  # fmt: skip


def test_keys_of_listed_issuers_are_fetched_and_kept(tmp_path: Path) -> None:
    authority, (port,) = trustme.CA(), free_ports(1)
    authority.cert_pem.write_to_path(str(tmp_path / "trusted.pem"))
    one, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    url, refused = f"https://localhost:{port}", list[int]()
    (tmp_path / "issuers").write_text(f"{url} /vo\n{_OTHER} /other {url}/given\n")
    settings = {
        "STAGEOUT_ROUTER_TOKEN_ISSUERS": str(tmp_path / "issuers"), "SSL_CERT_FILE": str(tmp_path / "trusted.pem")
    }  # fmt: skip

    def status(kid: str, key: ec.EllipticCurvePrivateKey, issuer: str = url) -> int:
        now = int(time.time())
        said = {"iss": issuer, "sub": "a", "aud": NAME, "iat": now, "nbf": now, "exp": now + 600, "scope": "read:/"}
        token = jwt.encode(said, key, "ES256", headers={"kid": kid})
        return _status(here, token, "/vo/" if issuer == url else "/other/")

    with site(tmp_path / "site", settings) as here:
        (here.root / "vo").mkdir()
        (here.root / "other").mkdir()
        assert status("one", one) == 401 and here.curl("/")[0] == 200, "the issuer is away: others are served"
        with _published(port, authority, _key_set(one=one)):
            here.router.reload()
            wait_until(lambda: status("one", one) == status("one", one, _OTHER) == 200, what="the keys", timeout_s=30)
            assert {"/found", "/given"} <= set(_Issuer.asked)
            assert status("one", one, "https://not-listed.example.org") == 401
            assert not any("not-listed" in path for path in _Issuer.asked)
        here.router.stop()
        here.router.start()
        assert status("one", one) == 200, "it is away, and its keys were kept"
        for nonsense in ("<html>", json.dumps([]), "x" * 2_000_000, '{"keys": 1}', f"http://localhost:{port}/plain"):
            with _published(port, authority, nonsense):
                refused.append(here.router.log.count("issuer-fetch-failed"))
                here.router.reload()
                wait_until(
                    lambda: here.router.log.count("issuer-fetch-failed") > refused[-1], what="the refusal", timeout_s=30
                )
            assert status("one", one) == 200
        with _connected(here) as sock:
            now = int(time.time())
            said = {
                "iss": url,
                "sub": "a",
                "aud": NAME,
                "iat": now,
                "nbf": now,
                "exp": now + 600,
                "scope": "read:/run7",
            }
            token = jwt.encode(said, one, "ES256", headers={"kid": "one"})
            assert _get(sock, token) == 404
            with _published(port, authority, _key_set(one=one, other=other)):
                here.router.reload()
                wait_until(lambda: status("other", other) == 200, what="the second key", timeout_s=30)
            assert _get(sock, token) == 404, "a new key beside the old one ends nothing"
            with _published(port, authority, _key_set(other=other)):
                here.router.reload()
                sock.settimeout(30)
                assert sock.recv(1) == b"", "the key of its token is gone"
        wait_until(lambda: status("one", one) == 401, what="the end of the first key", timeout_s=30)
        assert status("other", other) == 200
