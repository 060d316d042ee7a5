"""``stageout get https://``: whole and right files, whatever happens to connections, files and routers."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.harness.pool.waiting import wait_until
from tests.overlay.between import Between
from tests.overlay.http_site import Site, site
from tests.overlay.https_commands import Commands

_MIB = 1 << 20


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("router")) as running:
        yield running


@pytest.fixture
def run(here: Site, tmp_path: Path) -> Commands:
    return Commands(here, tmp_path)


def _parts(place: Path) -> list[str]:
    return [path.name for path in place.rglob("*.part")]


@pytest.mark.parametrize("size", [0, 1, 4096, _MIB - 1, _MIB, _MIB + 1, 8 * _MIB, 8 * _MIB + 1, 41 * _MIB + 7])
def test_sizes(run: Commands, here: Site, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (here.root / "f").write_bytes(content)
    (here.root / "f").chmod(0o750)
    (told,) = run("get", run.url("f"), str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == content and (tmp_path / "back").stat().st_mode & 0o777 == 0o750
    assert (told["outcome"], told["size_bytes"], told["path"], told["stale_from"]) == ("done", size, "f", "")
    assert [route["by"] for route in told["routes"]] == [[]] and _parts(tmp_path) == []
    assert sum(route["sent_bytes"] for route in told["routes"]) == size


@pytest.mark.parametrize("name", ["with space", "50%", "ünï", os.fsdecode(b"no \xff text"), "a?b#c", "q\"'&+=,;"])
def test_names(run: Commands, here: Site, tmp_path: Path, name: str) -> None:
    (here.root / "d").mkdir(exist_ok=True)
    (here.root / "d" / name).write_bytes(b"content")
    run("get", run.url(f"d/{quote(os.fsencode(name))}"), f"{tmp_path}/")
    assert (tmp_path / name).read_bytes() == b"content"


def test_what_fails_is_said_in_one_line(run: Commands, here: Site, tmp_path: Path) -> None:
    (here.root / "d").mkdir(exist_ok=True)
    (here.root / "f").write_bytes(b"data")
    back = str(tmp_path / "back")
    other = Commands(here, tmp_path, "bob")
    stranger = tmp_path / "stranger.key"
    from stageout.core.signing import new_key

    new_key().store("key", stranger)
    (tmp_path / "token").write_text("not.a.token\n")
    for words, status, error in (
        ((run.url("none"), back), 1, "NOT_FOUND"),
        ((run.url("d"), back), 1, "NOT_SUPPORTED"),
        ((run.url("f"), "/none/such"), 1, "LOCAL_FILE"),
        ((run.url("f/"), back), 0, ""),
        (("https://localhost:1/f", back), 1, "CONNECT_FAILED"),
        ((run.url("f"), back, "--key", str(stranger)), 1, "CREDENTIAL_REFUSED"),
        ((run.url("f"), back, "--token", str(tmp_path / "token")), 1, "CREDENTIAL_REFUSED"),
        ((run.url("f"), back, "--key", str(tmp_path / "none")), 1, "CREDENTIAL_MISSING"),
        ((run.url("f"), back, "--cacert", "/etc/hostname"), 1, "TLS_UNTRUSTED"),
        ((run.url("f"), back, "--pin", "sha256//AAAA"), 1, "TLS_UNTRUSTED"),
        ((run.url("a//b"), back), 64, "BAD_REQUEST"),
        ((run.url("f").replace("https", "http"), back), 64, "BAD_REQUEST"),
    ):
        (told,) = run("get", *words, status=status)
        assert told["error_class"] == error, (words, told)
        assert run.err.count("\n") == (status != 0), run.err
    (told,) = other("get", other.url("f"), back, status=1)
    assert told["error_class"] == "PERMISSION_DENIED"
    assert _parts(tmp_path) == []


def test_a_pinned_key(run: Commands, here: Site, tmp_path: Path) -> None:
    (here.root / "f").write_bytes(b"data")
    certificate = here.ca.with_name("cert.pem")
    words = ["openssl", "x509", "-pubkey", "-noout", "-in", str(certificate)]
    public = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[1:-1]
    pin = base64.b64encode(hashlib.sha256(base64.b64decode("".join(public))).digest()).decode()
    at = run.options.index("--cacert")
    del run.options[at : at + 2]
    run("get", run.url("f"), str(tmp_path / "back"), "--pin", f"sha256//{pin}")
    assert (tmp_path / "back").read_bytes() == b"data"
    (told,) = run("get", run.url("f"), str(tmp_path / "back"), status=1)
    assert told["error_class"] == "TLS_UNTRUSTED", "nothing but the pin vouches for it"


def test_a_bearer_token(run: Commands, here: Site, tmp_path: Path) -> None:
    (here.root / "f").write_bytes(b"data")
    (tmp_path / "token").write_text(here.token(scope="storage.read:/") + "\n")
    run("get", run.url("f"), str(tmp_path / "back"), "--token", str(tmp_path / "token"))
    assert (tmp_path / "back").read_bytes() == b"data"


def test_connections_that_are_cut(run: Commands, here: Site, tmp_path: Path) -> None:
    content = os.urandom(64 * _MIB)
    (here.root / "large").write_bytes(content)
    with Between(here.router.port, bytes_s=10e6) as between:
        process = run.begun("get", f"https://localhost:{between.port}/large", str(tmp_path / "back"))
        for _ in range(3):
            time.sleep(0.7)
            between.cut()
        between.bytes_s = 0
        (told,) = run.ended(process)
    assert (tmp_path / "back").read_bytes() == content
    sent = sum(route["sent_bytes"] for route in told["routes"])
    assert len(content) <= sent <= 1.1 * len(content)


def test_a_file_that_is_replaced_begins_anew_once(run: Commands, here: Site, tmp_path: Path) -> None:
    old, new = os.urandom(48 * _MIB), os.urandom(44 * _MIB)
    place, back = here.root / "replaced", tmp_path / "back"

    def replaced(content: bytes) -> None:
        (here.root / "next").write_bytes(content)
        (here.root / "next").replace(place)

    for is_twice in (False, True):
        back.write_bytes(b"before")
        replaced(old)
        with Between(here.router.port, bytes_s=10e6) as between:
            process = run.begun("get", f"https://localhost:{between.port}/replaced", str(back))
            wait_until(lambda: len(between.heard) > 10 * _MIB, what="some of it")
            replaced(new)
            if is_twice:
                wait_until(lambda: len(between.heard) > 45 * _MIB, what="some of the other")
                replaced(old)
            else:
                between.bytes_s = 0
            (told,) = run.ended(process, int(is_twice))
        if is_twice:
            assert told["error_class"] == "SOURCE_CHANGED" and "replaced while" in told["reason"]
        assert back.read_bytes() == (b"before" if is_twice else new) and _parts(tmp_path) == []


def test_a_router_that_starts_again(tmp_path: Path) -> None:
    content = os.urandom(48 * _MIB)
    with site(tmp_path / "router") as own:
        (own.root / "f").write_bytes(content)
        run = Commands(own, tmp_path)
        with Between(own.router.port, bytes_s=10e6) as between:
            process = run.begun("get", f"https://localhost:{between.port}/f", str(tmp_path / "back"))
            wait_until(lambda: len(between.heard) > 10 * _MIB, what="some of it")
            own.router.kill()
            own.router.start()
            between.bytes_s = 0
            run.ended(process)
    assert (tmp_path / "back").read_bytes() == content
