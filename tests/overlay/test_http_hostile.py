"""Hostile heads and slow clients at a real router: an answer or an end for each, and never a second request."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.harness.pool.waiting import wait_until
from tests.overlay.http_site import Site, site

#: ``make heads`` tries more.
_HEADS = int(os.environ.get("HTTP_HEADS", "3000"))
_CANARY = "canary"
#: Answered, or ended, by then.
_ANSWERS_S = 20


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site"), {"STAGEOUT_ROUTER_HTTP_PLAIN": "true"}) as found:
        yield found


def _say(here: Site, data: bytes, timeout_s: float = _ANSWERS_S) -> bytes:
    """All that comes back until the router ends the connection. Nothing more is sent behind these bytes."""
    with socket.create_connection(("127.0.0.1", here.router.port), timeout=timeout_s) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = b""
        try:
            while part := sock.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    return answer


def _statuses(answer: bytes) -> list[int]:
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def _put(token: str, *fields: str, body: bytes = b"", version: str = "HTTP/1.1") -> bytes:
    lines = [f"PUT /f {version}", "Host: x", f"Authorization: Bearer {token}", *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def _smuggled(token: str) -> bytes:
    """A whole request that makes a file, where a body is due."""
    head = f"PUT /{_CANARY} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 1\r\n\r\n!"
    return head.encode()


#: Fields that leave open where the body ends.
_AMBIGUOUS = [
    ("Content-Length: {n}", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: {n}"),
    ("Content-Length: {n}", "Content-Length: 0"),
    ("Content-Length: {n}", "Content-Length: {n}"),
    ("Content-Length: {n}, {n}",),
    ("Content-Length: 0, {n}",),
    ("Content-Length: +{n}",),
    ("Content-Length: -1",),
    ("Content-Length: 0x5",),
    ("Content-Length: {n} 0",),
    ("Content-Length: \xb2",),
    ("Content-Length:",),
    ("Content-Length : {n}",),
    (" Content-Length: {n}",),
    ("Content-Length: {n}\r\n ",),
    ("Content-Length\t: {n}",),
    ("Content-Length: 1e2",),
    ("Content-Length: " + "9" * 30,),
    ("Transfer-Encoding: chunked, chunked",),
    ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: identity",),
    ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
    ("Transfer-Encoding : chunked",),
    ("Transfer-Encoding:\x0bchunked",),
    ("Transfer-Encoding: \x00chunked",),
    ("Transfer-Encoding:\n chunked",),
    ("X: y\nTransfer-Encoding: chunked",),
    ("X: y\rTransfer-Encoding: chunked",),
    ("Transfer\x00-Encoding: chunked",),
    ("Transf\xe9r-Encoding: chunked",),
    ("Host: y",),
]


@pytest.mark.parametrize("fields", _AMBIGUOUS, ids=lambda fields: repr(fields)[:40])
def test_where_a_body_ends_is_never_in_doubt(here: Site, fields: tuple[str, ...]) -> None:
    inner = _smuggled(here.token())
    told = [field.format(n=len(inner)) for field in fields]
    for body in (inner, b"0\r\n\r\n" + inner):
        answer = _say(here, _put(here.token(), *told, body=body))
        assert len(_statuses(answer)) == 1 and _statuses(answer)[0] in (400, 501), answer
    assert not (here.root / _CANARY).exists()


@pytest.mark.parametrize(
    "body",
    [
        b"5;x=y\r\nhello\r\n0\r\n\r\n", b"5 \r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n", b"-5\r\nhello\r\n0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n", b"5\r\nhello!\r\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n", b"\r\n", b"fffffffffffffffff\r\n", b"5\r\nhello\r\n" + b"0" * 9000,
        b"5\r\nhello\r\n0\r\n" + b"x: y\r\n" * 100 + b"\r\n",
    ],
)  # fmt: skip
def test_chunks_are_digits(here: Site, body: bytes) -> None:
    data = _put(here.token(), "Transfer-Encoding: chunked", body=body + _smuggled(here.token()))
    assert _statuses(_say(here, data)) == [400]
    assert not (here.root / "f").exists() and not (here.root / _CANARY).exists()


def test_old_versions_have_no_codings(here: Site) -> None:
    chunked = _put(here.token(), "Transfer-Encoding: chunked", body=b"0\r\n\r\n", version="HTTP/1.0")
    assert _statuses(_say(here, chunked)) == [400]
    for version in ("HTTP/2.0", "HTTP/0.9", "HTTP/1.", "http/1.1", ""):
        assert _statuses(_say(here, _put(here.token(), version=version)))[0] in (400, 505)


@pytest.mark.parametrize(
    "secret", ["Basic \xe9", "Basic =", "Basic /w==", "Bearer \xe9", "Bearer", "Basic", "Digest x", "\xe9"]
)
def test_what_is_no_token_is_answered(here: Site, secret: str) -> None:
    data = f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: {secret}\r\n\r\n".encode("latin-1")
    assert _statuses(_say(here, data)) == [401]


def test_requests_behind_each_other(here: Site) -> None:
    """Three at once: each has its answer, and a body is never a request."""
    inner = _smuggled(here.token())
    one = _put(here.token(), f"Content-Length: {len(inner)}", body=inner)
    get = f"GET /f HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {here.token()}\r\n\r\n".encode()
    answer = _say(here, one + get + get)
    assert _statuses(answer)[0] in (201, 204) and answer.count(inner) == 2
    assert not (here.root / _CANARY).exists()
    (here.root / "f").unlink()


_INSERTED = [b"\r\n", b"\n", b"\r", b"\x00", b" ", b"%00", b"../", b"chunked", b"A" * 20_000]


def _mutated(chance: random.Random, token: str) -> bytes:
    """A request in which something is wrong."""
    inner = _smuggled("wrong")
    data = bytearray(
        chance.choice(
            [
                _put(token, f"Content-Length: {len(inner)}", "Range: bytes=0-9", "If-Match: *", body=inner),
                _put(token, "Transfer-Encoding: chunked", body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)),
                f"PROPFIND /%2e/a?x HTTP/1.1\r\nHost: x\r\nDepth: 1\r\nAuthorization: Bearer {token}\r\n\r\n".encode(),
                b"GET /absent HTTP/1.1\r\nHost: x\r\nRange: bytes=1-2,-9\r\nAuthorization: Basic x\r\n\r\n",
                f"MOVE /a HTTP/1.1\r\nHost: x\r\nDestination: /b\r\nAuthorization: Bearer {token}\r\n\r\n".encode(),
            ]
        )
    )
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(1, max(2, len(data)))
        what = chance.randrange(5)
        if what == 0:
            data[at : at + 1] = [chance.choice(b"\x00\r\n\t :;,%\xff/.0Hh" + bytes([chance.randrange(256)]))]
        elif what == 1:
            del data[at : at + chance.randint(1, 20)]
        elif what == 2:
            data[at:at] = chance.choice(
                [b"\r\n", b"\n", b"\r", b"\x00", b" ", b"%00", b"../", b"chunked", b"A" * 20_000]
            )
        elif what == 3:
            data[at:at] = data[at : at + chance.randint(1, 60)]
        else:
            del data[at:]
    # what does not begin as HTTP is of another protocol
    return bytes(data) if data[:1].isupper() else b"X" + bytes(data)


def test_malformed_heads_make_nothing(here: Site) -> None:
    """No crash, no hang, no file but those that a whole PUT names, and the router serves on."""
    pids = here.router.workers()
    token, seed = here.token("bob", scope="storage.read:/"), random.randrange(1 << 30)
    print(f"seed {seed}")

    def part(number: int) -> int:
        chance = random.Random(seed + number)
        return sum(bool(_say(here, _mutated(chance, token))) for _ in range(_HEADS // 8))

    with ThreadPoolExecutor(8) as pool:
        answered = sum(pool.map(part, range(8)))
    assert answered > _HEADS / 4
    assert here.router.workers() == pids and "http-request-failed" not in here.router.log
    assert not list(here.root.rglob(_CANARY)) and not list((here.root / ".stageout/staging").iterdir())
    assert here.curl("/after", "--request", "PUT", "--data", "x")[0] == 201


def test_slow_heads_end(here: Site) -> None:
    """A head that never comes whole, and silence, end within ten seconds; others are served meanwhile."""
    ends: list[float] = []

    def slow(first: bytes, every: bytes) -> None:
        began_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", here.router.port), timeout=30) as sock:
            sock.sendall(first)
            sock.settimeout(0.5)
            while True:
                try:
                    if every:
                        sock.sendall(every)
                    if not sock.recv(4096):
                        break
                except socket.timeout:
                    continue
                except OSError:
                    break
        ends.append(time.monotonic() - began_s)

    line = b"GET / HTTP/1.1\r\n"
    threads = [
        threading.Thread(target=slow, args=arguments)
        for arguments in [(line, b""), (line, b"A: b\r\n"), (b"G", b""), (b"", b"")] * 5
    ]
    for thread in threads:
        thread.start()
    url, headers = f"http://127.0.0.1:{here.router.port}/", {"Authorization": f"Bearer {here.token()}"}
    for _ in range(20):
        assert requests.get(url, headers=headers, timeout=5).status_code == 200
    for thread in threads:
        thread.join(25)
    assert len(ends) == 20 and max(ends) < 22


def test_one_user_has_so_many_connections(here: Site) -> None:
    """The share of one is full: 429, and others go on. Places come back."""
    with site(here.root.parent / "small", {"STAGEOUT_ROUTER_PEER_CONNECTIONS": "3"}) as small:
        sessions = []
        for number in range(4):
            session = requests.Session()
            session.trust_env, session.verify = False, str(small.ca)
            session.headers["Authorization"] = f"Bearer {small.token()}"
            answer = session.get(f"{small.url}/", timeout=20)
            assert answer.status_code == (429 if number == 3 else 200)
            sessions.append(session)
        assert int(answer.headers["Retry-After"]) > 0
        assert small.curl("/bob", token=small.token("bob"))[0] == 404
        for session in sessions:
            session.close()
        wait_until(lambda: small.curl("/")[0] == 200, what="a place", timeout_s=10)
