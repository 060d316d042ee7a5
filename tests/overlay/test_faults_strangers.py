"""Faults of connections that prove nothing, or nothing any more, and of requests that are refused: others go on, and
nothing of them stays."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import sqlite3
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.overlay.http_site import Site, site

#: Connections that have not said who they are: of all addresses together, as docs/administrator says.
_MOST_STRANGERS = 512
_MIB = 1 << 20


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site")) as found:
        (found.root / "large").write_bytes(os.urandom(64 * _MIB))
        yield found


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _context(here: Site) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(here.ca))


def _hello(here: Site) -> bytes:
    """Return the first message of a client of TLS."""
    outgoing = ssl.MemoryBIO()
    tls = _context(here).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def _connected(here: Site) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", here.router.port), timeout=30)
    return _context(here).wrap_socket(sock, server_hostname="localhost")


def _processes(router: RouterProcess) -> list[int]:
    return [router.pid, *router.workers()]


def _field(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found
    return int(found[1])


def _threads(router: RouterProcess) -> int:
    return sum(_field(pid, "Threads") for pid in _processes(router))


def _resident_bytes(router: RouterProcess) -> int:
    return sum(_field(pid, "VmRSS") for pid in _processes(router)) * 1024


def _others_are_served(here: Site) -> float:
    """Seconds that somebody else waits for a small file to be taken."""
    began_s = time.monotonic()
    status, text = here.curl("/bob/beside", "--request", "PUT", "--data", "x", token=here.token("bob"))
    assert status in (201, 204), text
    return time.monotonic() - began_s


@pytest.mark.parametrize("said", ["nothing", "half a TLS hello", "half a head"])
def test_512_silent_connections_from_8_addresses_lock_nobody_out(here: Site, many_descriptors: None, said: str) -> None:
    """Fault 13."""
    hello = _hello(here)
    data = {"nothing": b"", "half a TLS hello": hello[: len(hello) // 2], "half a head": b"GET / HT"}[said]
    with ExitStack() as stack:
        for number in range(_MOST_STRANGERS):
            place = f"127.0.2.{1 + number % 8}", 0
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", here.router.port), 30, place))
            sock.sendall(data)
        waited_s = _others_are_served(here)
    print(f"{said}: somebody else waited {waited_s:.1f} s")
    assert waited_s < 10


def test_half_a_tls_hello_takes_the_place_of_a_stranger(here: Site, many_descriptors: None) -> None:
    """Fault 20: as many threads as strangers may be, as soon as the router has seen them all; no warning for each."""
    wait_until(lambda: _threads(here.router) < 100, what="threads of other tests to end", timeout_s=30)
    hello, before, warned = _hello(here), _threads(here.router), here.router.log.count(" WARNING ")
    with ExitStack() as stack:
        for number in range(3000):
            place = f"127.0.{3 + number // 200}.{1 + number % 200}", 0
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", here.router.port), 30, place))
            with contextlib.suppress(ConnectionResetError):
                sock.sendall(hello[: len(hello) // 2])
        at_once = _threads(here.router)
        most = before + _MOST_STRANGERS + 50
        wait_until(lambda: _threads(here.router) < most, what="the threads to be few", timeout_s=6, interval_s=0.2)
        _others_are_served(here)
    warned = here.router.log.count(" WARNING ") - warned
    print(f"{before} threads before, {at_once} at once then, {warned} warnings")
    assert warned < 300
    wait_until(lambda: _threads(here.router) < before + 20, what="their threads to end", timeout_s=30)


def _body_that_comes(here: Site, sock: ssl.SSLSocket) -> None:
    """A PUT of which the first MiB has come."""
    token = here.token("carol")
    sock.sendall(
        b"PUT /carol/f HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: 99999999\r\n\r\n"
        % token.encode()
    )
    sock.sendall(bytes(_MIB))
    wait_until(lambda: [*(here.root / ".stageout/staging").iterdir()], what="its data", timeout_s=20)


def _body_that_goes(here: Site, sock: ssl.SSLSocket) -> None:
    """A GET of which the beginning was read."""
    (here.root / "carol").mkdir(exist_ok=True)
    (here.root / "carol/large").write_bytes(bytes(256 * _MIB))
    token = here.token("carol").encode()
    sock.sendall(b"GET /carol/large HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n" % token)
    assert b" 200 " in sock.recv(65536)


@pytest.mark.parametrize("use", [_body_that_comes, _body_that_goes])
@pytest.mark.parametrize("what", ["removed", "changed"])
def test_a_body_ends_with_its_key(tmp_path: Path, use: Callable[[Site, ssl.SSLSocket], None], what: str) -> None:
    """Fault 12: a key that is removed, or is for another prefix now, writes and reads nothing more."""
    users = {"alice": "/", "bob": "/bob", "carol": "/carol"}
    with site(tmp_path, users=users) as here, _connected(here) as sock:
        use(here, sock)
        keys = Path(here.router.environment["STAGEOUT_ROUTER_KEYS"])
        lines = keys.read_text().splitlines(keepends=True)
        new = "" if what == "removed" else lines[-1].replace(" /carol", " /elsewhere")
        keys.write_text("".join([*lines[:-1], new]))
        here.router.reload()
        sock.settimeout(20)
        read = 0
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := sock.recv(_MIB):
                read += len(data)
        assert read < 200 * _MIB
        assert not (here.root / "carol/f").exists()
        staging = here.root / ".stageout/staging"
        wait_until(lambda: not [*staging.iterdir()], what="its data to be removed", timeout_s=20)
        assert here.curl("/carol/f", token=here.token("carol"))[0] == (401 if what == "removed" else 403)
        assert _others_are_served(here) < 20


def _kept(router: RouterProcess) -> tuple[dict[str, int], int]:
    """Count rows of each table of a router's databases, and bytes on its disk, while it is stopped."""
    found = {}
    router.stop()
    disk_bytes = _disk_bytes(router)
    for path in sorted((router.home / "records").rglob("*.sqlite")):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
            for (table,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                found[f"{path.name}:{table}"] = base.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
    router.start()
    return found, disk_bytes


def _disk_bytes(router: RouterProcess) -> int:
    """Of all that a router keeps, but for its log and published files."""
    places = [router.home / "records", router.root / ".stageout"]
    return sum(path.stat().st_blocks * 512 for place in places for path in place.rglob("*") if path.is_file())


#: Method, path, fields, the status that is due.
_REFUSED = (
    ("PUT", "/alice/f", {}, 403),
    ("PUT", "/bob/there", {"If-None-Match": "*"}, 412),
    ("PUT", "/bob/there/below", {}, 409),
    ("PUT", "/bob/digest", {"Repr-Digest": "sha-256=:" + "A" * 43 + "=:"}, 422),
    ("PUT", "/bob/part", {"Content-Range": "bytes 0-9/100"}, 400),
    ("GET", "/bob/none", {}, 404),
    ("MKCOL", "/bob/there", {}, 405),
    ("DELETE", "/bob/none", {}, 404),
    ("DELETE", "/alice", {}, 403),
    ("MOVE", "/bob/there", {"Destination": "/alice/f"}, 403),
    ("MOVE", "/bob/none", {"Destination": "/bob/new"}, 404),
    ("PUT", "/bob/stranger", {"Authorization": "Bearer x"}, 401),
    ("COPY", "/bob/f", {"Source": "https://evil.example.org/f"}, 403),
)
_TIMES = 150


def test_refused_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """Faults 18 and 24: no row, no byte on the disk, no line in the log for each, no memory."""
    with site(tmp_path) as here:
        (here.root / "bob").mkdir()
        (here.root / "bob/there").write_bytes(b"x")
        _nothing_stays(here, here.token("bob"))


def _nothing_stays(here: Site, token: str) -> None:
    with requests.Session() as session:
        session.trust_env, session.verify = False, str(here.ca)

        def refuse_all() -> None:
            for method, path, fields, status in _REFUSED:
                told = {"Authorization": f"Bearer {token}", **fields}
                data = bytes(1000) if method == "PUT" else b""
                answer = session.request(method, here.url + path, data=data, headers=told, timeout=30)
                assert answer.status_code == status, (method, path, answer.text)

        for _ in range(10):
            refuse_all()
        rows, disk_bytes = _kept(here.router)
        refuse_all()
        logged, memory_bytes = len(here.router.log), _resident_bytes(here.router)
        for _ in range(_TIMES):
            refuse_all()
    logged, memory_bytes = len(here.router.log) - logged, _resident_bytes(here.router) - memory_bytes
    rows_then, disk_then_bytes = _kept(here.router)
    more, grown_bytes = sum(rows_then.values()) - sum(rows.values()), disk_then_bytes - disk_bytes
    print(f"{_TIMES * len(_REFUSED)} refused requests: {more} rows, {grown_bytes} bytes on the disk, {logged} of log, "
          f"{memory_bytes} of memory")  # fmt: skip
    assert more < 20, (rows, rows_then)
    assert grown_bytes < _MIB and logged < 20_000 and memory_bytes < 32 * _MIB
    assert not [*(here.root / ".stageout/staging").iterdir()]
