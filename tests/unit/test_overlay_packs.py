"""Packs of small files at the terminal: each file executed once and seen only whole, whoever dies when."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router.custodians.pack_carrier import Answer, Way, _Sent
from overlay_router.ends import Ends
from overlay_router.local import hidden, makers, small_files, unnamed
from overlay_router.local.maker import PART_BYTES
from overlay_router.local.replies import Reply
from overlay_router.local.small_files import Arrived
from overlay_router.waiting import Changes, Packs
from stageout.core.errors import ErrorClass
from stageout.core.signing import SigningKey
from stageout.overlay.channel import Gateway
from stageout.overlay.outcomes import failure as failed
from stageout.overlay.wire import frames, messages, packs
from stageout.overlay.wire.capability import BadCapability, Credential, allow, issue
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.frames import BadFrame, Decoder
from stageout.overlay.wire.messages import Pack
from tests.unit.test_overlay_destination import (
    EXPIRES,
    ORIGIN,
    PEER,
    Crash,
    Router,
    _dying,
    home,
    op,
    outcome,
)
from tests.unit.test_overlay_unrecorded import without_record

__all__ = ["home"]


def digest(data: frames.Buffer) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def arrived(seq: int, files: dict[str, bytes], *, mode: int = 0o644, origin: str = ORIGIN, wrong: str = "") -> Arrived:
    """A pack as it comes from the wire."""
    sizes = tuple(len(data) for data in files.values())
    head = Pack(origin, seq, EXPIRES, tuple(files), sizes, (mode,) * len(files), "")
    digests = [digest(data + b"?" if path == wrong else data) for path, data in files.items()]
    head = replace(head, manifest=packs.manifest(digests))
    decoder = Decoder()
    decoder.feed(packs.encode(head, digests, list(files.values()), decoder.checksum))
    (frame,) = decoder.frames()
    pack, found = packs.decode(frame)
    assert pack == head
    return Arrived(pack, found, digest, PEER, "blake2b-128")


@pytest.fixture
def router(home: Path) -> Iterator[Router]:
    made = Router(home / "router")
    yield made
    made.close()


@pytest.fixture(params=["linked", "linked by /proc", "renamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How data get their names, which depends on the kernel and the filesystem."""
    if request.param == "renamed":
        monkeypatch.setattr(unnamed, "way_to_link", lambda place: None)
    elif request.param == "linked by /proc":
        monkeypatch.setattr(unnamed, "_link", unnamed._link_by_proc)
    return str(request.param)


def execute(router: Router, *batch: Arrived) -> list[messages.Packed]:
    replies = router.place.pack(batch)
    return [reply.message for reply in replies if isinstance(reply.message, messages.Packed)]


def leftovers(router: Router) -> list[Path]:
    return [*router.leftovers(), *(router.root / ".stageout/packs").iterdir()]


def test_files_appear_with_their_modes_and_generations(way: str, router: Router) -> None:
    files = {"a/b/one": b"first", "a/two": b"", "three": b"x" * packs.MAX_FILE_BYTES}
    (told,) = execute(router, arrived(1, files, mode=0o600))
    assert told == messages.Packed(ORIGIN, 1, (1, 1, 1))
    assert router.content() == {"a": "/", "a/b": "/"} | {path: data.decode() for path, data in files.items()}
    assert (router.root / "three").stat().st_mode & 0o777 == 0o600
    (again,) = execute(router, arrived(4, {"three": b"new"}, mode=0o666))
    assert again.generations == (2,)
    assert (router.content()["three"], (router.root / "three").stat().st_mode & 0o777) == ("new", 0o666)
    assert leftovers(router) == []


def test_a_pack_that_comes_again_changes_nothing(router: Router) -> None:
    first = arrived(1, {"f": b"old", "g": b"g"})
    (told,) = execute(router, first)
    execute(router, arrived(3, {"f": b"new"}))
    for again in range(2):
        assert execute(router, first) == [told]
        assert router.content() == {"f": "new", "g": "g"}
        if not again:
            router.restart()
    router.place.low(messages.Low(ORIGIN, 2))
    (stale,) = execute(router, first)
    assert (stale.failed, stale.outcomes) == ((0, 1), ("stale", "stale"))
    assert router.content() == {"f": "new", "g": "g"}


def test_what_was_executed_without_a_record_is_recorded_before_a_pack(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death then left a rename of which nobody could tell that it had happened."""
    router.send(op(1, "publish", "a"), b"data")
    without_record(router, monkeypatch, op(2, "rename", "a", target="b"))
    (told,) = execute(router, arrived(3, {"b": b"new"}))
    assert told.generations == (2,)
    router.restart()
    assert router.send(op(2, "rename", "a", target="b")) == "done"
    assert router.content() == {"b": "new"}


def test_the_same_pack_twice_in_a_batch_is_executed_once(router: Router) -> None:
    one, two = execute(router, arrived(1, {"f": b"data"}), arrived(1, {"f": b"data"}))
    assert one == two == messages.Packed(ORIGIN, 1, (1,))


def test_two_origins_give_one_name_in_a_batch(way: str, router: Router) -> None:
    told = execute(router, arrived(1, {"f": b"first"}), arrived(1, {"f": b"second"}, origin="0b" * 16))
    assert [one.generations for one in told] == [(1,), (2,)]
    assert router.content() == {"f": "second"}
    assert router.store.generation("f") == 2


def test_two_origins_that_died_with_one_name_have_each_a_generation(router: Router) -> None:
    both = arrived(1, {"f": b"first"}), arrived(1, {"f": b"second"}, origin="0b" * 16)
    with _dying("overlay-pack-settle", 1, "before"), pytest.raises(Crash):
        execute(router, *both)
    router.restart()
    assert [one.generations for one in execute(router, *both)] == [(1,), (2,)]
    assert (router.content(), router.store.generation("f")) == ({"f": "second"}, 2)


def test_what_cannot_be_is_refused_file_by_file(way: str, router: Router, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (router.root / "link").symlink_to(tmp_path / "outside")
    (router.root / "d").mkdir()
    (router.root / "file").write_text("file")
    files = {"../x": b"", "d": b"", "file/x": b"", "link/x": b"", ".stageout/x": b"", "wrong": b"", "good": b"good"}
    (told,) = execute(router, arrived(1, files, wrong="wrong"))
    assert told.failed == (0, 1, 2, 3, 4, 5)
    assert set(told.outcomes) == {"failed"}
    assert told.reasons[1:3] == ("conflict", "conflict")
    assert told.reasons[5] == "digest"
    assert router.content()["good"] == "good"
    assert list((tmp_path / "outside").iterdir()) == []
    assert execute(router, arrived(1, files)) == [told], "also what failed is final"
    assert leftovers(router) == []


def test_cancelled_and_expired_files_never_appear(router: Router) -> None:
    router.place.cancel(messages.Cancel(ORIGIN, 2), PEER)
    (told,) = execute(router, arrived(1, {"f": b"", "g": b""}))
    assert (told.failed, told.outcomes) == ((1,), ("cancelled",))
    router.now = EXPIRES + 1
    (told,) = execute(router, arrived(3, {"h": b""}))
    assert told.outcomes == ("expired",)
    assert router.content() == {"f": ""}


def test_files_that_come_cancelled_never_appear(router: Router) -> None:
    """A custodian that was told so says it with the pack, which nothing can overtake."""
    one = arrived(1, {"a": b"a", "b": b"b"})
    unwanted = one._replace(pack=replace(one.pack, cancelled=(2,)))
    for again in (unwanted, one):
        (told,) = execute(router, again)
        assert (told.failed, told.outcomes) == ((1,), ("cancelled",))
        assert router.content() == {"a": "a"}
        router.restart()


def test_more_files_than_descriptors(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unnamed, "most_open", lambda: 3)
    files = {f"f{number}": f"{number}".encode() for number in range(20)}
    for generation in (1, 2):
        (told,) = execute(router, arrived(20 * generation, files))
        assert told.generations == (generation,) * 20
    assert router.content() == {path: data.decode() for path, data in files.items()}
    assert leftovers(router) == []


def test_a_full_disk_is_said_and_leaves_nothing(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    pack = arrived(1, {"d/f": b"data", "g": b"g"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert router.place.pack([pack]) == [Reply(PEER, messages.NoSpace(ORIGIN, 1, 5))]
        assert (router.content(), leftovers(router)) == ({}, [])
    assert execute(router, pack) == [messages.Packed(ORIGIN, 1, (1, 1))]


def test_a_disk_without_room_for_a_name_is_no_result(way: str, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have their names then, others none: each is executed once all the same."""
    real, pack = hidden.Hidden.give_name, arrived(1, {"d/e": b"e", "d/f": b"data", "g": b"g"})

    def full(data: hidden.Hidden, position: int, directory: int, name: str) -> None:
        if name == "f":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(data, position, directory, name)

    with monkeypatch.context() as patch:
        patch.setattr(hidden.Hidden, "give_name", full)
        for _ in range(2):
            assert execute(router, pack) == [_pending((1, 0, 0), (1, 2), "space")]
            assert router.content() == {"d": "/", "d/e": "e"}
    assert execute(router, pack) == [messages.Packed(ORIGIN, 1, (1, 1, 1))]
    assert router.content() == {"d": "/", "d/e": "e", "d/f": "data", "g": "g"}
    assert leftovers(router) == []


def _pending(generations: tuple[int, ...], failed: tuple[int, ...], why: str) -> messages.Packed:
    code = ErrorClass.NO_SPACE_REMOTE.code
    many = len(failed)
    return messages.Packed(ORIGIN, 1, generations, failed, ("pending",) * many, (why,) * many, (code,) * many)


def test_a_database_without_room_is_said(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(rows: object) -> None:
        problem = sqlite3.OperationalError("database or disk is full")
        vars(problem)["sqlite_errorcode"] = 13
        raise problem

    pack = arrived(1, {"d/f": b"data", "g": b"g"})
    with monkeypatch.context() as patch:
        patch.setattr(router.store, "intend_packs", full)
        assert router.place.pack([pack]) == [Reply(PEER, messages.NoSpace(ORIGIN, 1, 5))]
        assert router.content() == {}
    with monkeypatch.context() as patch:
        patch.setattr(router.store, "settle_packs", full)
        for _ in range(2):
            assert execute(router, pack) == [_pending((0, 0), (0, 1), "unrecorded")], "it may be there, and is"
    assert execute(router, pack) == [messages.Packed(ORIGIN, 1, (1, 1))]
    assert leftovers(router) == []


def test_a_name_that_can_never_be_holds_up_no_start(router: Router) -> None:
    pack = arrived(1, {"d/" + "x" * 300: b"x", "g": b"g"})
    with _dying("overlay-pack-settle", 1, "before"), pytest.raises(Crash):
        execute(router, pack)
    router.restart()
    (told,) = execute(router, pack)
    assert (told.generations, told.failed, told.reasons) == ((0, 1), (0,), (os.strerror(errno.ENAMETOOLONG),))
    assert leftovers(router) == []


def test_a_disk_that_fails_is_asked_again(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*place: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    pack = arrived(1, {f"f{number}": b"data" for number in range(20)})
    for owner, name in ((small_files, "sync_filesystem"), (hidden.Directories, "sync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(OSError, match="Input/output"):
                router.place.pack([pack])
    assert execute(router, pack) == [messages.Packed(ORIGIN, 1, (1,) * 20)]
    assert leftovers(router) == []


def test_a_file_that_somebody_renamed_before_its_result_was_recorded_does_not_come_again(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*settled: object) -> None:
        raise sqlite3.DatabaseError("disk I/O error")

    pack = arrived(1, {"f": b"data"})
    with monkeypatch.context() as patch:
        patch.setattr(router.store, "settle_packs", broken)
        with pytest.raises(sqlite3.DatabaseError):
            router.place.pack([pack])
    assert router.send(replace(op(1, "rename", "f", target="g"), origin="0b" * 16)) == "done"
    assert execute(router, pack) == [messages.Packed(ORIGIN, 1, (1,))]
    assert router.content() == {"g": "data"}


def test_an_operation_waits_for_a_file_of_a_pack(router: Router) -> None:
    assert router.send(op(3, "rename", "f", target="g", after=(2,))) == ""
    replies = router.place.pack([arrived(1, {"e": b"", "f": b"data"})])
    assert outcome(replies, 3) == "done"
    assert router.content() == {"e": "", "g": "data"}


def test_no_router_begins_while_files_of_another_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(makers, "_SAID_EVERY_S", 0.0)
    one, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    said: list[str] = []

    def error(name: str, **facts: object) -> None:
        if not said:
            os.close(one)
        said.append(f"{name}: {facts['advice']}")

    monkeypatch.setattr(makers.log, "error", error)
    makers.Makers(2, tmp_path).own(one)
    makers.Makers(2, tmp_path).own(other)
    assert "end the process" in said[0]
    os.close(other)


LABELS = ["overlay-pack-write", "overlay-pack-intent", "overlay-parents", "overlay-pack-publish", "overlay-pack-settle"]
FILES = {f"d{number % 3}/f{number}": f"{number}".encode() for number in range(12)}
NEWER = {"d0/f0": b"newer", "last": b"last"}
LARGE = {"d1/large": b"L" * (packs.MAX_PACK_BYTES + 1)}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("label", [*LABELS, "overlay-recover-sync"])
def test_death_at_every_step_changes_nothing_in_the_end(home: Path, label: str, when: str) -> None:
    _die_and_go_on(home, label, when)


@pytest.mark.parametrize("when", ["before", "after"])
def test_death_among_names_that_are_renamed(home: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unnamed, "way_to_link", lambda place: None)
    _die_and_go_on(home, "overlay-pack-publish", when)


def _die_and_go_on(home: Path, label: str, when: str) -> None:
    for count in (1, 2):
        router = Router(home / str(count))
        died = _die_with(router, label, count, when)
        assert died or count == 2, f"nobody passes {label}"
        for path, text in router.content().items():
            known = {"/"} | {files[path].decode() for files in (FILES, NEWER, LARGE) if path in files}
            assert text in known, "never half of it"
        for _ in range(2):
            told = execute(router, arrived(1, FILES), arrived(15, LARGE)) + execute(router, arrived(13, NEWER))
            assert [one.generations for one in told] == [(1,) * 12, (1,), (2, 1)]
            router.restart()
        wanted = {path: data.decode() for path, data in {**FILES, **NEWER, **LARGE}.items()}
        assert {path: text for path, text in router.content().items() if text != "/"} == wanted
        assert (leftovers(router), router.store.pack_intents()) == ([], [])
        router.close()


def _die_with(router: Router, label: str, count: int, when: str) -> bool:
    recovering = label == "overlay-recover-sync"
    with _dying("overlay-pack-publish" if recovering else label, count, "after" if recovering else when):
        try:
            execute(router, arrived(1, FILES), arrived(15, LARGE))
            execute(router, arrived(13, NEWER))
            return False
        except Crash:
            pass
    died = not recovering
    with _dying(label, 1, when):
        try:
            router.restart()
        except Crash:
            died = True
    router.restart()
    return died


@pytest.mark.parametrize(
    "change",
    [
        {"sizes_bytes": (1,)},
        {"modes": ()},
        {"paths": (), "sizes_bytes": (), "modes": ()},
        {"sizes_bytes": (1, packs.MAX_TAKEN_BYTES + 1)},
        {"sizes_bytes": (1, 2)},
        {"manifest": "0" * 64},
    ],
)
def test_packs_that_do_not_fit_their_data_are_refused(change: dict[str, object]) -> None:
    manifest = packs.manifest([b"d" * 16] * 2)
    head = replace(Pack(ORIGIN, 1, EXPIRES, ("a", "b"), (1, 1), (0, 0), manifest), **change)  # type: ignore[arg-type]
    decoder = Decoder()
    decoder.feed(packs.encode(head, [b"d" * 16] * 2, [b"x", b"y"], decoder.checksum))
    (frame,) = decoder.frames()
    with pytest.raises(BadFrame):
        packs.decode(frame)


@pytest.mark.parametrize(
    ("size_bytes", "terminal", "is_taken"),
    [
        (packs.MAX_TAKEN_BYTES, "", True),
        (packs.MAX_TAKEN_BYTES + 1, "", False),
        (packs.MAX_FILE_BYTES, "t:1", True),
        (packs.MAX_FILE_BYTES + 1, "t:1", False),
    ],
)
def test_files_in_packs_are_small_and_smaller_on_the_way_to_another_router(
    size_bytes: int, terminal: str, is_taken: bool
) -> None:
    head = Pack(ORIGIN, 1, EXPIRES, ("a",), (size_bytes,), (0,), packs.manifest([b"d" * 16]), terminal=terminal)
    decoder = Decoder()
    decoder.feed(packs.encode(head, [b"d" * 16], [bytes(size_bytes)], decoder.checksum))
    (frame,) = decoder.frames()
    if is_taken:
        assert packs.decode(frame)[1][0].data.nbytes == size_bytes
        return
    with pytest.raises(BadFrame, match="more than the protocol allows"):
        packs.decode(frame)


def test_files_that_makers_have_no_room_for_are_made_by_the_daemon(router: Router) -> None:
    small = router.place._small
    small._makers, small._link = cast(Any, SimpleNamespace(crew=lambda: "a crew", end=lambda: None)), cast(Any, print)
    most = max(PART_BYTES, packs.MAX_FILE_BYTES)
    files = [packs.PackedFile(seq, str(seq), 0, b"", memoryview(b"")) for seq in range(makers.MANY)]
    assert small._crew([*files, packs.PackedFile(0, "most", 0, b"", memoryview(bytes(most)))]) == "a crew"
    assert small._crew([*files, packs.PackedFile(0, "more", 0, b"", memoryview(bytes(most + 1)))]) is None


def test_a_large_file_is_alone_in_its_pack() -> None:
    assert arrived(1, {"f": bytes(packs.MAX_TAKEN_BYTES)}).files[0].data.nbytes == packs.MAX_TAKEN_BYTES
    with pytest.raises(BadFrame, match="more than the protocol allows"):
        arrived(1, {"f": bytes(packs.MAX_PACK_BYTES), "g": b"g"})


def test_the_largest_pack_fits_a_frame() -> None:
    head = Pack(ORIGIN, 1, EXPIRES, ("\U0001f4be" * 1024,), (0,), (0,), "0" * 64, "c" * 8192, "s" * 200)
    longest = len(packs.encode(head, [bytes(16)], [bytes(packs.MAX_TAKEN_BYTES)], lambda data: 0))
    assert longest - frames.HEADER_BYTES <= frames.max_bytes(frames.Type.PACK)
    assert frames.max_bytes(frames.Type.PACK) <= packs.MAX_TAKEN_BYTES + frames.MAX_META_BYTES


def test_packs_that_wait_take_so_much_memory_and_no_more() -> None:
    """Each waits for its turn, a large one, too; one that is larger than all may be comes alone."""
    executed = list[str]()

    async def run() -> None:
        waiting, may_go_on = Packs(most_bytes=10), asyncio.Semaphore(0)

        async def execute(batch: list[Any]) -> None:
            await may_go_on.acquire()
            executed.extend(batch)

        async def held(wanted: int) -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            assert waiting.held_bytes == wanted

        running = asyncio.ensure_future(waiting.run(execute, lambda batch: [batch]))
        puts = [
            asyncio.ensure_future(waiting.put(cast(Any, None), cast(Any, name), size_bytes))
            for name, size_bytes in (("first", 6), ("gone", 5), ("large", 20), ("small", 1), ("last", 1))
        ]
        await held(6)
        puts[1].cancel()
        await held(6)
        assert [put.done() for put in puts] == [True, True, False, False, False], "the small ones are behind the large"
        may_go_on.release()
        await held(20)
        may_go_on.release()
        await held(2)
        may_go_on.release()
        may_go_on.release()
        await asyncio.wait_for(waiting.passed(lambda arrived: True), 30)
        assert waiting.held_bytes == 0
        running.cancel()

    asyncio.run(run())
    assert executed == ["first", "large", "small", "last"]


def test_numbers_of_files_end_where_those_of_operations_do() -> None:
    assert arrived(MAX_NUMBER - 1, {"a": b""}).pack.seq == MAX_NUMBER - 1
    with pytest.raises(BadFrame):
        arrived(MAX_NUMBER - 1, {"a": b"", "b": b""})


def test_the_refusal_of_a_pack_fits_a_frame_whatever_the_reason() -> None:
    names = tuple(map(str, range(packs.MAX_FILES)))
    head = Pack(ORIGIN, 1, EXPIRES, names, (0,) * len(names), (0,) * len(names), "")
    for why in ("unpacked", "\U0001f4be" * 200, "x" * 200):
        told = packs.refused(head, why)
        assert told.reasons[0] == why
        assert len(frames.encode_meta(messages.to_meta(told))) <= frames.MAX_META_BYTES
    assert packs.refused(head, "unpacked").reasons == ("unpacked",) * len(names), "each is sent by itself then"


def test_a_capability_for_a_directory_does_not_show_the_root() -> None:
    """Its path is "", which went unchecked: names that others have there could be listed."""
    issuer, holder = SigningKey(os.urandom(32)), SigningKey(os.urandom(32))
    issuers = {issuer.public: ""}
    for ask in (messages.List(""), messages.Stat(""), messages.Get("")):
        for prefix in ("alice", ""):
            text = issue(issuer, holder.public, prefix, ("read",), expires=100, terminals=("t:1",))
            signed = Credential(text, holder).signed(ask, "nonce")
            if prefix:
                with pytest.raises(BadCapability, match="for 'alice', not for ''"):
                    allow(signed, issuers, "t:1", 50, "nonce")
            else:
                assert allow(signed, issuers, "t:1", 50, "nonce").prefix == ""


def test_a_pack_is_allowed_by_its_capability_and_as_a_whole() -> None:
    issuer, holder = SigningKey(os.urandom(32)), SigningKey(os.urandom(32))
    text = issue(issuer, holder.public, "alice", ("write",), expires=EXPIRES, lot_bytes=10, terminals=("t:1",))
    pack = Pack(ORIGIN, 1, EXPIRES, ("alice/a", "alice/b"), (4, 6), (0, 0), "0" * 64)
    issuers = {issuer.public: ""}
    signed = Credential(text, holder).signed(pack)
    assert allow(signed, issuers, "t:1", 50).prefix == "alice"
    for change, words in (
        ({"manifest": "1" * 64}, "not signed"),
        ({"modes": (0, 1)}, "not signed"),
        ({"paths": ("alice/a", "alice/c")}, "not signed"),
    ):
        with pytest.raises(BadCapability, match=words):
            allow(replace(signed, **change), issuers, "t:1", 50)  # type: ignore[arg-type]
    for change, words in (({"paths": ("alice/a", "bob/b")}, "for 'alice'"), ({"sizes_bytes": (5, 6)}, "10 bytes")):
        with pytest.raises(BadCapability, match=words):
            allow(Credential(text, holder).signed(replace(pack, **change)), issuers, "t:1", 50)  # type: ignore[arg-type]


def test_what_fails_at_one_end_costs_no_other_and_its_senders_ask_again_at_once() -> None:
    """They waited until they asked, and were told that nobody knows the packs."""
    bad, good = arrived(1, {"f": b""}), arrived(1, {"f": b""}, origin="0b" * 16)
    closed: list[str] = []
    executed: list[str] = []

    async def execute(batch: list[Arrived]) -> None:
        if bad in batch:
            raise OSError(errno.ENODEV, "the tree is away")
        executed.extend(one.pack.origin for one in batch)
        running.cancel()

    async def run() -> None:
        nonlocal running
        waiting = Packs()
        for one in (bad, good):
            line = SimpleNamespace(end=lambda problem, one=one: closed.append(one.pack.origin))
            await waiting.put(cast(Any, line), one)
        running = asyncio.ensure_future(waiting.run(execute, lambda batch: [[one] for one in batch]))
        with suppress(asyncio.CancelledError):
            await running

    running = cast("asyncio.Future[None]", None)
    asyncio.run(run())
    assert (executed, closed) == ([good.pack.origin], [bad.pack.origin])


@pytest.mark.parametrize("of_packs", [True, False])
def test_an_unexpected_fault_of_one_operation_fails_none_that_came_with_it(of_packs: bool) -> None:
    executed, closed = list[int](), list[int]()

    async def execute(batch: list[Any]) -> None:
        seqs = [one.pack.seq if of_packs else one[0].seq for one in batch]
        if 2 in seqs:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        executed.extend(seqs)

    async def run() -> None:
        packs, changes = Packs(), Changes()
        lines = [SimpleNamespace(end=lambda problem, seq=seq: closed.append(seq), changes=[]) for seq in (1, 2, 3)]
        for seq, line in enumerate(lines, 1):
            operation = messages.Operation(ORIGIN, seq, "delete", "f", 0)
            if of_packs:
                await packs.put(cast(Any, line), cast(Any, SimpleNamespace(pack=SimpleNamespace(seq=seq))))
            else:
                changes.put(cast(Any, line), operation, "site")
        if of_packs:
            running = asyncio.ensure_future(packs.run(execute, lambda batch: [batch]))
            await packs.passed(lambda arrived: True)
        else:
            running = asyncio.ensure_future(changes.run(execute))
            await asyncio.gather(*(future for line in lines for future in line.changes))
        running.cancel()

    asyncio.run(run())
    assert (executed, closed) == ([1, 3], [2])


def test_packs_of_one_end_fail_together() -> None:
    ends = Ends(egress=cast(Any, SimpleNamespace(serves=lambda path: path.startswith("out/"))))
    here, out, more = arrived(1, {"f": b""}), arrived(2, {"out/f": b""}), arrived(3, {"g": b""})
    onward = arrived(4, {"out/f": b""})._replace(pack=replace(here.pack, terminal="t:1"))
    assert ends.apart([here, out, more, onward]) == [[here, more], [out], [onward]]


@pytest.mark.parametrize(("outcomes", "code"), [(("pending",), 1), (("failed",), 0)])
def test_a_custodian_says_a_pack_again_that_there_was_no_room_for(outcomes: tuple[str, ...], code: int) -> None:
    """Its files would have been lost to whoever freed them when the custodian had them."""
    told: list[Answer] = []
    way = Way(Gateway("192.0.2.1", 1, "key", b"secret"), told.append)
    way._sent[ORIGIN, 1] = _Sent(7, 2)
    no_space = ErrorClass.NO_SPACE_REMOTE.code
    said = messages.Packed(ORIGIN, 1, (1, 0), (1,), outcomes, ("space",), (no_space,))
    meta, _ = frames.decode_meta(frames.encode_meta(messages.to_meta(said)))
    heard = messages.from_meta(frames.Type.PACKED, meta)
    assert heard == said, "as it travels"
    way._hear(heard)
    (answer,) = told
    failure = failed(messages.Result(ORIGIN, 2, outcomes[0], "space", code=no_space), "f", "t:1")
    assert failure is not None
    assert (failure.kind, failure.message) == (
        ErrorClass.NO_SPACE_REMOTE, f"f: {outcomes[0]}: the router has no room for it now",
    )  # fmt: skip
    assert (answer.code, len(answer.results)) == ((no_space, 0) if code else (0, 2))
