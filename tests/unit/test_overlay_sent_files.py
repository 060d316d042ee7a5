"""A published file on its way to who asked for it: what leaves unread, what is looked at, and what is found then."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from overlay_router.data import pool, sending
from overlay_router.data.jobs import Job
from overlay_router.data.known import Damaged, Digests
from overlay_router.data.sending import Sending
from stageout.overlay.book import Book
from stageout.overlay.links import Claim, Lane, Links
from stageout.overlay.sockets import Sockets
from stageout.overlay.tcp import Segments
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.frames import Type
from stageout.overlay.wire.messages import Found

_BLOCK, _BLOCKS = messages.BLOCK_BYTES, 5
_FAST = "xxh3-128" in frames.digests()
_CHECKSUM, _DIGEST = ("xxh3-32", "xxh3-128") if _FAST else ("crc32", "blake2b-128")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(os.urandom(_BLOCK * (_BLOCKS - 1) + 7))
    return tmp_path / "f"


def _job(file: Path, **more: object) -> Job:
    status = file.stat()
    job = Job("send", 0, _CHECKSUM, _DIGEST, _BLOCK, status.st_size, path="d/f", mtime_ns=status.st_mtime_ns,
              manifest="ab" * 32, known=_DIGEST)  # fmt: skip
    return replace(job, **more)  # type: ignore[arg-type]


def _digests(file: Path, job: Job) -> Digests:
    """Of what is in the file now, as the daemon hands them over."""
    digest, data = frames.digests()[_DIGEST], file.read_bytes()
    handed = os.memfd_create("digests")
    os.write(handed, b"".join(digest(data[at : at + _BLOCK]) for at in range(job.block * _BLOCK, len(data), _BLOCK)))
    return Digests(job, handed)


def _sent(job: Job, file: Path, digests: Digests) -> tuple[Found, list[tuple[int, bytes, bool]]]:
    """FOUND, and the blocks: position, bytes, whether they fit their checksum."""
    near, far = socket.socketpair()
    came = bytearray()

    def receive() -> None:
        while part := far.recv(70_000):
            came.extend(part)

    reader = threading.Thread(target=receive)
    reader.start()
    try:
        with near, file.open("rb") as opened:
            Sending(job, near, opened.fileno(), digests).run()
    finally:
        reader.join()
        far.close()
    checksum, found = frames.checksums()[_CHECKSUM], list[tuple[frames.Header, bytes]]()
    while came:
        header = frames.decode_header(came[: frames.HEADER_BYTES], checksum)
        end = frames.HEADER_BYTES + header.length_bytes
        found.append((header, bytes(came[frames.HEADER_BYTES : end])))
        del came[:end]
    (head, payload), *blocks = found
    answer = messages.decode(frames.Frame(head, payload))
    assert isinstance(answer, Found)
    assert all(header.type is (Type.PART if job.end else Type.BLOCK) for header, _ in blocks)
    return answer, [(header.block, data, checksum(data) == header.checksum) for header, data in blocks]


def _changes(file: Path, block: int, later: int = 0) -> None:
    """One byte of it. :param later: what its time of modification is moved on by."""
    status = file.stat()
    with file.open("r+b") as opened:
        byte = os.pread(opened.fileno(), 1, block * _BLOCK)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ 1]), block * _BLOCK)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + later))


@pytest.mark.parametrize(("first", "blocks"), [(0, 0), (2, 2), (4, 1), (5, 0), (9, 3)])
def test_all_that_was_asked_for_leaves(file: Path, first: int, blocks: int) -> None:
    job, data = _job(file, block=first, blocks=blocks), file.read_bytes()
    found, came = _sent(job, file, _digests(file, job) if first < _BLOCKS else Digests(job))
    assert found == Found(len(data), _BLOCK, 0, 0, "ab" * 32, _DIGEST)
    end = min(_BLOCKS, first + (blocks or _BLOCKS))
    assert came == [(at, data[at * _BLOCK : (at + 1) * _BLOCK], True) for at in range(first, end)]


@pytest.mark.skipif(not _FAST, reason="without the package xxhash no block leaves unread")
def test_a_lane_that_is_held_from_just_now_on_owes_no_blocks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, took = _job(file), list[int]()
    lane = Lane(Links(Book()), 1, "host:1", Claim())
    tap, known, take = lane.tap(), Digests.checksum, lane.wait

    def checksum(digests: Digests, block: int) -> int | None:
        if block == 3:
            lane.hold(1e9)
        return known(digests, block)

    monkeypatch.setattr(Digests, "checksum", checksum)
    monkeypatch.setattr(lane, "wait", lambda size_bytes: (took.append(size_bytes), take(size_bytes)))
    monkeypatch.setattr(sending, "ordered", lambda job, connection: contextlib.nullcontext(tap))
    monkeypatch.setattr(sending, "_MOST_TOGETHER", 4)
    monkeypatch.setattr(sending, "_TOGETHER_S", 1000.0)
    came = _sent(job, file, _digests(file, job))[1]
    assert b"".join(data for _, data, is_right in came if is_right) == file.read_bytes()
    assert took
    assert max(took) <= tap.piece_bytes + frames.HEADER_BYTES


@pytest.mark.parametrize("start", [0, 128 * 1024])
@pytest.mark.parametrize(("block", "end"), [(0, _BLOCK), (3, 192 * 1024), (4, 192 * 1024), (5, 192 * 1024)])
def test_a_part_leaves_alone(file: Path, block: int, start: int, end: int) -> None:
    job, data = _job(file, block=block, blocks=1, start=start, end=end), file.read_bytes()
    found, came = _sent(job, file, _digests(file, job) if block < _BLOCKS else Digests(job))
    assert found == Found(len(data), _BLOCK, 0, 0, "ab" * 32, _DIGEST)
    content = data[block * _BLOCK : (block + 1) * _BLOCK][start:end]
    assert came == ([(block * _BLOCK + start, content, True)] if content else [])


def test_a_part_of_a_damaged_block_does_not_leave(file: Path) -> None:
    job = _job(file, block=2, blocks=1, start=64 * 1024, end=128 * 1024)
    digests = _digests(file, job)
    _changes(file, 2)
    with pytest.raises(Damaged, match="block 2 is not what was published"):
        _sent(job, file, digests)


@pytest.mark.skipif(not _FAST, reason="without the package xxhash no block leaves unread")
def test_what_rots_leaves_with_the_checksum_that_it_should_have(file: Path) -> None:
    job = _job(file)
    digests = _digests(file, job)
    _changes(file, 3)
    assert [is_right for _, _, is_right in _sent(job, file, digests)[1]] == [True, True, True, False, True]
    unknown = Digests(replace(job, known=""))
    assert all(is_right for _, _, is_right in _sent(job, file, unknown)[1]), "of which nothing is known, that is read"


@pytest.mark.parametrize("first", [0, 3])
def test_the_first_block_is_looked_at(file: Path, first: int) -> None:
    job = _job(file, block=first)
    digests = _digests(file, job)
    _changes(file, first)
    with pytest.raises(Damaged, match=f"d/f: block {first} is not what was published") as caught:
        _sent(job, file, digests)
    assert caught.value.block == first


def test_a_file_that_was_changed_after_it_was_found_is_no_damaged_one(file: Path) -> None:
    job = _job(file)
    digests = _digests(file, job)
    _changes(file, 0, later=1)
    found, came = _sent(job, file, digests)
    assert (found.manifest, found.digest) == ("", "")
    assert b"".join(data for _, data, is_right in came if is_right) == file.read_bytes()


def test_digests_for_which_there_is_no_room_end_no_worker(file: Path) -> None:
    near, far = os.pipe()
    assert Digests(_job(file), near).of(0) == b""
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(near)
    os.close(far)


def test_digests_that_did_not_come_along_cost_nothing_but_a_look(file: Path) -> None:
    """A process that has as many descriptors as it may is given none."""
    found, came = _sent(_job(file), file, Digests(_job(file)))
    assert found.manifest
    assert b"".join(data for _, data, is_right in came if is_right) == file.read_bytes()


@pytest.mark.parametrize("congestion", ["reno", "bbr"])
def test_found_says_what_a_connection_that_backs_off_has_sent_so_far(file: Path, congestion: str) -> None:
    """The receiver of the file does not see the bytes that were lost on its way."""
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, socket.create_connection(listening.getsockname()[:2]) as far:
        near, _ = listening.accept()
        try:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError:
            near.close()
            pytest.skip(f"this kernel has no {congestion}")
        first, second = _founds(_job(file), file, near, far)
    if congestion == "bbr":
        assert first.segments == second.segments == ()
        return
    told = Segments.of(second.segments)
    assert first.segments[0] < told.sent
    assert told.sent * told.size_bytes >= file.stat().st_size
    assert told.connections == 1
    assert 0 < told.least_s <= told.trips_s < 10


def _founds(job: Job, file: Path, near: socket.socket, far: socket.socket) -> list[Found]:
    """FOUND of the same file twice on one connection."""
    checksum, told, whole = frames.checksums()[job.checksum], list[Found](), threading.Event()

    def receive() -> None:
        with far.makefile("rb") as came:
            while head := came.read(frames.HEADER_BYTES):
                header = frames.decode_header(head, checksum)
                payload = came.read(header.length_bytes)
                if header.type is Type.FOUND:
                    found = messages.decode(frames.Frame(header, payload))
                    assert isinstance(found, Found)
                    told.append(found)
                elif header.block == _BLOCKS - 1:
                    whole.set()

    reader = threading.Thread(target=receive)
    reader.start()
    try:
        with near, file.open("rb") as opened:
            for _ in range(2):
                Sending(job, near, opened.fileno(), Digests(job)).run()
                assert whole.wait(60), "what waits in the kernel has not been sent"
    finally:
        reader.join()
    return told


def test_segments_of_another_length_say_nothing() -> None:
    one = Segments(7, 1, 1448, 0.067, 1, 0.066)
    assert Segments.of(one.numbers) == one
    assert Segments.of((*one.numbers, 1)) == Segments.of(()) == Segments()
    assert (one + one).numbers == Segments().numbers == ()


class _Line:
    """The only lane of a process, and its tap. :ivar taken: what leaves without a look whether others need the link."""

    uplink, piece_bytes = None, 256 * 1024

    def __init__(self, held: bool) -> None:
        self.held, self.taken = held, list[int]()

    @contextlib.contextmanager
    def lane(self, link: str, claim: object) -> Iterator[_Line]:
        yield self

    def tap(self, acked: Callable[[], int | None]) -> _Line:
        return self

    def take(self, size_bytes: int) -> None:
        self.taken.append(size_bytes)

    def take_free(self, size_bytes: int) -> bool:
        self.take(size_bytes)
        return True

    def leave(self) -> None:
        pass


@pytest.mark.skipif(not _FAST, reason="without the package xxhash no block leaves unread")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("known", [20, 13, 1])
def test_blocks_leave_together_unless_others_need_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool, known: int
) -> None:
    parts = [bytes([number]) * _BLOCK for number in range(19)] + [b"the end"]
    (tmp_path / "f").write_bytes(b"".join(parts))
    line, file = _Line(held), tmp_path / "f"
    monkeypatch.setattr(sending, "links", lambda: line)
    monkeypatch.setattr(sending, "_TOGETHER_S", 1000.0)
    job = _job(file, to="there")
    handed, digest = os.memfd_create("digests"), frames.digests()[_DIGEST]
    os.write(handed, b"".join(map(digest, parts[:known])))
    _, came = _sent(job, file, Digests(job, handed))
    assert came == [(at, part, True) for at, part in enumerate(parts)]
    assert sum(line.taken) == file.stat().st_size + 20 * frames.HEADER_BYTES
    together = 8 if known > 1 else 1
    at_once_bytes = line.piece_bytes + frames.HEADER_BYTES if held else together * (_BLOCK + frames.HEADER_BYTES)
    assert max(line.taken) == at_once_bytes


def test_memory_of_one_answer_is_there_for_the_next(file: Path) -> None:
    sending._spare.clear()
    _sent(_job(file), file, Digests(_job(file)))
    (pages,) = sending._spare
    _sent(_job(file), file, Digests(_job(file)))
    assert list(sending._spare) == [pages]


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0, 0), (10**6, 10**5, 0, 1, 1), (10**6, 10**5, 1, 1, 2**63 - 1)])
def test_whatever_a_router_says_of_segments_ends_nothing(numbers: tuple[int, ...]) -> None:
    sockets, told = Sockets(2, 64), Segments.of(numbers)
    for tenths in range(60):
        more = replace(told, sent=tenths * told.sent, resent=tenths * told.resent)
        sockets.look(tenths / 10, tenths * 10**6, 0.01, more)
    assert 2 <= sockets.now <= 64


@pytest.mark.parametrize("problem", [OSError(24, "Too many open files"), AttributeError("memfd_create")])
def test_where_no_file_can_be_in_memory_a_worker_gets_no_digests(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def none(*arguments: object) -> int:
        raise problem

    with pool._in_memory(b"digests") as found:
        assert os.pread(found[0], 99, 0) == b"digests"
    monkeypatch.setattr(os, "memfd_create", none)
    with pool._in_memory(b"digests") as found:
        assert not found
