"""Files through a real router: whole or not at all, whoever dies."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageout.core.errors import ErrorClass, StageoutError, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import gateway_of, read_key
from stageout.overlay.many import put_many
from stageout.overlay.wire import frames, greeting, token
from stageout.overlay.wire.frames import Type
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Open, Opened, Operation, Staged
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.overlay.between import Between

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "overlay_client.py"


def make(path: Path, size_bytes: int) -> Path:
    path.write_bytes(os.urandom(size_bytes))
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def visible(router: RouterProcess) -> list[str]:
    return sorted(str(p.relative_to(router.root)) for p in router.root.rglob("*") if ".stageout" not in p.parts)


def staging_is_empty(router: RouterProcess) -> bool:
    return not any((router.root / ".stageout/staging").iterdir())


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES - 7])
def test_there_and_back(router: RouterProcess, gateway: Gateway, tmp_path: Path, size_bytes: int) -> None:
    source = make(tmp_path / "source", size_bytes)
    done = put(gateway, source, "some/where/file", mode=0o600, connections=3)
    assert (done.size_bytes, done.sent_bytes, done.generation) == (size_bytes, size_bytes, 1)
    arrived = router.root / "some/where/file"
    assert digest(arrived) == digest(source)
    assert arrived.stat().st_mode & 0o777 == 0o600
    assert get(gateway, "some/where/file", tmp_path / "back") == size_bytes
    assert digest(tmp_path / "back") == digest(source)
    wait_until(lambda: staging_is_empty(router), what="the staging directory to be empty")


@pytest.mark.parametrize("size_bytes", [0, 2 * BLOCK_BYTES + 7])
def test_a_client_made_from_the_document_alone(router: RouterProcess, tmp_path: Path, size_bytes: int) -> None:
    source = make(tmp_path / "source", size_bytes)
    for action, file in (("put", source), ("get", tmp_path / "back")):
        peer = ["127.0.0.1", str(router.port), str(router.key_file("site"))]
        command = [sys.executable, "-I", str(_EXAMPLE), action, str(file), *peer, "some/where/file"]
        assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.endswith(" 1\n")
    assert digest(tmp_path / "back") == digest(router.root / "some/where/file") == digest(source)


def test_many_at_once(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    sources = [make(tmp_path / f"source{n}", n * 70_000) for n in range(24)]
    failures: list[Exception] = []

    def send(source: Path) -> None:
        try:
            put(gateway, source, f"d/{source.name}")
        except Exception as problem:
            failures.append(problem)

    threads = [threading.Thread(target=send, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for source in sources:
        assert digest(router.root / "d" / source.name) == digest(source)


def test_a_file_that_is_replaced_is_seen_old_or_new_never_mixed(
    router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    first, second = make(tmp_path / "1", 3 * BLOCK_BYTES), make(tmp_path / "2", 3 * BLOCK_BYTES)
    put(gateway, first, "f")
    allowed, seen = {digest(first), digest(second)}, set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(digest(router.root / "f"))

    thread = threading.Thread(target=look)
    thread.start()
    assert put(gateway, second, "f").generation == 2
    done.set()
    thread.join()
    assert seen <= allowed
    assert digest(router.root / "f") == digest(second)


class _Slow:
    """Progress that holds the sender up after so many bytes, until it may go on."""

    def __init__(self, at_bytes: int) -> None:
        self.at_bytes, self.reached, self.go = at_bytes, threading.Event(), threading.Event()

    def __call__(self, sent_bytes: int) -> None:
        if sent_bytes >= self.at_bytes:
            self.reached.set()
            self.go.wait(60)


def _put_held_up(gateway: Gateway, source: Path, path: str) -> tuple[threading.Thread, _Slow, list[Any]]:
    slow, outcome = _Slow(6 * BLOCK_BYTES), []

    def send() -> None:
        try:
            outcome.append(put(gateway, source, path, progress=slow))
        except TransferFailure as failure:
            outcome.append(failure)

    thread = threading.Thread(target=send)
    thread.start()
    assert slow.reached.wait(60)
    return thread, slow, outcome


def _staged_blocks(router: RouterProcess) -> int:
    import sqlite3

    records = router.home / "copy.sqlite"
    for suffix in ("", "-wal"):
        source = router.home / f"records/router.sqlite{suffix}"
        (router.home / f"copy.sqlite{suffix}").write_bytes(source.read_bytes() if source.exists() else b"")
    connection = sqlite3.connect(records)
    try:
        return int(connection.execute("SELECT count(*) FROM staged").fetchone()[0])
    finally:
        connection.close()


@pytest.mark.parametrize("who", ["worker", "router"])
def test_killed_in_the_middle_it_goes_on_where_it_was(
    router: RouterProcess, gateway: Gateway, tmp_path: Path, who: str
) -> None:
    source = make(tmp_path / "source", 12 * BLOCK_BYTES)
    thread, slow, outcome = _put_held_up(gateway, source, "f")
    wait_until(lambda: _staged_blocks(router) >= 4, what="some blocks to be recorded")
    if who == "worker":
        before = router.workers()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(set(router.workers()) - set(before)) == 2, what="new workers")
    else:
        router.kill()
        router.start()
    assert visible(router) == []
    slow.go.set()
    thread.join()
    (done,) = outcome
    assert not isinstance(done, Exception), done
    assert digest(router.root / "f") == digest(source)
    assert done.sent_bytes < 2 * done.size_bytes - 3 * BLOCK_BYTES, "what was recorded is not sent again"


def _lose_records(router: RouterProcess) -> None:
    for path in (router.home / "records").glob("*.sqlite*"):
        path.unlink()


def test_a_file_that_was_published_before_the_records_were_lost_is_found_and_not_published_again(
    tmp_path: Path,
) -> None:
    source, armed = make(tmp_path / "source", 7 * BLOCK_BYTES + 1), tmp_path / "armed"
    with RouterProcess(tmp_path / "router", {"STAGEOUT_FAULTS": f"overlay-settle=kill-after@{armed}"}) as router:
        gateway = Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=20)
        for here in (True, False):
            armed.touch()
            thread, slow, outcome = _put_held_up(gateway, source, "f")
            slow.go.set()
            router.wait_for_end()
            inode = (router.root / "f").stat().st_ino
            if not here:
                (router.root / "f").write_bytes(b"what somebody else has put there meanwhile")
            _lose_records(router)
            router.start()
            thread.join()
            (done,) = outcome
            assert not isinstance(done, Exception), done
            assert digest(router.root / "f") == digest(source)
            assert ((router.root / "f").stat().st_ino == inode) == here
            assert (done.sent_bytes == done.size_bytes) == here


def test_a_source_that_changes_is_not_called_delivered(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    source = make(tmp_path / "source", 12 * BLOCK_BYTES)
    thread, slow, outcome = _put_held_up(gateway, source, "f")
    with source.open("r+b") as file:
        file.write(b"changed")
    slow.go.set()
    thread.join()
    assert isinstance(outcome[0], TransferFailure)
    assert outcome[0].kind is ErrorClass.SOURCE_CHANGED


def test_a_put_that_is_given_up_never_arrives(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    """A transfer under way is dropped at once: its data cannot come after, and replace, those of another one."""

    def give_up(sent_bytes: int) -> None:
        raise TransferFailure(ErrorClass.DEADLINE, "not wanted any more")

    source = make(tmp_path / "source", 3 * BLOCK_BYTES)
    _refused(ErrorClass.DEADLINE, "any more$", lambda: put(gateway, source, "f", progress=give_up))
    wait_until(lambda: staging_is_empty(router), what="the data to be dropped")
    assert visible(router) == []

    armed = threading.Event()

    def interrupt(*told: object) -> None:
        if armed.is_set():
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    source = make(tmp_path / "source", 64 * BLOCK_BYTES)
    armed.set()
    with pytest.raises(KeyboardInterrupt):
        put(gateway, source, "f", progress=interrupt)
    wait_until(lambda: staging_is_empty(router), what="the data of an interrupted put to be dropped")
    ended = list[object]()
    armed.set()
    files = [(number, source, f"f{number}") for number in range(20)]
    with pytest.raises(KeyboardInterrupt):
        put_many(gateway, files, lambda key, result: ended.append(key), progress=interrupt)
    wait_until(lambda: staging_is_empty(router), what="the data of many to be dropped")
    assert len(ended) < len(files)


def _refused(kind: ErrorClass, words: str, call: Any) -> None:
    with pytest.raises(TransferFailure, match=words) as caught:
        call()
    assert caught.value.kind is kind


def test_who_may_not(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    source = make(tmp_path / "source", 10)
    unknown = dataclasses.replace(gateway, key_name="stranger")
    _refused(ErrorClass.PERMISSION_DENIED, "no key of the name 'stranger'", lambda: put(unknown, source, "f"))
    wrong = dataclasses.replace(gateway, secret=b"something else altogether")
    _refused(ErrorClass.CREDENTIAL_REFUSED, "does not have the key", lambda: put(wrong, source, "f"))
    small = Gateway("127.0.0.1", router.port, *read_key(router.key_file("small")))
    _refused(ErrorClass.PERMISSION_DENIED, "only for what is below 'small'", lambda: put(small, source, "f"))
    _refused(ErrorClass.PERMISSION_DENIED, "not for 'f'", lambda: get(small, "f", tmp_path / "back"))
    _refused(ErrorClass.PERMISSION_DENIED, "below the root", lambda: put(small, source, "small/../f"))
    assert visible(router) == []
    put(small, source, "small/f")
    assert visible(router) == ["small", "small/f"]


def test_clocks_that_disagree_are_refused(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for ahead_s in (700.0, -700.0):
        monkeypatch.setattr(greeting, "time", SimpleNamespace(time=partial(lambda by_s: time.time() + by_s, ahead_s)))
        with pytest.raises(TransferFailure, match=r"ten minutes apart \(here it is 2\d{3}-.* UTC\)"):
            Channel(gateway)


def test_a_transfer_of_another_key_cannot_be_written_to(router: RouterProcess, gateway: Gateway) -> None:
    with Channel(gateway) as channel:
        channel.send(Open("0a" * 16, 1, "f", 10, BLOCK_BYTES, int(time.time()) + 60))
        opened = channel.receive()
        assert isinstance(opened, Opened)
        small = Gateway("127.0.0.1", router.port, *read_key(router.key_file("small")), timeout_s=10)
        with Channel(small) as other:
            other.send(Attach(opened.tid))
            _refused(ErrorClass.CONNECTION_LOST, "closed|reset", other.receive)
    assert "not one of this peer" in router.log


def _token(router: RouterProcess, identity: str, key: str = "overlay") -> Path:
    """A key file with a token as HTCondor makes them."""
    parts = ({"alg": "HS256", "kid": key}, {"sub": identity, "iss": "pool.example.org", "exp": int(time.time()) + 600})
    said = ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    signature = token.secret(token.MARK + said, key, (router.home / key).read_bytes()).decode()
    path = router.home / f"{identity}.token"
    path.write_text(f"{said}.{signature}\n")
    return path


@pytest.fixture
def router_of_pool(tmp_path: Path) -> Iterator[RouterProcess]:
    """A router that knows the issuer of its pool's tokens."""
    with RouterProcess(tmp_path / "router-of-pool", {"TRUST_DOMAIN": "pool.example.org"}) as running:
        yield running


def test_a_token_of_htcondor_is_a_key(router_of_pool: RouterProcess, tmp_path: Path) -> None:
    router = router_of_pool
    signing = router.home / "overlay"
    signing.write_bytes(os.urandom(64))
    signing.chmod(0o600)
    with (router.home / "keys").open("a") as keys:
        keys.write(f"token:*@pool.example.org {signing} pilots\n")
    os.kill(router.pid, signal.SIGHUP)
    wait_until(lambda: " configuration-reloaded" in router.log, timeout_s=30, what="the keys to be read again")
    source = make(tmp_path / "source", 2 * BLOCK_BYTES + 1)
    alice = gateway_of("127.0.0.1", router.port, _token(router, "alice@pool.example.org"), 20)
    for path in ("pilots/a", "pilots/b"):  # the second by connections of the first
        put(alice, source, path)
        assert digest(router.root / path) == digest(source)
    assert get(alice, "pilots/a", tmp_path / "back") == source.stat().st_size
    for who, path, words in (
        (alice, "elsewhere", "only for what is below 'pilots'"),
        (gateway_of("127.0.0.1", router.port, _token(router, "eve@example.org"), 20), "pilots/a", "no token of eve@"),
        (replace(alice, secret=alice.secret[::-1]), "pilots/a", "does not have the key"),
    ):
        with pytest.raises(TransferFailure, match=words):
            put(who, source, path)


def test_what_is_not_there(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    _refused(ErrorClass.NOT_FOUND, "No such file", lambda: get(gateway, "f", tmp_path / "back"))
    (router.root / "d").mkdir()
    _refused(ErrorClass.CONFLICT, "not a file", lambda: get(gateway, "d", tmp_path / "back"))
    assert [path.name for path in tmp_path.iterdir() if "back" in path.name] == []


def test_nobody_listens(gateway: Gateway, router: RouterProcess, tmp_path: Path) -> None:
    router.stop()
    _refused(ErrorClass.CONNECT_FAILED, "refused", lambda: put(gateway, make(tmp_path / "s", 1), "f"))


#: A HELLO of a version to come.
_LATER = struct.pack(">BBHIQQI", 2, Type.HELLO, 0, 0, 0, 0, 0)
_LATER += struct.pack(">I", zlib.crc32(_LATER))


_ANSWERED = {
    b"GET / HTTP/1.0\r\n\r\n": b"HTTP/1.1 400 Bad Request",
    _LATER: b"the router speaks version 1 of the protocol, you 2: upgrade stageout on the router",
}
#: A capital letter in front would be the beginning of an HTTP request.
_RANDOM = b"\xff" + os.urandom(4095)


@pytest.mark.parametrize(
    "noise", [b"", _RANDOM, b"\0" * 100, *_ANSWERED], ids=["nothing", "random", "zeros", "http", "later"]
)
def test_noise_harms_nobody(router: RouterProcess, gateway: Gateway, tmp_path: Path, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", router.port), 10) as sock:
        sock.settimeout(30)
        with contextlib.suppress(OSError):  # it may hang up at any of these
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            while heard := sock.recv(4096):
                assert _ANSWERED[noise] in heard
    put(gateway, make(tmp_path / "s", 100), "f")
    assert "task-failed" not in router.log


def test_a_block_that_is_written_over_at_the_last_moment_is_not_published(
    router: RouterProcess, gateway: Gateway
) -> None:
    """By the digest that it had before. Nobody but a sender that is not to be trusted does that."""
    good, evil = [os.urandom(BLOCK_BYTES) for _ in range(2)], bytes(BLOCK_BYTES)
    ask = Open("0c" * 16, 1, "f", 2 * BLOCK_BYTES, BLOCK_BYTES, int(time.time()) + 600)
    with Channel(gateway) as control, Channel(gateway) as one, Channel(gateway) as other:
        control.send(ask)
        opened = control.receive()
        assert isinstance(opened, Opened)
        manifest = hashlib.sha256(b"".join(control.digest(data) for data in good)).hexdigest()
        control.send(
            Operation(ask.origin, 1, "publish", "f", ask.expires, tid=opened.tid, size_bytes=ask.size_bytes, blocks=2,
                      manifest=manifest)
        )  # fmt: skip
        for channel in (one, other):
            channel.send(Attach(opened.tid))
        one.send_block(opened.tid, 0, memoryview(good[0]))
        assert isinstance(control.receive(), Staged)
        other.send_block(opened.tid, 0, memoryview(evil))
        # another block begins, so that the one before is not brought to the disk at once
        head = frames.encode_header(frames.Type.BLOCK, evil, other._checksum, opened.tid, 0)
        other._socket.sendall(head)
        wait_until(lambda: evil[:4096] in _staged(router), what="the other block to be written")
        one.send_block(opened.tid, 1, memoryview(good[1]))
        while not isinstance(said := control.receive(), Opened):
            assert isinstance(said, Staged), said
        assert said.staged == ()
    assert visible(router) == []
    assert "transfer-replaced" in router.log or "manifest-check-failed" in router.log


def _staged(router: RouterProcess) -> bytes:
    (file,) = (router.root / ".stageout/staging").iterdir()
    return file.read_bytes()


def test_flipped_bits_on_the_wire_are_found(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    source = make(tmp_path / "source", 9 * BLOCK_BYTES)
    with Between(router.port, flips=2) as between:
        done = put(dataclasses.replace(gateway, port=between.port), source, "f")
    assert between.flipped == 2
    assert digest(router.root / "f") == digest(source)
    assert done.size_bytes == 9 * BLOCK_BYTES


def test_a_second_router_on_the_same_records_is_refused(router: RouterProcess) -> None:
    other = RouterProcess(router.home, port=0)
    with pytest.raises(StageoutError, match="Stop the router"):
        other.start()


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) & 1 << (number - 1))


def test_its_workers_end_with_it_and_not_by_a_terminals_interrupt(router: RouterProcess) -> None:
    workers = router.workers()
    assert len(workers) == 2
    wait_until(lambda: all(_ignores(pid, signal.SIGINT) for pid in workers), what="workers to ignore Ctrl-C")
    router.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers), what="workers to end")


@pytest.mark.parametrize("how", ["overwritten", "cut"])
def test_what_is_changed_between_reading_and_sending_is_not_called_delivered(
    router: RouterProcess, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Blocks leave out of the file itself, with the checksum of what was read."""
    source, read = make(tmp_path / "source", 3 * BLOCK_BYTES), Channel.kept_in

    def change(channel: Channel, block: int, file: int, offset: int) -> None:
        read(channel, block, file, offset)
        if block == 1 and how == "cut":
            os.truncate(source, offset + 5000)
        elif block == 1:
            with source.open("r+b") as other:
                other.seek(offset + 5000)
                other.write(os.urandom(16))

    monkeypatch.setattr(Channel, "kept_in", change)
    with pytest.raises(TransferFailure) as caught:
        put(gateway, source, "changed-while-sent")
    assert caught.value.kind is ErrorClass.SOURCE_CHANGED
    assert "changed-while-sent" not in visible(router)
