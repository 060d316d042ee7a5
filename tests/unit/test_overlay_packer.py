"""The reads, messages and answers of a sender of small files; the rest is tested against a router."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import packs, small_deposits
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Upload, put
from stageout.overlay.packs import End, Packer, SmallPut
from stageout.overlay.safekeeping import Custodian
from stageout.overlay.small_deposits import Small, deposit_small
from stageout.overlay.wire.fields import MAX_PATH_BYTES
from stageout.overlay.wire.messages import Low, Message, Operation, Packed
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_PACK_BYTES, MAX_TAKEN_BYTES
from stageout.overlay.wire.route import Route

GATEWAY = Gateway("192.0.2.1", 1, "key", b"secret")


def _read(path: Path) -> bytes:
    found = packs._read(path, lambda size_bytes: memoryview(bytearray(1000))[: size_bytes + 1])
    assert found is not None
    return bytes(found[0])


def test_a_file_that_comes_in_pieces_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.readv

    def some(descriptor: int, views: Sequence[memoryview]) -> int:
        return real(descriptor, [views[0][:7]])

    monkeypatch.setattr(os, "readv", some)
    for size_bytes in (0, 6, 7, 8, 100):
        (tmp_path / "f").write_bytes(data := os.urandom(size_bytes))
        assert _read(tmp_path / "f") == data


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    writer = os.open(tmp_path / "f", os.O_RDWR)
    os.write(writer, b"data")
    try:
        with pytest.raises(TransferFailure, match="FIFO") as caught:
            _read(tmp_path / "f")
    finally:
        os.close(writer)
    assert caught.value.kind is ErrorClass.LOCAL_FILE


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\udcff"])
def test_a_path_that_no_router_reads_costs_no_other_file(letter: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    ends: dict[str, End] = {}
    packer = Packer(GATEWAY, ends.__setitem__)
    most = MAX_PATH_BYTES // len(os.fsencode(letter))
    assert packer.add("long", tmp_path / "f", letter * (most + 1))
    assert packer.add("good", tmp_path / "f", letter * most)
    failure = ends.pop("long")
    assert isinstance(failure, TransferFailure)
    assert failure.kind is ErrorClass.BAD_URL
    assert (ends, packer.keys()) == ({}, ["good"])


@pytest.mark.parametrize(
    ("size_bytes", "said_bytes", "terminal", "is_taken"),
    [
        (MAX_FILE_BYTES, None, "", True),
        (MAX_FILE_BYTES + 1, MAX_FILE_BYTES, "", False),
        (MAX_FILE_BYTES + 1, MAX_FILE_BYTES + 1, "", True),
        (MAX_FILE_BYTES + 2, MAX_FILE_BYTES + 1, "", False),
        (MAX_PACK_BYTES + 1, MAX_PACK_BYTES, "", False),
        (MAX_TAKEN_BYTES + 1, None, "", False),
        (MAX_FILE_BYTES + 1, None, "t:1", False),
    ],
)
def test_a_router_says_how_large_the_files_of_a_pack_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, said_bytes: int | None, terminal: str,
    is_taken: bool,
) -> None:  # fmt: skip
    """It is asked only when that matters: an earlier one takes 64 KiB."""
    (tmp_path / "f").write_bytes(bytes(size_bytes))
    packer = Packer(GATEWAY, print, terminal=terminal)

    def connected() -> None:
        assert said_bytes is not None, "nobody need be asked"
        packer._channel = SimpleNamespace(packed_bytes=said_bytes)  # type: ignore[assignment]

    monkeypatch.setattr(packer, "_connected", connected)
    assert packer.add("f", tmp_path / "f", "f") is is_taken
    assert packer.keys() == ["f"] * is_taken


def test_a_router_that_is_not_there_fails_all_and_not_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(bytes(MAX_FILE_BYTES + 1))
    packer = Packer(GATEWAY, lambda key, end: pytest.fail("no file has ended"))

    def away() -> None:
        raise TransferFailure(ErrorClass.CREDENTIAL_REFUSED, "no")

    monkeypatch.setattr(packer, "_connected", away)
    with pytest.raises(TransferFailure, match="no"):
        packer.add("f", tmp_path / "f", "f")


def test_packs_that_ended_in_another_order_are_all_settled() -> None:
    said: list[Message] = []
    packer = Packer(GATEWAY, print)
    packer._load = packer._new(9)
    packer._settled(SimpleNamespace(send=said.append))  # type: ignore[arg-type]
    assert said == [Low(packer.origin, 8)]


def test_a_large_file_is_alone_in_its_pack_and_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones before and behind it are in packs of their own. Of 32 MiB that are under way, results come first."""
    large = os.urandom(MAX_TAKEN_BYTES)
    for name, data in (("small", b"small"), ("large", large)):
        (tmp_path / name).write_bytes(data)
    packer, said, taken = Packer(GATEWAY, print, origin="0d" * 16), list[tuple[int, list[str], bytes]](), list[int]()

    def say(load: Any) -> None:
        said.append((load.first, load.keys, bytes(load.room[: load.data_bytes])))
        packer._waiting.append(load)

    def take() -> None:
        taken.append(len(said))
        packer._waiting.popleft()

    monkeypatch.setattr(packer, "_say", say)
    monkeypatch.setattr(packer, "_take", take)
    packer._channel = SimpleNamespace(packed_bytes=MAX_TAKEN_BYTES, has_more=lambda s: False)  # type: ignore[assignment]
    for number, name in enumerate(["small", "small", "large", "large", "small"]):
        assert packer.add(f"{name}{number}", tmp_path / name, str(number))
    packer.cut()
    assert said == [
        (1, ["small0", "small1"], b"smallsmall"), (3, ["large2"], large), (4, ["large3"], large),
        (5, ["small4"], b"small"),
    ]  # fmt: skip
    for number in range(8):
        packer.add("large", tmp_path / "large", f"more{number}")
    assert taken == [9, 9, 10, 11]
    assert sum(load.data_bytes for load in packer._waiting) <= 32 * 1024 * 1024


def test_a_gap_between_numbers_begins_another_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read leaves its number to nobody."""
    (tmp_path / "f").write_bytes(b"data")
    packer, sent = Packer(GATEWAY, print, origin="0d" * 16), []
    monkeypatch.setattr(packer, "_say", lambda load: sent.append((load.head.origin, load.head.seq, load.keys)))
    for seq, name in ((5, "f"), (6, "f"), (7, "none"), (8, "f"), (3, "f")):
        packer.add(seq, tmp_path / name, f"p{seq}", seq)
    packer.cut()
    assert sent == [("0d" * 16, 5, [5, 6]), ("0d" * 16, 8, [8]), ("0d" * 16, 3, [3])]


@pytest.mark.parametrize("custodians", [1, 2])
def test_a_custodian_that_is_not_reached_is_left_for_another_one_at_once(
    custodians: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try may take ten seconds, and a pilot has few of them."""
    (tmp_path / "f").write_bytes(b"data")
    tried: list[str] = []
    ends: list[TransferFailure | None] = []

    def connect(gateway: Gateway, route: Route) -> Channel:
        tried.append(gateway.server)
        raise TransferFailure(ErrorClass.CONNECT_FAILED, "silent", gateway.server)

    monkeypatch.setattr(packs, "Channel", connect)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    places = [Custodian(replace(GATEWAY, port=1 + number), "end:1") for number in range(custodians)]
    files = [Small("f", tmp_path / "f", "f", "0d" * 16, 5)]
    deposit_small(places, files, lambda file, failure: ends.append(failure))
    assert tried == [place.gateway.server for place in places] * (1 if custodians > 1 else 1 + packs.RESUMES)
    assert [failure.kind for failure in ends if failure] == [ErrorClass.CONNECT_FAILED]


class _Custodians:
    """Routers that take packs at once, one of them only when all are asked. :param copies: of them at once.

    :ivar given: which file went where. :param refuses: servers that do not take any.
    """

    def __init__(self, copies: int, refuses: dict[str, ErrorClass]) -> None:
        self.given: list[tuple[str, str]] = []
        self._refuses, self._together = refuses, threading.Barrier(copies, timeout=60)

    def packer(self, gateway: Gateway, take: Callable[[Any, Any], None], **wishes: Any) -> Any:
        def add(file: Any, local: Any, path: str, seq: int) -> bool:
            self._together.wait()
            self.given.append((gateway.server, path))
            kind = self._refuses.get(gateway.server)
            if kind is not None:
                take(file, TransferFailure(kind, "no", gateway.server))
            else:
                take(file, SmallPut(4, "", "", 0, "0d" * 16, seq, f"router of {gateway.server}"))
            return True

        return SimpleNamespace(add=add, expires=99, close=lambda: None, finish=lambda: None, may_arrive=False)


@pytest.mark.parametrize("refused", [None, ErrorClass.CONNECT_FAILED, ErrorClass.NOT_SUPPORTED])
def test_each_file_goes_to_all_custodians_that_are_to_have_it_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch, refused: ErrorClass | None
) -> None:
    """A pilot that is killed meanwhile has given some files to two of them, and not all to one."""
    places = [Custodian(replace(GATEWAY, port=1 + number), "end:1") for number in range(3)]
    servers = [place.gateway.server for place in places]
    routers = _Custodians(2, {} if refused is None else {servers[1]: refused})
    if refused is ErrorClass.CONNECT_FAILED:  # who is asked in its place is asked alone
        monkeypatch.setattr(routers, "_together", SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(small_deposits, "Packer", routers.packer)
    ends: list[tuple[str, list[str], bool]] = []
    files = [Small(name, f"/{name}", name, "0d" * 16, seq) for seq, name in enumerate("abc", 1)]
    deposit_small(
        places, files, lambda file, why: ends.append((file.path, [one.custodian for one in file.kept], why is None)),
        copies=2,
    )  # fmt: skip
    assert sorted(path for path, _, _ in ends) == ["a", "b", "c"], "each ends once"
    if refused is ErrorClass.NOT_SUPPORTED:
        assert not any(is_kept for _, _, is_kept in ends)
        return
    assert {frozenset(kept) for _, kept, _ in ends} == {frozenset(servers[:2] if refused is None else servers[::2])}
    if refused is None:
        assert [{path for _, path in routers.given[at : at + 2]} for at in (0, 2, 4)] == [{"a"}, {"b"}, {"c"}]


def test_what_goes_wrong_beside_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else files would have no end."""
    monkeypatch.setattr(small_deposits, "Packer", _Custodians(1, {GATEWAY.server: ErrorClass.NOT_SUPPORTED}).packer)

    def broken(file: Any, failure: Any) -> None:
        raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        deposit_small([Custodian(GATEWAY, "end:1")], [Small("f", "/none/f", "f", "0d" * 16, 1)], broken)


def test_results_must_be_those_of_all_files() -> None:
    assert packs._answers(Packed("", 1, (1, 0), (1,), ("failed",)), "ab")
    assert not packs._answers(Packed("", 1, (1,)), "ab")
    assert not packs._answers(Packed("", 1, (1, 0), (1,)), "ab")


@pytest.mark.parametrize("kind", ["FIFO", "device", "directory", "socket"])
def test_what_is_no_file_is_refused_and_nobody_waits_for_it(kind: str, tmp_path: Path) -> None:
    """``stageout put FIFO`` waited for who would write into it."""
    place = {"device": Path(os.devnull), "directory": tmp_path}.get(kind, tmp_path / "f")
    listening = socket.socket(socket.AF_UNIX)
    writer = -1
    if kind == "FIFO":
        os.mkfifo(place)
        writer = os.open(place, os.O_RDWR)
    elif kind == "socket":
        listening.bind(str(place))
    try:
        with pytest.raises(TransferFailure, match=f"is a {kind}, not a file") as caught:
            put(GATEWAY, place, "there")
    finally:
        listening.close()
        if writer >= 0:
            os.close(writer)
    assert caught.value.kind is ErrorClass.LOCAL_FILE


def test_a_fifo_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    place = tmp_path / "f"
    place.write_bytes(b"data")
    upload = Upload(GATEWAY, place, Operation("o", 1, "publish", "there", 0), 1, lambda sent_bytes: None)
    place.unlink()
    os.mkfifo(place)
    writer = os.open(place, os.O_RDWR)
    try:
        with pytest.raises(TransferFailure, match="FIFO"):
            upload.run()
    finally:
        os.close(writer)
