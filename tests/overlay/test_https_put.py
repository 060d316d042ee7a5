"""``stageout put https://``: whole and right files, whatever happens to connections, sources, tokens and routers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from stageout.core.signing import new_key
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


def _file(place: Path, size: int) -> Path:
    place.write_bytes(os.urandom(min(size, 3 * _MIB + 1)) * (1 + size // (3 * _MIB + 1)))
    os.truncate(place, size)
    return place


def _through(between: Between, path: str) -> str:
    return f"https://localhost:{between.port}/{path}"


@pytest.mark.parametrize("size", [0, 1, 4096, _MIB - 1, _MIB, _MIB + 1, 4 * _MIB, 4 * _MIB + 1, 37 * _MIB + 7])
@pytest.mark.parametrize("is_signed", [True, False])
def test_sizes(run: Commands, here: Site, tmp_path: Path, size: int, is_signed: bool) -> None:
    file, token = _file(tmp_path / "f", size), tmp_path / "token"
    file.chmod(0o640)
    token.write_text(here.token(scope="storage.modify:/") + "\n")
    options = [] if is_signed else ["--token", str(token)]
    (told,) = run("put", str(file), run.url("new/d/f"), *options)
    assert (here.root / "new/d/f").read_bytes() == file.read_bytes()
    assert (here.root / "new/d/f").stat().st_mode & 0o777 == 0o640
    assert (told["outcome"], told["size_bytes"], told["sent_bytes"], told["path"]) == ("done", size, size, "new/d/f")
    assert [route["by"] for route in told["routes"]] == [[]]


@pytest.mark.parametrize("name", ["with space", "50%", "ünï", os.fsdecode(b"no \xff text"), "a?b#c", "q\"'&+=,;"])
def test_names(run: Commands, here: Site, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"content")
    run("put", str(tmp_path / name), run.url("d/"))
    run("put", str(tmp_path / name), run.url(f"e/{quote(os.fsencode(name))}"))
    assert (here.root / "d" / name).read_bytes() == (here.root / "e" / name).read_bytes() == b"content"
    run("get", run.url(f"e/{quote(os.fsencode(name))}"), str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"content"


def test_several_files_and_standard_input(run: Commands, here: Site, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    first, second = run("put", str(tmp_path / "a"), str(tmp_path / "b"), run.url("several"))
    assert (first["path"], second["path"]) == ("several/a", "several/b")
    first, second = run("put", str(tmp_path / "a"), str(tmp_path / "none"), run.url("several"), status=1)
    assert (first["outcome"], second["error_class"]) == ("done", "LOCAL_FILE")
    run("put", str(tmp_path / "a"), str(tmp_path / "a"), run.url("several"), status=64)


def test_what_fails_is_said_in_one_line(run: Commands, here: Site, tmp_path: Path) -> None:
    file, stranger = _file(tmp_path / "f", 10), tmp_path / "stranger.key"
    new_key().store("key", stranger)
    (here.root / "directory").mkdir()
    (here.root / "file").touch()
    other = Commands(here, tmp_path, "bob")
    for command, words, status, error in (
        (run, (run.url("f"), "--key", str(stranger)), 1, "CREDENTIAL_REFUSED"),
        (run, (run.url("directory"),), 1, "CONFLICT"),
        (run, (run.url("file/f"),), 1, "CONFLICT"),
        (run, (run.url(".stageout/f"),), 1, "PERMISSION_DENIED"),
        (run, ("https://localhost:1/f",), 1, "CONNECT_FAILED"),
        (run, (run.url("n" * 256),), 64, "BAD_REQUEST"),
        (other, (run.url("f"),), 1, "PERMISSION_DENIED"),
    ):
        (told,) = command("put", str(file), *words, status=status)
        assert told["error_class"] == error, (words, told)
        assert command.err.count("\n") == 1 and "unknown" not in command.err, command.err
    assert not (here.root / "f").exists()
    (told,) = run("put", "/dev/null", run.url("f"), status=1)
    assert told["error_class"] == "LOCAL_FILE"


def test_connections_that_are_cut(run: Commands, here: Site, tmp_path: Path) -> None:
    file = _file(tmp_path / "f", 64 * _MIB)
    with Between(here.router.port, bytes_s=10e6) as between:
        process = run.begun("put", str(file), _through(between, "cut"), "--connections", "2")
        for count in (1, 2, 3):
            wait_until(lambda least=count * 12 * _MIB: len(between.heard) > least, what="some of it")  # type: ignore[misc]
            between.cut()
        between.bytes_s = 0
        (told,) = run.ended(process)
    assert (here.root / "cut").read_bytes() == file.read_bytes()
    assert told["sent_bytes"] < 1.25 * file.stat().st_size


def test_a_router_that_is_killed_and_starts_again(tmp_path: Path) -> None:
    file = _file(tmp_path / "f", 64 * _MIB)
    with site(tmp_path / "router") as own:
        run = Commands(own, tmp_path)
        with Between(own.router.port, bytes_s=10e6) as between:
            process = run.begun("put", str(file), _through(between, "f"))
            for _ in range(2):
                wait_until(lambda: len(between.heard) > 10 * _MIB, what="some of it")
                own.router.kill()
                own.router.start()
            between.bytes_s = 0
            run.ended(process)
        assert (own.root / "f").read_bytes() == file.read_bytes()


def test_a_source_that_changes(run: Commands, here: Site, tmp_path: Path) -> None:
    for change in ("shorter", "other"):
        file = _file(tmp_path / change, 48 * _MIB)
        with Between(here.router.port, bytes_s=10e6) as between:
            process = run.begun("put", str(file), _through(between, f"changed/{change}"))
            wait_until(lambda seen=between: len(seen.heard) > 8 * _MIB, what="some of it")  # type: ignore[misc]
            if change == "shorter":
                os.truncate(file, 20 * _MIB)
            else:
                file.write_bytes(os.urandom(48 * _MIB))
            between.bytes_s = 0
            (told,) = run.ended(process, 1)
        assert told["error_class"] == "SOURCE_CHANGED" and str(file) in told["reason"]
        assert not (here.root / "changed" / change).exists()


def test_bits_that_flip_on_the_way_are_noticed_by_tls(run: Commands, here: Site, tmp_path: Path) -> None:
    file = _file(tmp_path / "f", 24 * _MIB)
    with Between(here.router.port, flips=2) as between:
        run("put", str(file), _through(between, "flipped"))
        assert between.flipped == 2
    assert (here.root / "flipped").read_bytes() == file.read_bytes()


def test_a_token_that_expires_in_the_middle(run: Commands, here: Site, tmp_path: Path) -> None:
    """The file of the token has a new one by then; without a new one the put fails."""
    file, token = _file(tmp_path / "f", 64 * _MIB), tmp_path / "token"
    for is_renewed in (True, False):
        now = int(time.time())
        token.write_text(here.token(scope="storage.modify:/", iat=now - 590, nbf=now - 590, exp=now - 54))
        with Between(here.router.port, bytes_s=3e6) as between:
            process = run.begun("put", str(file), _through(between, f"expires{is_renewed}"), "--token", str(token))
            wait_until(lambda seen=between: len(seen.heard) > 2 * _MIB, what="some of it")  # type: ignore[misc]
            if is_renewed:
                token.write_text(here.token(scope="storage.modify:/"))
            wait_until(lambda end=now + 8: time.time() > end, what="the token to end")  # type: ignore[misc]
            between.bytes_s = 0
            (told,) = run.ended(process, int(not is_renewed))
        if not is_renewed:
            assert told["error_class"] == "CREDENTIAL_REFUSED"
    assert (here.root / "expiresTrue").read_bytes() == file.read_bytes()
    assert not (here.root / "expiresFalse").exists()


def test_what_is_interrupted_is_cancelled(run: Commands, here: Site, tmp_path: Path) -> None:
    file = _file(tmp_path / "f", 48 * _MIB)
    with Between(here.router.port, bytes_s=5e6) as between:
        process = run.begun("put", str(file), _through(between, "interrupted"))
        wait_until(lambda: len(between.heard) > 5 * _MIB, what="some of it")
        process.send_signal(signal.SIGTERM)
        between.bytes_s = 0
        (told,) = run.ended(process, 128 + signal.SIGTERM)
    assert told["outcome"] == "cancelled" and not (here.root / "interrupted").exists()


def test_a_router_that_stays_away(tmp_path: Path) -> None:
    """The outcome of what was begun is not known."""
    file = _file(tmp_path / "f", 48 * _MIB)
    with site(tmp_path / "router") as own:
        run = Commands(own, tmp_path)
        with Between(own.router.port, bytes_s=5e6) as between:
            process = run.begun("put", str(file), _through(between, "f"))
            wait_until(lambda: len(between.heard) > 5 * _MIB, what="some of it")
            own.router.kill()
            process.send_signal(signal.SIGTERM)
            between.bytes_s = 0
            (told,) = run.ended(process, 128 + signal.SIGTERM)
    assert told["outcome"] == "cancelled"


def test_a_file_that_rotted_at_the_router_does_not_come_back(run: Commands, here: Site, tmp_path: Path) -> None:
    """The router keeps the digests with which a file was put, and sends them with its blocks."""
    file, there = _file(tmp_path / "f", 12 * _MIB + 1), here.root / "rotten"
    run("put", str(file), run.url("rotten"))
    run("get", run.url("rotten"), str(tmp_path / "back"))
    before = there.stat()
    with there.open("r+b") as rotten:
        rotten.seek(11 * _MIB)
        byte = rotten.read(1)[0]
        rotten.seek(11 * _MIB)
        rotten.write(bytes([byte ^ 1]))
    os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))
    (told,) = run("get", run.url("rotten"), str(tmp_path / "again"), status=1)
    assert told["error_class"] == "CONTENT_MISMATCH" and "block 11" in told["reason"]
    assert not (tmp_path / "again").exists()


def test_disks_that_are_full(tmp_path: Path) -> None:
    file, arm = _file(tmp_path / "f", 12 * _MIB), tmp_path / "no-room"
    with site(tmp_path / "router", {"STAGEOUT_FAULTS": f"operation-reserve=ENOSPC@{arm}"}) as own:
        run = Commands(own, tmp_path)
        arm.touch()
        (told,) = run("put", str(file), run.url("f"), status=1)
        assert (told["error_class"], told["retryable"]) == ("NO_SPACE_REMOTE", True) and not (own.root / "f").exists()
        run("put", str(file), run.url("f"))
        assert (own.root / "f").read_bytes() == file.read_bytes()
        run.wrapper = ("bash", "-c", 'ulimit -f 8192; exec "$@"', "bash")
        (told,) = run("get", run.url("f"), str(tmp_path / "back"), status=1)
        assert told["error_class"] == "NO_SPACE_LOCAL"
        assert not list(tmp_path.glob(".*.part")) and not (tmp_path / "back").exists()


def test_old_urls_go_by_http_if_the_settings_say_so(run: Commands, here: Site, tmp_path: Path) -> None:
    file = _file(tmp_path / "f", 5000)
    url = f"overlay://localhost:{here.router.port}/old/f"
    run.environment = {"_CONDOR_STAGEOUT_OVERLAY_WIRE": "http"}
    (told,) = run("put", str(file), url)
    assert told["generation"] == 0 and (here.root / "old/f").read_bytes() == file.read_bytes()
    run("get", url, str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    secret = ("--key", str(here.router.key_file("site")))
    (told,) = run("put", str(file), url, *secret)
    assert told["generation"] > 0, "a secret is for frames"
    run.environment = {"_CONDOR_STAGEOUT_OVERLAY_PLAIN": "true"}
    (told,) = run("put", str(file), url.replace("overlay", "http"), status=1)
    assert "TLS" in told["reason"], "the router does not take it"


def test_a_router_whose_records_are_old(tmp_path: Path) -> None:
    with site(tmp_path / "router") as running:
        run, file, tree = Commands(running, tmp_path), _file(tmp_path / "f", 3 * _MIB + 1), tmp_path / "tree"
        run("put", str(file), run.url("f"))
        running.router.stop()
        (running.root / ".stageout/high-water").write_bytes(bytes(8) + (1 << 40).to_bytes(8, "big"))
        running.router.start()
        before = (running.root / "f").stat()
        (told,) = run("put", str(file), run.url("f"))
        assert told["outcome"] == "done" and told["sent_bytes"] == 0, "the name shows it"
        assert (running.root / "f").stat().st_ino == before.st_ino
        file.write_bytes(b"x" * file.stat().st_size)
        for name in ("f", "new"):
            (told,) = run("put", str(file), run.url(name))
            assert told["sent_bytes"] == file.stat().st_size
            assert (running.root / name).read_bytes() == file.read_bytes()
        assert "operations-epoch-started" in running.router.log
        tree.mkdir()
        for name in ("a", "b"):
            (tree / name).write_text(name)
        run("put", "-r", str(tree), run.url("tree"))
        assert sorted(path.name for path in (running.root / "tree").rglob("?")) == ["a", "b"]
