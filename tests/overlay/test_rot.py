"""Published files that are not any more what they were: who gets them hears so, whoever it was that changed them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from overlay_router import verify
from overlay_router.local.migrations import VERSION
from overlay_router.peers.greeting import greet
from overlay_router.peers.keys import Key, Keys
from stageout.core.databases import open_alone
from stageout.core.errors import ErrorClass, StageoutError, TransferFailure
from stageout.overlay import copying
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.copying import carry, copy
from stageout.overlay.fetch import get, read
from stageout.overlay.key_file import gateway_of
from stageout.overlay.operations import Session
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import Type
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, Get, encode
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.overlay.between import Between

_SIZE_BYTES = 4 * BLOCK_BYTES + 7


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(os.urandom(_SIZE_BYTES))
    return tmp_path / "source"


def _rots(path: Path, block: int) -> None:
    """A bit of it changes on the disk, and nothing else."""
    status = path.stat()
    with path.open("r+b") as file:
        bit = os.pread(file.fileno(), 1, block * BLOCK_BYTES + 5)[0] ^ 4
        os.pwrite(file.fileno(), bytes([bit]), block * BLOCK_BYTES + 5)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _refused(gateway: Gateway, path: str, local: Path, words: str) -> None:
    before = sorted(local.parent.iterdir())
    with pytest.raises(TransferFailure, match=words) as caught:
        get(gateway, path, local)
    assert caught.value.kind is ErrorClass.CONTENT_MISMATCH
    assert sorted(local.parent.iterdir()) == before, "nothing is left"


def _stat(gateway: Gateway, path: str) -> tuple[str, str]:
    with Session(gateway) as session:
        entry = session.stat(path)
    return entry.digest, entry.manifest


@pytest.mark.parametrize("block", [0, 2, 4])
@pytest.mark.parametrize("digest", ["", "blake2b-128"])
def test_what_rots_is_not_delivered(
    router: RouterProcess, gateway: Gateway, source: Path, digest: str, block: int
) -> None:
    """A router that looks at what it sends, for checksums of another kind, notices it in the first block only."""
    gateway = replace(gateway, digest=digest)
    done = put(gateway, source, "d/f")
    assert _stat(gateway, "d/f") == (done.digest_name, done.manifest)
    get(gateway, "d/f", source.with_name("back"))
    _rots(router.root / "d/f", block)
    is_named = not digest or not block
    words = f"d/f: block {block} is not what was published" if is_named else "d/f is not what was published"
    _refused(gateway, "d/f", source.with_name("none"), words)
    event = f"published-file-damaged path=d/f block={block}"
    if is_named:
        wait_until(lambda: event in router.log, what="the administrator to be told")


@pytest.mark.parametrize("block", [3, 13])
def test_nor_by_several_connections(router: RouterProcess, gateway: Gateway, source: Path, block: int) -> None:
    source.write_bytes(os.urandom(20 * BLOCK_BYTES + 7))
    put(gateway, source, "f")
    get(gateway, "f", source.with_name("back"), connections=3)
    _rots(router.root / "f", block)
    _refused(gateway, "f", source.with_name("none"), f"f: block {block} is not what was published")


def test_a_range_is_refused_where_it_has_rotted(router: RouterProcess, gateway: Gateway, source: Path) -> None:
    put(gateway, source, "f")
    _rots(router.root / "f", 2)
    content = source.read_bytes()
    for offset, size_bytes in ((0, 2 * BLOCK_BYTES), (3 * BLOCK_BYTES, BLOCK_BYTES + 7)):
        assert b"".join(read(gateway, "f", offset, size_bytes)) == content[offset : offset + size_bytes]
    for offset, size_bytes in ((2 * BLOCK_BYTES, 1), (BLOCK_BYTES + 9, 2 * BLOCK_BYTES)):
        with pytest.raises(TransferFailure, match="f: block 2 is not what was published") as caught:
            b"".join(read(gateway, "f", offset, size_bytes))
        assert caught.value.kind is ErrorClass.CONTENT_MISMATCH


def test_a_client_that_only_knows_how_to_ask_again_hears_it_too(
    router: RouterProcess, gateway: Gateway, source: Path
) -> None:
    put(gateway, source, "f")
    _rots(router.root / "f", 3)
    buffer, come = memoryview(bytearray(BLOCK_BYTES)), 0
    with Channel(gateway) as channel:
        channel.send(Get("f"))
        assert isinstance(channel.receive(), Found)
        with pytest.raises(TransferFailure, match="block 3 does not fit its checksum"):
            while True:
                channel.receive_block(buffer)
                come += 1
    with Channel(gateway) as channel, pytest.raises(TransferFailure, match="block 3 is not what was") as caught:
        channel.send(Get("f", first_block=come))
        channel.receive()
    assert caught.value.kind is ErrorClass.CONTENT_MISMATCH


def test_what_is_damaged_on_the_way_comes_again(router: RouterProcess, gateway: Gateway, source: Path) -> None:
    put(gateway, source, "f")
    with Between(router.port, flips=2, back=True) as between:
        get(replace(gateway, port=between.port), "f", source.with_name("back"))
        assert between.flipped == 2
    assert source.with_name("back").read_bytes() == source.read_bytes()
    assert "published-file-damaged" not in router.log


def test_it_is_known_wherever_its_name_goes_and_after_a_restart(
    router: RouterProcess, gateway: Gateway, source: Path
) -> None:
    put(gateway, source, "a/b/f")
    with Session(gateway) as session:
        session.rename("a/b/f", "a/b/g")
        session.rename("a", "c")
        session.set_mode("c/b/g", 0o600)
        session.push()
    router.kill()
    router.start()
    _rots(router.root / "c/b/g", 2)
    _refused(gateway, "c/b/g", source.with_name("none"), "c/b/g: block 2 is not what")


def test_what_somebody_else_has_written_comes_as_it_is(router: RouterProcess, gateway: Gateway, source: Path) -> None:
    put(gateway, source, "f")
    put(gateway, source, "g")
    os.utime(router.root / "f", ns=(1, 1))
    (router.root / "g").write_bytes(b"another file")
    (router.root / "h").write_bytes(b"and one that was always there")
    for name in "fgh":
        assert _stat(gateway, name) == ("", "")
        get(gateway, name, source.with_name(name))
        assert source.with_name(name).read_bytes() == (router.root / name).read_bytes()
    with Session(gateway) as session:
        session.truncate("f", 2)
        session.push()
    get(gateway, "f", source.with_name("f"))
    assert source.with_name("f").stat().st_size == 2


def test_a_copy_to_another_router_is_none_of_what_has_rotted(
    router: RouterProcess, gateway: Gateway, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RouterProcess(tmp_path / "second") as second:
        settings = {
            "STAGEOUT_ROUTER_NEIGHBOURS": second.address,
            "STAGEOUT_ROUTER_KEY": str(tmp_path / "router/hop.key"),
        }
        router.stop()
        router.environment.update(settings)
        router.start()
        other = gateway_of("127.0.0.1", second.port, second.key_file("site"))
        put(gateway, source, "f")
        copy(gateway, "f", other, "right")
        assert _stat(other, "right") == _stat(gateway, "f")
        _rots(router.root / "f", 3)
        for way, words in ((copy, "block 3 is not what was published"), (carry, "f: block 3 is not what")):
            with monkeypatch.context() as patch:
                patch.setattr(copying, "carry", None)
                with pytest.raises(TransferFailure, match=words) as caught:
                    way(gateway, "f", other, "wrong")
            assert caught.value.kind is ErrorClass.CONTENT_MISMATCH
        assert not (second.root / "wrong").exists()


@contextlib.contextmanager
def _router_that_says(found: Found, blocks: list[tuple[int, bytes]]) -> Iterator[int]:
    """A port at which a router answers every GET so."""

    def serve(listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):  # who asked may have heard enough
                sock.setblocking(False)
                peer, first = asyncio.run(greet(sock, "hostile", Keys({"site": Key("site", b"secret", "/")})))
                assert isinstance(first, Get)
                checksum = frames.checksums()[peer.checksum]
                sock.setblocking(True)
                sock.sendall(encode(replace(found, digest=peer.digest), checksum))
                for block, data in blocks:
                    sock.sendall(frames.encode_header(Type.BLOCK, data, checksum, 0, block) + data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


_BLOCK = b"b" * BLOCK_BYTES


@pytest.mark.parametrize(
    ("size_bytes", "manifest", "blocks", "words"),
    [
        (5, "ab" * 32, [(0, b"12345")], "f is not what was published"),
        (5, "no digits at all", [(0, b"12345")], "f is not what was published"),
        (0, "ab" * 32, [], "f is not what was published"),
        (2 * BLOCK_BYTES, "ab" * 32, [(0, b"short"), (1, _BLOCK)], "block 0 of 5 bytes where 0 was due"),
        (BLOCK_BYTES + 5, "ab" * 32, [(0, _BLOCK), (1, b"123456")], "block 1 of 6 bytes"),
        (2 * BLOCK_BYTES, "ab" * 32, [(1, _BLOCK)], "block 1 of 1048576 bytes where 0 was due"),
        ((1 << 63) - 1, "ab" * 32, [(1 << 42, _BLOCK)], "where 0 was due"),
    ],
)
def test_a_router_that_says_what_is_not_so(
    tmp_path: Path, size_bytes: int, manifest: str, blocks: list[tuple[int, bytes]], words: str
) -> None:
    with _router_that_says(Found(size_bytes, BLOCK_BYTES, 1, 0o644, manifest), blocks) as port:
        _refused(Gateway("127.0.0.1", port, "site", b"secret", timeout_s=20), "f", tmp_path / "none", words)


def _verified(router: RouterProcess, *rate_mb_s: str) -> tuple[int, str, list[str]]:
    """Exit status, the last line, and what is in the log."""
    settings = {"STAGEOUT_ROUTER_DIR": str(router.home / "records"), "STAGEOUT_ROUTER_ROOT": str(router.root)}
    command = [sys.executable, "-m", "overlay_router.daemon", "--alone", "--verify", *rate_mb_s]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), re.findall(r"published-file-damaged (path=.*?) advice", done.stderr)


def test_an_administrator_finds_what_has_rotted_while_the_router_runs(
    router: RouterProcess, gateway: Gateway, source: Path
) -> None:
    for name in ("d/right", "d/rotten", "changed", "gone", "moved"):
        put(gateway, source, name)
    with Session(gateway) as session:
        session.rename("moved", "d/moved")
        session.push()
    assert _verified(router) == (0, f"5 files ({5 * _SIZE_BYTES} bytes) compared, 0 damaged", [])
    _rots(router.root / "d/rotten", 2)
    _rots(router.root / "d/rotten", 4)
    (router.root / "changed").write_bytes(b"by somebody")
    (router.root / "gone").unlink()
    words = f"3 files ({3 * _SIZE_BYTES} bytes) compared, 1 damaged; 2 were changed, renamed or removed since"
    assert _verified(router, "1000") == (1, words, ["path=d/rotten block=2 blocks=2"])
    router.stop()
    assert _verified(router)[0] == 1
    assert _verified(router, "0")[0] == 99


def test_a_copy_of_a_database_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is written to meanwhile, and brings its log to its place."""
    connection, _ = open_alone(tmp_path / "database")
    run, copies = connection.execute, list[int]()
    run("CREATE TABLE pairs (one INTEGER, other INTEGER)")
    run("INSERT INTO pairs VALUES (0, 0)")
    run("COMMIT")
    real = shutil.copyfile

    def meanwhile(source: Path, target: Path) -> Path:
        real(source, target)
        copies.append(1)
        if len(copies) < 6:
            run("UPDATE pairs SET one = one + 1, other = other + 1")
            run("PRAGMA wal_checkpoint(RESTART)").fetchall()
        return target

    monkeypatch.setattr(shutil, "copyfile", meanwhile)
    monkeypatch.setattr(verify, "_AGAIN_S", 0.0)
    verify._copy(tmp_path / "database", tmp_path / "copy")
    assert len(copies) > 6, "the first ones did not count"
    with contextlib.closing(sqlite3.connect(tmp_path / "copy")) as copied:
        assert copied.execute("SELECT * FROM pairs").fetchall() == [(5, 5)]
    connection.close()


def test_a_copy_of_a_database_has_no_log_of_an_earlier_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that stops brings its log to its place, and removes it."""
    database = tmp_path / "database"
    connection, _ = open_alone(database)
    run, copies = connection.execute, list[int]()
    run("CREATE TABLE one (number INTEGER)")
    run("INSERT INTO one VALUES (0)")
    run("COMMIT")
    real = shutil.copyfile

    def meanwhile(source: Path, target: Path) -> Path:
        real(source, target)
        copies.append(1)
        if len(copies) == 2:
            run("UPDATE one SET number = 1")
            connection.close()
            assert not (tmp_path / "database-wal").exists()
        return target

    monkeypatch.setattr(shutil, "copyfile", meanwhile)
    monkeypatch.setattr(verify, "_AGAIN_S", 0.0)
    verify._copy(database, tmp_path / "copy")
    assert not (tmp_path / "copy-wal").exists()
    with contextlib.closing(sqlite3.connect(tmp_path / "copy")) as copied:
        assert copied.execute("SELECT number FROM one").fetchall() == [(1,)]


def test_what_another_has_the_name_of_or_may_not_be_read_is_not_called_damaged(
    router: RouterProcess, gateway: Gateway, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/f", "b/f", "link", "folder", "secret"):
        put(gateway, source, name)
    for name in ("a", "b"):
        shutil.rmtree(router.root / name)
    (router.root / "a").write_bytes(b"a file")
    (router.root / "b").symlink_to("/tmp")
    (router.root / "link").unlink()
    (router.root / "link").symlink_to("secret")
    (router.root / "folder").unlink()
    (router.root / "folder").mkdir()
    real = verify._opened

    def opened(top: int, path: str) -> int:
        if path == "secret":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(top, path)

    monkeypatch.setattr(verify, "_opened", opened)
    found = verify.verify(router.root, router.home / "records/router.sqlite", 1000)
    assert found == verify.Verified(unknown=1, gone=4)


def test_a_database_that_may_not_be_copied_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "database").write_bytes(b"")

    def full(source: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(StageoutError, match=r"no copy of .*database can be made in .*No space left"):
        verify.verify(tmp_path, tmp_path / "database")


@pytest.mark.parametrize(
    ("version", "words"),
    [(VERSION - 1, "an earlier version of the router: start this one"), (VERSION + 1, "a later .*: run --verify of")],
)
def test_records_of_another_version_are_said_to_be_which(version: int, words: str, tmp_path: Path) -> None:
    """This one was to be started with later ones, too, which it refuses."""
    with contextlib.closing(sqlite3.connect(tmp_path / "database")) as connection:
        connection.execute(f"PRAGMA user_version={version}")
    with pytest.raises(StageoutError, match=words):
        verify.verify(tmp_path, tmp_path / "database")
