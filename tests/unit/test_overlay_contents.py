"""A terminal's records of published files: as long as they are these files, wherever their names go."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlay_router.local import contents, remembered
from overlay_router.local.contents import Identity, Made
from overlay_router.local.replies import Published
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Open, Stat
from tests.unit.test_overlay_destination import (
    BLOCK,
    DIGEST,
    EXPIRES,
    ORIGIN,
    PEER,
    Crash,
    Router,
    _dying,
    digests_of,
    home,
    known,
    op,
    router,
)

__all__ = ["home", "router"]
_DATA = b"some bytes of a file"


def _rows(router: Router) -> list[str]:
    return [one.path for one in router.store.contents.after(0, 1000)]


def _behind(path: Path, data: bytes) -> None:
    """Somebody else changes a file; a moment later, as the clock of the filesystem counts."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_it_is_said_with_the_digests_of_the_blocks_that_are_asked_for(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(contents, "PART_BLOCKS", 2)
    router.send(op(1, "publish", "f"), _DATA)
    for first, blocks in ((0, 0), (2, 2), (1, 2), (3, 1), (4, 9), (7, 0), (1 << 62, 1 << 62)):
        found = router.place.published("f", -1, first, blocks)
        assert isinstance(found, Published)
        os.close(found.file)
        assert found.digests == b"".join(digests_of(_DATA)[first : first + (blocks or 9)])
        assert found.content is not None
        assert router.place.look_up(Stat("f")).manifest == found.content.manifest
        assert router.place.look_up(Stat("f")).digest == found.content.digest == DIGEST


def test_a_few_digests_of_a_large_file_cost_what_a_few_cost(router: Router) -> None:
    """They were read whole for each range: 16 MB of a TB, some ten thousand times."""
    blocks = 3 * contents.PART_BLOCKS + 1
    digests = [number.to_bytes(16, "big") for number in range(blocks)]
    transfer = router.store.grant(Open(ORIGIN, 1, "f", blocks * BLOCK, BLOCK, EXPIRES), PEER, DIGEST)
    router.store.stage(transfer.tid, enumerate(digests))
    publish, made = op(1, "publish", "f", blocks=blocks), Made(transfer.tid, Identity(77, blocks * BLOCK, 1))
    for _ in range(2):
        router.store.contents.changed(publish, made)
    for first, some in ((0, blocks), (1, 5), (1023, 2), (1024, 1024), (2047, 1026), (blocks - 1, 1)):
        assert router.store.contents.digests(77, first, some) == b"".join(digests[first : first + some])
    connection = router.store._connection
    (longest,) = connection.execute("SELECT max(length(digests)) FROM content_blocks").fetchone()
    assert longest == 16 * contents.PART_BLOCKS
    router.store.contents.drop([made.identity])
    assert connection.execute("SELECT count(*) FROM content_blocks").fetchone() == (0,)


def test_a_file_of_another_century_is_read_as_any_other(router: Router) -> None:
    (router.root / "f").write_bytes(_DATA)
    status = (router.root / "f").stat()
    with mock.patch("os.fstat", lambda file: _at(status, 1 << 63)):
        found = router.place.published("f", -1)
    assert isinstance(found, Published)
    os.close(found.file)
    assert (found.content, found.digests) == (None, b"")
    inode = os.stat_result([status.st_mode, (1 << 64) - 1, *status[2:]])
    assert router.place.remembered.of(inode) is None


def _at(status: os.stat_result, mtime_ns: int) -> Any:
    names = ("st_mode", "st_ino", "st_dev", "st_size")
    return SimpleNamespace(**{name: getattr(status, name) for name in names}, st_mtime_ns=mtime_ns)


def test_a_record_that_cannot_be_read_leaves_no_file_open(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    router.send(op(1, "publish", "f"), _DATA)

    def fails(*ignored: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(contents.Contents, "digests", fails)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError):
            router.place.published("f", -1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_name_that_goes_while_it_is_looked_up_is_said_as_it_was_found(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.send(op(1, "publish", "f"), _DATA)
    found = [(router.root / "f").stat()]

    def status(path: str) -> os.stat_result:
        if not found:
            raise FileNotFoundError(2, "it has gone")
        return found.pop()

    monkeypatch.setattr(router.tree, "status", status)
    answer = router.place.look_up(Stat("f"))
    assert (answer.code, answer.sizes_bytes, answer.manifest) == (0, (len(_DATA),), "")


def test_names_change_and_it_stays_known(router: Router) -> None:
    name = os.fsdecode(b"\xff\xfe%_'")
    for number, path in enumerate(("a/b/f", "a/b/g", f"a/b/{name}", "a/bb", "empty"), 1):
        router.send(op(number, "publish", path, parents=True), _DATA if path != "empty" else b"")
    router.send(op(6, "rename", "a/b/f", target="a/b/h"))
    router.send(op(7, "rename", "a/b", target="c"))
    router.send(op(8, "rename", "a", target=name))
    router.send(op(9, "setattr", "c/h", mode=0o600))
    router.send(op(10, "rename", "empty", target="empty"))
    expected = {"c/h", "c/g", f"c/{name}", f"{name}/bb", "empty"}
    assert (known(router), set(_rows(router))) == (expected, expected)
    router.restart()
    assert (known(router), set(_rows(router))) == (expected, expected)


def test_what_goes_through_the_router_leaves_no_row(router: Router) -> None:
    for number, path in enumerate(("d/x", "d/e/y", "d0", "deleted", "over", "other", "cut"), 1):
        assert router.send(op(number, "publish", path, parents=True), _DATA) == "done"
    router.send(op(10, "delete", "d"))
    router.send(op(11, "delete", "deleted"))
    router.send(op(12, "publish", "over"), b"another one")
    router.send(op(13, "rename", "d0", target="other"))
    router.send(op(14, "setattr", "cut", attributes=("size",), size_bytes=len(_DATA)))
    assert (known(router), sorted(_rows(router))) == ({"over", "other"}, ["other", "over"])
    count = "SELECT count(*) FROM content_blocks"
    assert router.store._connection.execute(count).fetchone() == (2,)


def test_what_was_changed_behind_the_router_is_not_known_and_leaves_no_row_for_ever(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["changed", "deleted", "linked", "longer", "moved", "same"]
    for number, path in enumerate(names, 1):
        router.send(op(number, "publish", path), _DATA)
    _behind(router.root / "changed", _DATA)
    (router.root / "deleted").unlink()
    (router.root / "moved").rename(router.root / "elsewhere")
    (router.root / "linked").rename(router.root / "behind")
    (router.root / "linked").symlink_to("behind")
    _behind(router.root / "longer", _DATA + b"!")
    assert known(router) == {"same", "elsewhere", "behind"}
    monkeypatch.setattr(remembered, "_LOOKED_AFTER", 2)
    left = []
    for _ in range(5):
        router.place.expire()
        left.append(len(_rows(router)))
    assert left[0] >= 4, "a few at a time"
    assert (left[-1], _rows(router), known(router)) == (1, ["same"], {"same"})


def test_an_inode_that_is_used_again_is_another_file(router: Router) -> None:
    router.send(op(1, "publish", "f"), _DATA)
    status = (router.root / "f").stat()
    row = (status.st_ino, status.st_size, status.st_mtime_ns)
    assert router.store.contents.find(Identity(*row)) is not None
    for place in range(3):
        other = tuple(value + (at == place) for at, value in enumerate(row))
        assert router.store.contents.find(Identity(*other)) is None
    foreign = os.stat_result([*status[:2], status.st_dev + 1, *status[3:]])
    assert router.place.remembered.of(foreign) is None
    assert router.place.remembered.of(router.root.stat()) is None


def test_digests_of_one_kind_are_never_kept_as_those_of_another(router: Router) -> None:
    """Its sender came again with another kind, while a PUBLISH with the first one waited for something."""
    publish = op(2, "publish", "f", after=(1,))
    assert router.send(publish, _DATA) == ""
    for kind in ("another", "another", DIGEST):
        router.place.open(Open(ORIGIN, 2, "f", len(_DATA), BLOCK, EXPIRES), PEER, kind)
    assert router.send(op(1, "publish", "g"), _DATA) == "done"
    assert (router.root / "f").read_bytes() == _DATA
    assert (known(router), _rows(router)) == ({"g"}, ["g"])


def test_nothing_is_kept_of_a_kind_that_nobody_names_and_the_last_one_counts(router: Router) -> None:
    ask, digests = Open(ORIGIN, 1, "f", len(_DATA), BLOCK, EXPIRES), digests_of(_DATA)
    router.place.open(ask, PEER, "another")
    assert router.send(op(1, "publish", "f"), _DATA) == "done"
    assert known(router) == {"f"}
    opened = router.place.open(Open(ORIGIN, 2, "g", len(_DATA), BLOCK, EXPIRES), PEER).message
    assert isinstance(opened, messages.Opened)
    router._write(opened.tid, [(_DATA[at * BLOCK : (at + 1) * BLOCK], one) for at, one in enumerate(digests)])
    manifest = router.place.look_up(Stat("f")).manifest
    publish = op(2, "publish", "g", size_bytes=len(_DATA), blocks=len(digests), manifest=manifest)
    assert [reply.message.outcome for reply in router.place.operate(publish, PEER)] == ["done"]  # type: ignore[union-attr]
    assert known(router) == {"f"}


@pytest.mark.parametrize(("when", "expected"), [("before", set()), ("after", {"f"})])
def test_a_death_before_its_record_leaves_a_file_of_which_nothing_is_known(
    router: Router, when: str, expected: set[str]
) -> None:
    """Until the restart anybody may have changed it: what is there then is no proof of what it should be."""
    with _dying("overlay-settle", 1, when), pytest.raises(Crash):
        router.send(op(1, "publish", "f"), _DATA)
    if when == "before":
        (router.root / "f").write_bytes(_DATA[::-1])
    router.restart()
    assert router.send(op(1, "publish", "f"), _DATA) == "done"
    assert (known(router), set(_rows(router))) == (expected, expected)


def _raw(router: Router) -> set[str]:
    """Paths as they are in the rows."""
    return {os.fsdecode(path) for (path,) in router.store._connection.execute("SELECT path FROM contents")}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are many."""
    monkeypatch.setattr(contents, "_AT_ONCE", 1)
    monkeypatch.setattr(contents, "_STEP", 2)


def _three(router: Router, first: int, directory: str) -> set[str]:
    names = {f"{directory}/{name}" for name in ("a", "b/c", "b/d")}
    for seq, path in enumerate(sorted(names), first):
        assert router.send(op(seq, "publish", path, parents=True), path.encode()) == "done"
    return names


def _follow(router: Router) -> int:
    """All of it. Returns the number of steps."""
    steps = 1
    while router.place.follow():
        steps += 1
        assert known(router) <= set(_rows(router)), "between two steps"
    return steps


@pytest.mark.usefixtures("few")
def test_a_directory_of_many_files_is_renamed_at_once_and_their_records_follow_in_steps(router: Router) -> None:
    old = _three(router, 1, "d")
    assert router.send(op(4, "rename", "d", target="e")) == "done"
    expected = _three(router, 5, "e/f") | {path.replace("d", "e", 1) for path in old}
    assert (known(router), set(_rows(router))) == (expected, expected)
    assert _raw(router) == old | {path for path in expected if path.startswith("e/f")}, "they have followed at once"
    again = _three(router, 8, "d")
    assert router.send(op(11, "rename", "e/b/c", target="c")) == "done"
    assert router.send(op(12, "delete", "e/a")) == "done"
    assert router.send(op(13, "publish", "e/b/d"), b"another one") == "done"
    assert router.send(op(14, "publish", "d/a"), b"another one") == "done"
    expected = (expected | again | {"c"}) - {"e/b/c", "e/a"}
    assert (known(router), set(_rows(router))) == (expected, expected)
    assert _follow(router) > 1
    assert (known(router), _raw(router)) == (expected, expected)
    assert not router.place.follow()


@pytest.mark.usefixtures("few")
def test_a_directory_that_goes_to_and_fro_while_its_records_follow(router: Router) -> None:
    """The number of a change that was carried out is not used again: rows know by it what they have seen."""
    old = _three(router, 1, "d")
    for seq, (path, target) in enumerate((("d", "e"), ("e", "d"), ("d", "d0"), ("d0", "d")), 4):
        assert router.send(op(seq, "rename", path, target=target)) == "done"
    assert (known(router), set(_rows(router))) == (old, old)
    _follow(router)
    for seq, (path, target) in enumerate((("d", "e"), ("e", "d")), 8):
        assert router.send(op(seq, "rename", path, target=target)) == "done"
        _follow(router)
        expected = {name.replace("d", target, 1) for name in old}
        assert _raw(router) == known(router) == expected


@pytest.mark.usefixtures("few")
def test_records_of_a_directory_that_was_removed_go_in_steps_and_none_of_the_next_one(router: Router) -> None:
    _three(router, 1, "d")
    assert router.send(op(4, "delete", "d")) == "done"
    assert len(_raw(router)) == 3, "they have gone at once"
    new = _three(router, 5, "d")
    assert known(router) == new
    _follow(router)
    assert known(router) == _raw(router) == new
    (left,) = router.store._connection.execute("SELECT count(DISTINCT inode) FROM content_blocks").fetchone()
    assert left == 3


@pytest.mark.usefixtures("few")
def test_a_directory_above_one_that_is_followed_takes_its_files_with_it(router: Router) -> None:
    old = _three(router, 1, "d")
    assert router.send(op(4, "mkdir", "p")) == "done"
    for seq, (path, target) in enumerate((("d", "p/e"), ("p", "q"), ("q/e/b", "b")), 5):
        assert router.send(op(seq, "rename", path, target=target)) == "done"
    expected = {path.replace("d/b", "b", 1) if "/b/" in path else path.replace("d", "q/e", 1) for path in old}
    assert known(router) == set(_rows(router)) == expected
    _follow(router)
    assert known(router) == _raw(router) == expected
    assert router.send(op(8, "rename", "q", target="d")) == "done"
    assert router.send(op(9, "rename", "b", target="d/b")) == "done"
    assert router.send(op(10, "delete", "d")) == "done"
    assert (known(router), _follow(router) > 0, _raw(router)) == (set(), True, set())


@pytest.mark.usefixtures("few")
def test_a_file_that_is_replaced_before_its_record_has_followed_leaves_none(router: Router) -> None:
    _three(router, 1, "d")
    assert router.send(op(4, "rename", "d", target="e")) == "done"
    inode = (router.root / "e/a").stat().st_ino
    held = os.open(router.root / "e/a", os.O_RDONLY)  # its inode is not used again
    assert router.send(op(5, "publish", "e/a"), b"another one") == "done"
    rows = router.store._connection.execute("SELECT count(*) FROM contents WHERE inode = ?", (inode,)).fetchone()
    os.close(held)
    assert rows == (0,)
    assert _raw(router) == {"d/b/c", "d/b/d", "e/a"}


@pytest.mark.usefixtures("few")
def test_a_change_beside_a_few_records_changes_none_of_them(router: Router) -> None:
    """Records that are looked at since one of them might be concerned."""
    _three(router, 1, "d")
    assert router.send(op(4, "rename", "d", target="e")) == "done"
    for seq, path in ((5, "d"), (6, "d2")):
        assert router.send(op(seq, "mkdir", path)) == "done"
    assert router.send(op(7, "rename", "e/b", target="b")) == "done"
    assert router.send(op(8, "delete", "d")) == "done"
    expected = {"e/a", "b/c", "b/d"}
    assert known(router) == set(_rows(router)) == expected
    _follow(router)
    assert known(router) == _raw(router) == expected


@pytest.mark.usefixtures("few")
def test_so_many_changes_are_noted_and_no_more(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_MOST_MOVES", 3)
    names = _three(router, 1, "d0")
    for seq in range(8):
        assert router.send(op(10 + seq, "rename", f"d{seq}", target=f"d{seq + 1}")) == "done"
        assert len(router.store.contents._moves()) <= 3
        expected = {name.replace("d0", f"d{seq + 1}", 1) for name in names}
        assert known(router) == set(_rows(router)) == expected


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("label", ["overlay-settle", "overlay-follow"])
def test_a_death_while_records_follow_loses_none(router: Router, label: str, when: str) -> None:
    """Each file is known and each record says where its file is, whichever step the router dies at."""
    names, target, deaths = _three(router, 1, "d"), "d", 0
    for count in range(1, 6):
        path, target = target, "e" if target == "d" else "d"
        rename = op(10 + count, "rename", path, target=target)
        try:
            with _dying(label, count if label == "overlay-follow" else 1, when):
                router.send(rename)
                _follow(router)
        except Crash:
            deaths += 1
            router.restart()
            assert router.send(rename) == "done"
        expected = {name.replace("d", target, 1) for name in names}
        assert known(router) == set(_rows(router)) == expected
        _follow(router)
        assert known(router) == _raw(router) == expected
    assert deaths >= 3


_NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a"])
_STEPS = st.one_of(
    st.tuples(st.sampled_from(["publish", "delete", "mkdir", "mode", "cut"]), _NAMES, st.none()),
    st.tuples(st.just("rename"), _NAMES, _NAMES),
    st.tuples(st.sampled_from(["restart", "write", "unlink", "follow"]), _NAMES, st.none()),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_STEPS, max_size=14), at_once=st.sampled_from([0, 1, 500]))
def test_whatever_happens_what_is_known_is_true_and_nothing_is_left_over(home: Path, steps: Any, at_once: int) -> None:
    """Whether records follow their files at once, or later and one by one."""
    with mock.patch.multiple(contents, _AT_ONCE=at_once, _STEP=1, _MOST_MOVES=4):
        _play(home, steps)


def _play(home: Path, steps: Any) -> None:
    router, inodes = Router(home / os.urandom(8).hex()), dict[int, bool]()
    for number, (kind, path, target) in enumerate(steps, 1):
        place = router.root / path
        if kind == "restart":
            router.restart()
        elif kind == "follow":
            router.place.follow()
        elif kind in ("write", "unlink"):
            if place.is_file():
                inodes[place.stat().st_ino] = False
                _behind(place, b"by hand") if kind == "write" else place.unlink()
        elif kind == "rename":
            router.send(op(number, "rename", path, target=target))
        elif kind in ("mode", "cut"):
            attributes = ("mode",) if kind == "mode" else ("size",)
            if router.send(op(number, "setattr", path, attributes=attributes, mode=0o700, size_bytes=3)) == "done":
                inodes[place.stat().st_ino] &= kind == "mode" or place.is_dir()
        elif router.send(op(number, kind, path), str(number).encode() * 5) == "done" and kind != "delete":
            inodes[place.stat().st_ino] = kind == "publish"
    files = [path for path in router.root.rglob("*") if path.is_file() and ".stageout" not in path.parts]
    expected = {str(path.relative_to(router.root)) for path in files if inodes[path.stat().st_ino]}
    assert known(router) == expected
    router.place.expire()
    assert set(_rows(router)) == expected
    while router.place.follow():
        pass
    assert _raw(router) == set(_rows(router)) == expected
    router.close()
