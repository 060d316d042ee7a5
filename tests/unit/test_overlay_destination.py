"""The terminal on a real directory: each operation once, in order, whatever dies in between."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlay_router.data.jobs import Report
from overlay_router.ends import Ends
from overlay_router.local.destination import Destination
from overlay_router.local.replies import Reply
from overlay_router.local.store import Store, StoreError
from overlay_router.local.tree import Tree
from stageout.core import durable
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.messages import Open, Operation
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S

ORIGIN, PEER, BLOCK, EXPIRES = "0a" * 16, "site", 4, 1000
#: Kind of the digests, as far as anybody is told.
DIGEST = "blake2b-128"


class Crash(BaseException):
    """The router dies here."""


class Router:
    """A destination that can be restarted, and an origin that repeats itself as one does."""

    def __init__(self, home: Path) -> None:
        self.root, self.path = home / "root", home / "store"
        self.root.mkdir(parents=True)
        self.now, self._owned = 0, ExitStack()
        self.open()

    def open(self) -> None:
        self.store = self._owned.enter_context(closing(Store(self.path)))
        self.tree = self._owned.enter_context(closing(Tree(self.root)))
        self.place = self._owned.enter_context(closing(Destination(self.store, self.tree, lambda: self.now)))

    def close(self) -> None:
        """The files that are open of it: it may have died while it started."""
        self._owned.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def send(self, operation: Operation, data: bytes = b"") -> str:
        """Outcome of an operation, with its data if it needs them; "" while it is held."""
        if operation.kind == "publish":
            operation = self._stage(operation, data)
        return outcome(self.place.operate(operation, PEER), operation.seq)

    def send_together(self, operations: list[tuple[Operation, bytes]]) -> dict[int, str]:
        """Outcomes of operations that come together; those of files have their data first."""
        asked = []
        for operation, data in operations:
            if operation.kind == "publish":
                operation = self._stage(operation, data)
            asked.append((operation, PEER))
        replies = self.place.operate_all(asked)
        return {operation.seq: outcome(replies, operation.seq) for operation, _ in operations}

    def _stage(self, operation: Operation, data: bytes) -> Operation:
        blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
        digests = digests_of(data)
        manifest = hashlib.sha256(b"".join(digests)).hexdigest()
        # One file is opened before its size is known.
        size = len(data) + (operation.path == UNSIZED)
        answer = self.place.open(Open(ORIGIN, operation.seq, operation.path, size, BLOCK, EXPIRES), PEER, DIGEST)
        if isinstance(answer.message, messages.Opened):
            self._write(answer.message.tid, list(zip(blocks, digests)))
            self.place.sized(answer.message.tid, len(data))
        return replace(operation, size_bytes=len(data), blocks=len(blocks), manifest=manifest)

    def _write(self, tid: int, blocks: list[tuple[bytes, bytes]]) -> None:
        for position, (block, digest) in enumerate(blocks):
            with self.tree.staging(tid).open("r+b") as file:
                os.pwrite(file.fileno(), block, position * BLOCK)
            self.place.staged(tid, [(position, digest)])

    def content(self) -> dict[str, str]:
        """Every name below the root: text of files, "/" for directories."""
        found = {}
        for path in self.root.rglob("*"):
            name = str(path.relative_to(self.root))
            if not name.startswith(".stageout"):
                found[name] = "/" if path.is_dir() else path.read_text()
        return found

    def leftovers(self) -> list[Path]:
        return [*(self.root / ".stageout/staging").iterdir(), *(self.root / ".stageout/trash").iterdir()]


def digests_of(data: bytes) -> list[bytes]:
    """Those of its blocks, as :class:`Router` makes them."""
    return [hashlib.sha256(data[at : at + BLOCK]).digest()[:16] for at in range(0, len(data), BLOCK)]


def known(router: Router) -> set[str]:
    """Files of which is known what they were when they were published; all that is known of them is right."""
    found = set()
    for path in router.root.rglob("*"):
        name = str(path.relative_to(router.root))
        content = None if name.startswith(".stageout") else router.place.remembered.of(path.lstat())
        if content is not None:
            digests = digests_of(path.read_bytes())
            assert content == (DIGEST, hashlib.sha256(b"".join(digests)).hexdigest())
            assert router.store.contents.digests(path.stat().st_ino, 0, 99) == b"".join(digests)
            found.add(name)
    return found


def outcome(replies: list[Reply], seq: int) -> str:
    found = [r.message.outcome for r in replies if isinstance(r.message, messages.Result) and r.message.seq == seq]
    return found[-1] if found else ""


def op(seq: int, kind: str, path: str, **more: Any) -> Operation:
    return Operation(ORIGIN, seq, kind, path, EXPIRES, **({"mode": 0o755} if kind == "mkdir" else {}), **more)


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory in memory where there is one: these tests sync thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture
def router(home: Path) -> Iterator[Router]:
    made = Router(home / "router")
    yield made
    made.close()


def test_a_file_appears_whole_with_its_mode(router: Router) -> None:
    assert router.send(op(1, "publish", "a/b/c.txt", parents=True, mode=0o640), b"ten bytes!") == "done"
    assert router.content() == {"a": "/", "a/b": "/", "a/b/c.txt": "ten bytes!"}
    assert (router.root / "a/b/c.txt").stat().st_mode & 0o777 == 0o640
    assert not router.leftovers()


def test_an_empty_file(router: Router) -> None:
    assert router.send(op(1, "publish", "empty"), b"") == "done"
    assert router.content() == {"empty": ""}


def test_a_repeated_operation_changes_nothing_even_when_the_name_is_another_file_now(router: Router) -> None:
    first = op(1, "publish", "f")
    assert router.send(first, b"old") == "done"
    assert router.send(op(2, "publish", "f", after=(1,)), b"new") == "done"
    for again in range(2):
        assert router.send(first, b"old") == "done"
        assert router.content() == {"f": "new"}
        if not again:
            router.restart()
    router.place.low(messages.Low(ORIGIN, 2))
    assert router.send(first, b"old") == "stale"
    assert router.content() == {"f": "new"}


def test_publish_waits_for_its_data_and_its_edges(router: Router) -> None:
    waiting = op(2, "rename", "f", target="g", after=(1,))
    assert router.place.operate(waiting, "other") == []
    ask = router.place.open(Open(ORIGIN, 1, "f", 4, BLOCK, EXPIRES), PEER).message
    assert isinstance(ask, messages.Opened)
    digest = b"d" * 16
    publish = op(1, "publish", "f", size_bytes=4, blocks=1, manifest=hashlib.sha256(digest).hexdigest())
    assert router.place.operate(publish, PEER) == []
    router.tree.staging(ask.tid).write_bytes(b"data")
    replies = router.place.staged(ask.tid, [(0, digest)]) + router.place.whole(ask.tid)
    assert [(reply.to, type(reply.message).__name__) for reply in replies] == [
        (PEER, "Staged"),
        (PEER, "Result"),
        ("other", "Result"),
    ]
    assert router.content() == {"g": "data"}


@pytest.mark.parametrize("in_parts", [False, True])
def test_blocks_that_were_written_over_when_all_were_there_come_again(router: Router, in_parts: bool) -> None:
    """Its publish would go by the digests of what was there before."""
    digest = frames.digests()["blake2b-128"]
    ask = router.place.open(Open(ORIGIN, 1, "f", 8, BLOCK, EXPIRES), PEER).message
    assert isinstance(ask, messages.Opened)
    file, ends = router.tree.staging(ask.tid), Ends(router.place)
    blocks = [b"good", b"data"]
    manifest = hashlib.sha256(b"".join(map(digest, blocks))).hexdigest()
    publish = op(1, "publish", "f", size_bytes=8, blocks=2, manifest=manifest)
    router.place.operate(publish, PEER)
    for second, again in ((b"evil", True), (b"data", False)):
        file.write_bytes(b"gooddata")
        router.place.staged(ask.tid, enumerate(map(digest, blocks)))
        file.write_bytes(b"good" + second)
        if in_parts:
            late = Report(ask.tid, (), ((4, 4),), "blake2b-128", late=True)
        else:
            late = Report(ask.tid, ((1, digest(second).hex()),), late=True)
        replies = ends.written_late(late)
        assert [reply.message for reply in replies] == ([replace(ask, staged=())] if again else [])
        assert outcome(ends.whole(ask.tid), 1) == ("" if again else "done")
    assert router.content() == {"f": "gooddata"}


def test_resume_says_what_is_there_already(router: Router) -> None:
    ask = Open(ORIGIN, 1, "f", 12, BLOCK, EXPIRES)
    first = router.place.open(ask, PEER).message
    assert isinstance(first, messages.Opened)
    router.place.staged(first.tid, [(0, b"x"), (2, b"y")])
    router.restart()
    again = router.place.open(ask, PEER).message
    assert again == replace(first, staged=((0, 1), (2, 3)))


def test_wrong_data_are_never_published(router: Router) -> None:
    ask = router.place.open(Open(ORIGIN, 1, "f", 4, BLOCK, EXPIRES), PEER).message
    assert isinstance(ask, messages.Opened)
    router.place.staged(ask.tid, [(0, b"wrong")])
    digest = hashlib.sha256(b"good").digest()[:16]
    publish = op(1, "publish", "f", size_bytes=4, blocks=1, manifest=hashlib.sha256(digest).hexdigest())
    replies = router.place.operate(publish, PEER)
    assert [reply.message for reply in replies] == [replace(ask, staged=())]
    assert router.content() == {}
    assert router.send(op(1, "publish", "f"), b"good") == "done"
    assert router.content() == {"f": "good"}


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "", "a//b", ".stageout/x", "a/./b"])
def test_paths_that_leave_the_root_are_refused(router: Router, path: str) -> None:
    assert router.send(op(1, "publish", path), b"data") == "failed"
    assert router.send(op(2, "mkdir", path)) == "failed"
    assert router.send(op(3, "publish", "f"), b"data") == "done"
    assert router.send(op(4, "rename", "f", target=path)) == "failed"
    assert router.content() == {"f": "data"}


def test_symbolic_links_are_never_followed(router: Router, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("theirs")
    (router.root / "out").symlink_to(tmp_path / "outside")
    assert router.send(op(1, "publish", "out/file"), b"mine") == "failed"
    assert router.send(op(2, "publish", "out/new/file", parents=True), b"mine") == "failed"
    assert router.send(op(3, "delete", "out/file")) == "failed"
    (router.root / "link").symlink_to(tmp_path / "outside/file")
    assert router.send(op(4, "setattr", "link", mode=0o600)) == "failed"
    assert router.send(op(5, "publish", "link"), b"mine") == "done"
    assert (tmp_path / "outside/file").read_text() == "theirs"
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["file"]


def test_names_that_are_not_utf8(router: Router) -> None:
    name = os.fsdecode(b"caf\xe9\n.txt")
    assert router.send(op(1, "publish", name), b"data") == "done"
    assert [os.fsencode(path.name) for path in router.root.glob("caf*")] == [b"caf\xe9\n.txt"]
    router.restart()
    assert router.send(op(1, "publish", name), b"data") == "done"


def test_operations_on_what_is_not_there_fail_and_their_dependents_too(router: Router) -> None:
    assert router.send(op(1, "delete", "nothing")) == "failed"
    assert router.send(op(2, "publish", "f", after=(1,)), b"data") == "failed"
    assert router.send(op(3, "publish", "no/such/f"), b"data") == "failed"
    assert router.send(op(4, "publish", "g", generation=7), b"data") == "failed"
    assert router.send(op(5, "publish", "g", absent=True), b"data") == "done"
    assert router.send(op(6, "publish", "g", absent=True), b"data") == "failed"
    assert router.send(op(7, "publish", "g", generation=1), b"more") == "done"
    assert router.send(op(8, "mkdir", "g")) == "failed"
    assert not router.leftovers()


def test_a_full_disk_is_said_and_leaves_nothing(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        answer = router.place.open(Open(ORIGIN, 1, "f", 4, BLOCK, EXPIRES), PEER)
        assert isinstance(answer.message, messages.NoSpace)
        assert not router.leftovers()
    assert router.send(op(1, "publish", "f"), b"data") == "done"


def test_of_an_operation_that_is_refused_no_directory_stays(router: Router) -> None:
    (router.root / "there").mkdir()
    assert router.send(op(1, "publish", "there/a/b/f", parents=True, generation=7), b"data") == "failed"
    assert router.send(op(2, "mkdir", "new/d", parents=True, generation=7)) == "failed"
    assert router.send(op(3, "rename", "none", target="new/d", parents=True)) == "failed"
    assert router.content() == {"there": "/"}
    assert router.send(op(4, "publish", "there/f"), b"data") == "done"
    assert router.send(op(5, "publish", "there/f/below/f", parents=True), b"data") == "failed"
    assert router.content() == {"there": "/", "there/f": "data"}


def test_a_file_is_cut_but_never_made_longer(router: Router) -> None:
    assert router.send(op(1, "publish", "f", mode=0o600), b"ten bytes!") == "done"
    assert router.send(op(2, "setattr", "f", attributes=("size",), size_bytes=3)) == "done"
    assert router.send(op(3, "setattr", "f", attributes=("size",), size_bytes=4)) == "failed"
    assert router.send(op(4, "setattr", "f", attributes=("mode", "size"), size_bytes=0, mode=0o644)) == "done"
    assert (router.content(), (router.root / "f").stat().st_mode & 0o777) == ({"f": ""}, 0o644)
    (router.root / "d").mkdir()
    assert router.send(op(5, "setattr", "d", attributes=("size",), size_bytes=0)) == "failed"
    assert router.store.intents() == []


def test_a_directory_that_may_exist_is_made_once_and_no_file_is_taken_for_it(router: Router) -> None:
    for seq in (1, 2):
        assert router.send(op(seq, "mkdir", "d/e", parents=True, may_exist=True)) == "done"
        assert router.content() == {"d": "/", "d/e": "/"}
    (router.root / "f").touch()
    assert router.send(op(3, "mkdir", "f", may_exist=True)) == "failed"
    assert router.send(op(4, "mkdir", "d/e")) == "failed"


def test_cancelled_and_expired(router: Router) -> None:
    assert router.send(op(2, "publish", "f", after=(1,)), b"data") == ""
    assert router.place.cancel(messages.Cancel(ORIGIN, 2), PEER) == []
    assert router.send(op(1, "mkdir", "d")) == "done"
    assert outcome(router.place.status(messages.Status(ORIGIN, 2), PEER), 2) == "cancelled"
    assert router.send(op(4, "publish", "g", after=(3,)), b"data") == ""
    router.now = EXPIRES + 1
    assert outcome(router.place.expire(), 4) == "expired"
    assert router.content() == {"d": "/"}
    assert not router.leftovers()


def test_a_wish_for_what_never_comes_is_forgotten(router: Router) -> None:
    """Neither is one that an earlier version has recorded for ever."""
    router.place.cancel(messages.Cancel(ORIGIN, 2), PEER)
    router.store.cancel("0b" * 16, 2)
    router.now = MOST_EXPIRES_AFTER_S
    router.place.expire()
    assert router.send(replace(op(2, "mkdir", "d"), expires=router.now + EXPIRES)) == "cancelled"
    router.place.cancel(messages.Cancel("0c" * 16, 7), PEER)
    router.now += 2 * MOST_EXPIRES_AFTER_S
    router.place.expire()
    for table in ("cancelled", "origins", "results"):
        assert router.store._connection.execute(f"SELECT * FROM {table}").fetchall() == [], table


@pytest.mark.parametrize("after", [(2,), (1,), (9,)])
def test_an_operation_that_waits_for_a_later_one_fails_at_once(router: Router, after: tuple[int, ...]) -> None:
    """Two could wait for each other."""
    assert router.send(op(1, "mkdir", "a", after=after)) == "failed"
    assert router.send(op(2, "mkdir", "b", after=(1,))) == "failed"
    assert router.content() == {}


def test_data_that_one_sender_takes_back_are_no_others(router: Router) -> None:
    ask, peers = Open(ORIGIN, 1, "f", 4, BLOCK, EXPIRES), ("one", "other")
    tids = [opened.tid for opened in (router.place.open(ask, peer).message for peer in peers)]  # type: ignore[union-attr]
    router.place.cancel(messages.Cancel(ORIGIN, 1, data_only=True), "one")
    assert [transfer.tid for transfer in router.place.transfers()] == tids[1:]


def test_what_its_origin_has_settled_is_not_held_any_more(router: Router) -> None:
    assert [router.send(op(seq, "mkdir", f"d{seq}", after=(1,))) for seq in (2, 3)] == ["", ""]
    router.place.low(messages.Low(ORIGIN, 2))
    router.now = EXPIRES + 1
    assert [reply.message.seq for reply in router.place.expire()] == [3]  # type: ignore[union-attr]


def test_a_database_that_another_router_has(router: Router) -> None:
    with pytest.raises(StoreError, match="Stop the router"):
        Store(router.path)


def test_a_new_database_is_a_new_epoch(router: Router) -> None:
    first = router.place.open(Open(ORIGIN, 1, "f", 4, BLOCK, EXPIRES), PEER).message
    router.close()
    router.path.unlink()
    router.open()
    second = router.place.open(Open(ORIGIN, 1, "f", 4, BLOCK, EXPIRES), PEER).message
    assert isinstance(first, messages.Opened)
    assert isinstance(second, messages.Opened)
    assert first.epoch != second.epoch


#: A history in which every kind of operation succeeds once, some on names that others made, replaced or removed.
UNSIZED = "x/y/z"
STORY: list[tuple[Operation, bytes]] = [
    (op(1, "publish", "a", mode=0o600), b"first a"),
    (op(2, "mkdir", "d"), b""),
    (op(3, "rename", "a", target="d/a", after=(1, 2)), b""),
    (op(4, "publish", "a", after=(3,)), b"second a"),
    (op(5, "setattr", "d/a", mode=0o644, after=(3,)), b""),
    (op(6, "publish", UNSIZED, parents=True), b"deep"),
    (op(7, "delete", "a", after=(4,)), b""),
    (op(8, "publish", "a", after=(7,)), b"third a, longer than the others"),
    (op(9, "rename", "d", target="e", after=(5,)), b""),
]
TOLD = {"a": "third a, longer than the others", "e": "/", "e/a": "first a", "x": "/", "x/y": "/", "x/y/z": "deep"}
_FOLDER = Path(__file__).parents[2] / "overlay_router" / "local"
_SOURCES = "".join((_FOLDER / f"{name}.py").read_text() for name in ("destination", "store", "trash", "tree"))
ELSEWHERE = {f"overlay-{step}" for step in ("unstage", "cancel", "low", "forget", "recover-sync", "abandon", "follow")}
_PACKS = {f"overlay-pack-{step}" for step in ("write", "intent", "publish", "settle")}
LABELS = sorted(
    set(re.findall(r"\"(overlay-[a-z-]+)\"", _SOURCES)) - ELSEWHERE - _PACKS - {"overlay-lot-record", "overlay-migrate"}
)


def _tell(router: Router) -> None:
    """The origin repeats what has no result until all have one."""
    for _ in range(len(STORY)):
        outcomes = {router.send(operation, data) for operation, data in STORY}
        if outcomes == {"done"}:
            return
    raise AssertionError("some operation never ended")


@contextmanager
def _dying(label: str, count: int, when: str) -> Iterator[list[str]]:
    """The process dies before or after that label is passed for the ``count``-th time."""
    passed: list[str] = []
    real = durable.step

    @contextmanager
    def step(name: str) -> Iterator[None]:
        passed.append(name)
        hit = name == label and passed.count(label) == count
        if hit and when == "before":
            raise Crash
        with real(name):
            yield
        if hit:
            raise Crash

    durable.step = step
    try:
        yield passed
    finally:
        durable.step = real


def _check_told(router: Router) -> None:
    assert router.content() == TOLD
    assert (router.root / "e/a").stat().st_mode & 0o777 == 0o644
    assert router.store.generation("a") == 5, "published three times, renamed away once, deleted once"
    assert not router.leftovers()
    assert router.store.intents() == []
    files = {name for name, what in router.content().items() if what != "/"}
    assert known(router) <= files
    assert len(router.store.contents.after(0, 99)) == len(known(router)), "what is not known has no row"


@contextmanager
def _counting() -> Iterator[list[str]]:
    with _dying("", 0, "before") as passed:
        yield passed


def test_what_comes_together_shares_its_records_and_syncs(router: Router) -> None:
    many = [(op(number, "mkdir", f"d{number}"), b"") for number in range(1, 21)]
    with _counting() as passed:
        assert set(router.send_together(many).values()) == {"done"}
    for label in ("overlay-intent", "overlay-names-sync", "overlay-settle"):
        assert passed.count(label) == 1
    with _counting() as passed:
        told = router.send_together([(op(number + 20, "rename", f"d{number}", target=f"e{number}"), b"")
                                     for number in range(1, 21)])  # fmt: skip
    assert set(told.values()) == {"done"}
    assert passed.count("overlay-settle") == 1
    assert router.content() == {f"e{number}": "/" for number in range(1, 21)}


def test_operations_on_the_same_names_keep_their_order_also_together(router: Router) -> None:
    told = router.send_together([
        (op(1, "mkdir", "a"), b""), (op(2, "publish", "a/f"), b"first"), (op(3, "rename", "a", target="b"), b""),
        (op(4, "mkdir", "a"), b""), (op(5, "delete", "b/f"), b""), (op(6, "mkdir", "b"), b""),
        (op(7, "setattr", "b", mode=0o700), b""), (op(8, "mkdir", "other"), b""),
    ])  # fmt: skip
    assert told == {**dict.fromkeys(range(1, 9), "done"), 6: "failed"}
    assert router.content() == {"a": "/", "b": "/", "other": "/"}
    assert (router.root / "b").stat().st_mode & 0o777 == 0o700


def test_one_that_is_refused_or_fails_costs_the_others_nothing(router: Router) -> None:
    told = router.send_together([
        (op(1, "mkdir", "x/y", parents=True, generation=7), b""), (op(2, "mkdir", "x/z", parents=True), b""),
        (op(3, "delete", "none"), b""), (op(4, "publish", "f"), b"data"), (op(5, "mkdir", "../up"), b""),
        (op(6, "mkdir", "g", after=(4,)), b""), (op(4, "publish", "f"), b"data"),
    ])  # fmt: skip
    assert told == {1: "failed", 2: "done", 3: "failed", 4: "done", 5: "failed", 6: "done"}
    assert router.content() == {"x": "/", "x/z": "/", "f": "data", "g": "/"}
    assert (router.leftovers(), router.store.intents()) == ([], [])


def _tell_together(router: Router) -> None:
    for _ in range(len(STORY)):
        if set(router.send_together(STORY).values()) == {"done"}:
            return
    raise AssertionError("some operation never ended")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("label", ["overlay-intent", "overlay-rename", "overlay-names-sync", "overlay-settle"])
def test_death_of_a_group_changes_nothing_in_the_end(home: Path, label: str, when: str) -> None:
    for count in (1, 2, 3):
        router = Router(home / str(count))
        with _dying(label, count, when):
            try:
                _tell_together(router)
            except Crash:
                router.restart()
        _tell_together(router)
        router.restart()
        _check_told(router)
        router.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("label", LABELS)
def test_death_at_every_step_changes_nothing_in_the_end(home: Path, label: str, when: str) -> None:
    for count in (1, 2, 3):
        router = Router(home / str(count))
        with _dying(label, count, when) as passed:
            try:
                _tell(router)
            except Crash:
                router.restart()
        assert label in passed, f"nobody passes {label}"
        _tell(router)
        router.restart()
        _tell(router)
        _check_told(router)
        router.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(len(STORY))), deaths=st.lists(st.tuples(st.integers(0, 150), st.booleans()), max_size=3)
)
def test_any_order_and_any_deaths(home: Path, order: Any, deaths: Any) -> None:
    router = Router(Path(tempfile.mkdtemp(dir=home)) / "router")
    for death, after in deaths:
        try:
            with _dying_at(death, after):
                for number in order:
                    router.send(*STORY[number])
                router.restart()
        except Crash:
            router.restart()
    _tell(router)
    _check_told(router)
    router.close()


@contextmanager
def _dying_at(number: int, after: bool) -> Iterator[None]:
    left = number
    real = durable.step

    @contextmanager
    def step(name: str) -> Iterator[None]:
        nonlocal left
        left -= 1
        hit = left == 0
        if hit and not after:
            raise Crash
        with real(name):
            yield
        if hit:
            raise Crash

    durable.step = step
    try:
        yield
    finally:
        durable.step = real
