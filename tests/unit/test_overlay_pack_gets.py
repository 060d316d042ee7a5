"""Small files back, many for one question: what a router reads for it, and what becomes of each file."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from overlay_router.data import gathering, sending, worker
from overlay_router.data.gathering import gathered
from overlay_router.data.jobs import Job
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import gatherer, many
from stageout.overlay.channel import Gateway
from stageout.overlay.gatherer import Gatherer
from stageout.overlay.links import Claim
from stageout.overlay.wire import frames, packs
from stageout.overlay.wire.frames import BadFrame, Decoder
from stageout.overlay.wire.messages import FoundPack, GetPack
from stageout.overlay.wire.pack_gets import MAX_ASKED, MAX_ASKED_BYTES
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_PACK_BYTES

GATEWAY = Gateway("host", 1, "k", b"s")
CRC32 = frames.checksums()["crc32"]
MISSING, REFUSED, CONFLICT = ErrorClass.NOT_FOUND.code, ErrorClass.BAD_URL.code, ErrorClass.CONFLICT.code
TOO_LARGE, CHANGED = ErrorClass.TOO_LARGE.code, ErrorClass.SOURCE_CHANGED.code


# ---- messages --------------------------------------------------------------------------------------------------------


def _decoded(found: FoundPack, data: Sequence[bytes], asked: int) -> list[bytes]:
    decoder = Decoder(CRC32)
    decoder.feed(packs.encode_found(found, data, CRC32))
    (frame,) = decoder.frames()
    again, files = packs.decode_found(frame, asked)
    assert again == found
    return [bytes(file) for file in files]


def test_an_answer_comes_as_it_was_sent() -> None:
    found = FoundPack((3, 0, 0, 2), (0o644, 0, 0o600, 0o755), (0, MISSING, 0, 0))
    assert _decoded(found, [b"one", b"", b"ab"], 4) == [b"one", b"", b"", b"ab"]


@pytest.mark.parametrize(
    ("found", "data", "words"),
    [
        (FoundPack((3, 1), (0, 0), (0, 0)), b"abc", "are not those that it names"),
        (FoundPack((3, 1), (0, 0), (0, 0)), b"abcde", "are not those that it names"),
        (FoundPack((3, 1), (0, 0), (0, MISSING)), b"abcd", "are not those that it names"),
        (FoundPack((3,), (0, 0), (0, 0)), b"abc", "not one row for each of 2"),
        (FoundPack((3, 0), (0,), (0, 0)), b"abc", "not one row for each of 2"),
        (FoundPack((3, 0), (0, 0), (0,)), b"abc", "not one row for each of 2"),
        (FoundPack((1, 1, 1), (0,) * 3, (0,) * 3), b"abc", "not one row for each of 2"),
        (FoundPack((MAX_FILE_BYTES + 1, 0), (0, 0), (0, 0)), bytes(MAX_FILE_BYTES + 1), "more than the protocol"),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(found: FoundPack, data: bytes, words: str) -> None:
    with pytest.raises(BadFrame, match=words):
        _decoded(found, [data], 2)


def test_an_answer_for_many_has_no_more_than_a_pack() -> None:
    count = MAX_PACK_BYTES // MAX_FILE_BYTES
    rows = FoundPack((MAX_FILE_BYTES,) * count, (0,) * count, (0,) * count)
    assert len(_decoded(rows, [bytes(MAX_PACK_BYTES)], count)) == count
    rows = FoundPack((*rows.sizes_bytes, 1), (0,) * (count + 1), (0,) * (count + 1))
    with pytest.raises(BadFrame, match="more than the protocol"):
        _decoded(rows, [bytes(MAX_PACK_BYTES + 1)], count + 1)


def test_a_question_is_for_so_many_files_and_no_more() -> None:
    packs.check_asked(GetPack(("f",) * MAX_ASKED))
    for paths in ((), ("f",) * (MAX_ASKED + 1), ("f" * (MAX_ASKED_BYTES // 3),) * 3):
        with pytest.raises(BadFrame, match="GET_PACK is for 1 to"):
            packs.check_asked(GetPack(paths))


# ---- what a router reads ---------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / ".stageout").mkdir()
    for name, size in {"f": 1, "d/g": 2, "d/e/h": 3, "d/empty": 0, ".stageout/key": 9}.items():
        (tmp_path / name).write_bytes(name[-1:].encode() * size)
    (tmp_path / "d/e/h").chmod(0o750)
    (tmp_path / "link").symlink_to("f")
    (tmp_path / "way").symlink_to("d")
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def _codes(root: int, *paths: str) -> tuple[int, ...]:
    return gathered(root, paths)[0].codes


def test_files_come_in_the_order_in_which_they_were_asked_for(root: int) -> None:
    found, data = gathered(root, ("d/e/h", "f", "d/none", "d/g", "d/empty", "d/g"))
    assert found.codes == (0, 0, MISSING, 0, 0, 0)
    assert found.sizes_bytes == (3, 1, 0, 2, 0, 2)
    assert b"".join(data) == b"hhh" + b"f" + b"gg" + b"gg"
    assert found.modes[0] == 0o750


def _open_below(place: Path) -> list[str]:
    """The descriptors that this process has open there. (What others have left open elsewhere may be closed at any
    time.)"""
    found = list[str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return [name for name in found if Path(name).is_relative_to(place)]


def test_nothing_comes_that_a_get_would_not_give(root: int, tmp_path: Path) -> None:
    outside = (".stageout/key", "../f", "d/../f", "/f", "d//g", "", ".", "d/.")
    assert _codes(root, *outside) == (REFUSED,) * len(outside)
    assert _codes(root, "link", "way/g", "d/none/f", "f/g", "none") == (MISSING,) * 5
    assert _codes(root, "d", "pipe") == (CONFLICT,) * 2
    _codes(root, "link", "way/g", "f", "d", "d/e/h", "../f")
    assert _open_below(tmp_path) == [str(tmp_path)], "but the root, nothing stays open"


def test_a_file_that_is_too_large_or_finds_no_room_is_to_be_asked_for_by_itself(root: int, tmp_path: Path) -> None:
    (tmp_path / "most").write_bytes(bytes(MAX_FILE_BYTES))
    (tmp_path / "more").write_bytes(bytes(MAX_FILE_BYTES + 1))
    count = MAX_PACK_BYTES // MAX_FILE_BYTES
    found, data = gathered(root, ("more", *("most",) * count, "most", "f", "d/empty"))
    assert found.codes == (TOO_LARGE, *(0,) * count, TOO_LARGE, TOO_LARGE, 0)
    assert sum(map(len, data)) == MAX_PACK_BYTES


@pytest.mark.parametrize("change", [b"", b"xxxx"])
def test_a_file_that_changes_while_it_is_read_does_not_come(
    root: int, monkeypatch: pytest.MonkeyPatch, change: bytes
) -> None:
    monkeypatch.setattr(gathering.os, "read", lambda file, size_bytes: change)
    assert _codes(root, "d/g") == (CHANGED,)


@pytest.mark.parametrize(("size_bytes", "uplink", "ordered"), [(70_000, None, True), (9, None, False), (9, 5e6, True)])
def test_an_answer_takes_its_turn_as_a_file_of_its_size_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, uplink: float | None, ordered: bool
) -> None:
    files = [(tmp_path / name, bytes(size_bytes // 2)) for name in ("f", "g")]
    for path, data in files:
        path.write_bytes(data)
    line = _Line(uplink)
    monkeypatch.setattr(sending, "links", lambda: line)
    near, far = socket.socketpair()
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with near, far:
        job = Job("send-pack", peer="k", to="there", priority=3, deadline=9, paths=("f", "none", "g"))
        worker.send_files(job, near, root)
        near.shutdown(socket.SHUT_WR)
        decoder = Decoder(CRC32)
        while part := far.recv(100_000):
            decoder.feed(part)
    os.close(root)
    (frame,) = decoder.frames()
    found, content = packs.decode_found(frame, 3)
    assert found.codes == (0, MISSING, 0) and list(map(bytes, content)) == [files[0][1], b"", files[1][1]]
    claim = [("there", Claim("", "k", 3, 9))] if ordered else []
    assert line.claims == claim and sum(line.taken) == (len(frame.payload) + frames.HEADER_BYTES) * ordered
    assert not ordered or max(line.taken) <= line.piece_bytes


def test_all_connections_by_which_a_file_is_fetched_have_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(bytes(5000))
    line = _Line(uplink=1.0)
    monkeypatch.setattr(sending, "links", lambda: line)
    near, far = socket.socketpair()
    with near, far, (tmp_path / "f").open("rb") as file:
        job = Job("send", peer="k", to="there", block_bytes=1 << 20, size_bytes=5000, flow="one")
        sending.Sending(job, near, file.fileno(), sending.Digests(job)).run()
    assert line.claims == [("there", Claim("one", "k"))]


class _Line:
    """All lanes of a process, and the one tap of each; it is held."""

    held, piece_bytes = True, 1000

    def __init__(self, uplink: float | None) -> None:
        self.uplink = uplink
        self.claims: list[tuple[str, Claim]] = []
        self.taken: list[int] = []

    @contextlib.contextmanager
    def lane(self, to: str, claim: Claim) -> Iterator[_Line]:
        self.claims.append((to, claim))
        yield self

    def tap(self, acked: object) -> _Line:
        return self

    def take(self, size_bytes: int) -> None:
        self.taken.append(size_bytes)

    def leave(self) -> None:
        pass


# ---- what becomes of each file ---------------------------------------------------------------------------------------


class _Channel:
    """A connection to a router that has all files, with their names in them; ``told`` says otherwise, once."""

    packs = True
    told: ClassVar[list[Any]] = []
    made = 0
    mode = 0o644

    def __init__(self, *arguments: object, **more: object) -> None:
        type(self).made += 1
        self.asked: list[GetPack] = []

    def send(self, ask: GetPack) -> None:
        packs.check_asked(ask)
        self.asked.append(ask)

    def receive_pack(self, asked: int) -> tuple[FoundPack, list[memoryview]]:
        said = self.told.pop(0) if self.told else None
        if isinstance(said, TransferFailure):
            raise said
        paths = self.asked.pop(0).paths
        data = [memoryview(path.encode()) for path in paths]
        codes = said or (0,) * len(paths)
        return FoundPack(tuple(map(len, data)), (self.mode,) * len(paths), codes), data

    def close(self) -> None:
        pass

    def failure(self, kind: ErrorClass, message: str) -> TransferFailure:
        return TransferFailure(kind, message)


class _Ends:
    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, **router: object) -> None:
        self.place = place
        self.channel = type("_This", (_Channel,), {"told": [], "made": 0, **router})
        monkeypatch.setattr(gatherer, "Channel", self.channel)
        self.ended: dict[str, Any] = {}
        self.single: list[str] = []

    def run(self, count: int, size_bytes: int = 4096) -> None:
        names = [f"f{number:04d}" for number in range(count)]
        with Gatherer(GATEWAY, self._end, lambda wanted: self.single.append(wanted[0])) as gather:
            for name in names:
                gather.add((name, name, self.place / name, size_bytes))
            gather.finish()
        assert sorted([*self.ended, *self.single]) == names

    def _end(self, key: str, result: object) -> None:
        assert key not in self.ended
        self.ended[key] = result


def test_every_file_comes_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _Ends(tmp_path, monkeypatch)
    (tmp_path / "f0007").write_text("earlier and longer")
    ends.run(100, MAX_FILE_BYTES)
    assert ends.ended == dict.fromkeys(ends.ended, 5) and not ends.single
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: name for name in ends.ended}
    assert ends.channel.made == 1


@pytest.mark.parametrize(("mode", "here"), [(0o755, 0o750), (0o4711, 0o710), (0o600, 0o600), (0o444, 0o440)])
def test_a_file_has_the_permissions_that_it_has_there_within_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, here: int
) -> None:
    ends = _Ends(tmp_path, monkeypatch, mode=mode)
    before = os.umask(0o027)
    try:
        ends.run(1)
    finally:
        os.umask(before)
    assert (tmp_path / "f0000").stat().st_mode & 0o7777 == here


def test_a_large_file_and_a_very_long_name_come_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _Ends(tmp_path, monkeypatch)
    ends.run(2, MAX_FILE_BYTES + 1)
    assert len(ends.single) == 2 and not ends.channel.made
    with Gatherer(GATEWAY, ends._end, lambda wanted: ends.single.append(wanted[0])) as gather:
        gather.add(("long", "\u1234" * (MAX_ASKED_BYTES // 6), tmp_path / "f", 1))
    assert ends.single[-1] == "long"


def test_from_a_router_of_an_earlier_version_all_come_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = _Ends(tmp_path, monkeypatch, packs=False)
    ends.run(100, MAX_FILE_BYTES)
    assert len(ends.single) == 100 and ends.channel.made == 1


def test_a_file_that_is_not_in_the_answer_is_asked_for_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = _Ends(tmp_path, monkeypatch, told=[(0, MISSING, TOO_LARGE)])
    ends.run(3)
    assert ends.single == ["f0001", "f0002"] and list(ends.ended) == ["f0000"]
    assert [path.name for path in tmp_path.iterdir()] == ["f0000"]


@pytest.mark.parametrize(
    ("kind", "connections"),
    [(ErrorClass.CONNECTION_LOST, 2), (ErrorClass.STALLED, 2), (ErrorClass.PERMISSION_DENIED, 1)],
)
def test_what_was_under_way_when_it_failed_comes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: ErrorClass, connections: int
) -> None:
    ends = _Ends(tmp_path, monkeypatch, told=[None, TransferFailure(kind, "why")])
    ends.run(100, MAX_FILE_BYTES)
    assert ends.channel.made == connections
    assert (len(ends.ended) > 20) is (connections == 2)
    assert not [one for one in ends.ended.values() if isinstance(one, TransferFailure)]


def test_who_answers_what_was_not_asked_is_believed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _Ends(tmp_path, monkeypatch, told=[TransferFailure(ErrorClass.CONTENT_MISMATCH, "why")])
    ends.run(100, MAX_FILE_BYTES)
    failed = [one for one in ends.ended.values() if isinstance(one, TransferFailure)]
    assert len(failed) == len(ends.ended) == MAX_PACK_BYTES // MAX_FILE_BYTES and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_here_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _Ends(tmp_path, monkeypatch)
    (tmp_path / "f0001").mkdir()
    ends.run(3)
    assert ends.ended["f0001"].kind is ErrorClass.LOCAL_FILE and str(tmp_path / "f0001") in str(ends.ended["f0001"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0000", "f0001", "f0002"]


def test_small_files_that_find_no_room_here_are_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gatherer, "_write", full)
    ends = _Ends(tmp_path, monkeypatch)
    ends.run(3)
    assert [ended.kind for ended in ends.ended.values()] == [ErrorClass.NO_SPACE_LOCAL] * 3
    assert not list(tmp_path.iterdir())


def test_a_file_comes_under_the_longest_name_that_there_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, local = _Ends(tmp_path, monkeypatch), tmp_path / ("n" * 255)
    with Gatherer(GATEWAY, ends._end, lambda wanted: None) as gather:
        gather.add(("long", "long", local, 4))
        gather.finish()
    assert ends.ended == {"long": 4} and list(tmp_path.iterdir()) == [local]


def test_get_many_ends_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _Ends(tmp_path, monkeypatch, told=[(0, MISSING, 0)])

    def get(gateway: Gateway, path: str, local: Path, **more: object) -> int:
        if path == "f0001":
            raise TransferFailure(ErrorClass.NOT_FOUND, path)
        return 70_000

    monkeypatch.setattr(many, "get", get)

    def files() -> Iterator[tuple[str, str, Path, int]]:
        for number in range(3):
            yield f"f{number:04d}", f"f{number:04d}", tmp_path / f"f{number:04d}", 5
        yield "large", "large", tmp_path / "large", 70_000
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "the list")

    with pytest.raises(TransferFailure, match="the list"):
        many.get_many(GATEWAY, files(), ends._end)
    assert ends.ended.pop("f0001").kind is ErrorClass.NOT_FOUND
    assert ends.ended == {"f0000": 5, "f0002": 5, "large": 70_000}
