"""Names at a real router: changed in the order of the calls, looked at, and nothing outside is seen."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from stageout import overlay
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import operations
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get, read
from stageout.overlay.key_file import read_key
from stageout.overlay.operations import Entry, Session
from stageout.overlay.proof import Proof
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, Get, Operation
from tests.harness.router import RouterProcess


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("shared") / "router") as running:
        yield running


@pytest.fixture
def router(shared: RouterProcess) -> RouterProcess:
    """The one router of this module, with nothing below its root."""
    if not shared.pid:
        shared.start()
    for path in shared.root.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != ".stageout":
            shutil.rmtree(path)
        elif path.name != ".stageout":
            path.unlink()
    return shared


@pytest.fixture
def small(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("small")), timeout_s=20)


def _refused(kind: ErrorClass, words: str, call: Callable[[], object]) -> None:
    with pytest.raises(TransferFailure, match=words) as caught:
        call()
    assert caught.value.kind is kind


def _entries(session: Session, path: str) -> list[Entry]:
    return list(session.entries(path))


def _names(router: RouterProcess) -> list[str]:
    return sorted(str(p.relative_to(router.root)) for p in router.root.rglob("*") if ".stageout" not in p.parts)


def test_a_tree_is_changed_in_the_order_of_the_calls(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"ten bytes!")
    put(gateway, tmp_path / "f", "f")
    with Session(gateway) as session:
        session.mkdir("d/e", parents=True, mode=0o700)
        session.rename("f", "d/e/f")
        session.set_mode("d/e/f", 0o600)
        session.truncate("d/e/f", 3)
        session.rename("d", "new/place", parents=True)
        session.mkdir("d")
        session.delete("d")
        session.push()
        assert _names(router) == ["new", "new/place", "new/place/e", "new/place/e/f"]
        found = session.stat("new/place/e/f")
        assert (found.name, found.kind, found.size_bytes, found.mode) == ("f", "file", 3, 0o600)
        assert abs(found.modified - time.time()) < 600
        assert session.stat("new/place/e").mode == 0o700
        session.delete("new")
        assert list(session.entries("")) == [], "looks only after what it was told before has happened"
    assert (router.root / ".stageout").is_dir()


def test_the_first_failure_is_told_and_what_depends_on_it_never_happens(
    router: RouterProcess, gateway: Gateway
) -> None:
    with Session(gateway) as session:
        session.delete("nothing")
        session.mkdir("nothing")
        session.mkdir("other")
        _refused(ErrorClass.CONFLICT, "nothing: failed", session.push)
        assert _names(router) == ["other"]
        session.mkdir("nothing")
        session.push()
        session.push()
    assert _names(router) == ["nothing", "other"]


def test_more_operations_than_the_window_and_a_router_that_is_killed(
    router: RouterProcess, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "_WINDOW", 9)
    with Session(gateway) as session:
        for number in range(40):
            session.mkdir(f"d{number}")
            session.rename(f"d{number}", f"e{number % 3}/f{number}", parents=True)
            if number == 20:
                router.kill()
                router.start()
        session.push()
        assert len(list(session.entries("e1"))) == 13
    assert len(_names(router)) == 43


def test_nothing_is_said_again_to_a_router_that_has_lost_its_records(router: RouterProcess, gateway: Gateway) -> None:
    with Session(gateway) as session:
        session.mkdir("d")
        session.push()
        router.kill()
        session.rename("d", "e")
        for path in (router.home / "records").glob("*.sqlite*"):
            path.unlink()
        router.start()
        with pytest.raises(TransferFailure, match=r"^d: whether it has happened is not known.*lost its records"):
            session.push()
        assert [entry.name for entry in session.entries("")] == ["d"]
        session.rename("d", "e")
        session.push()
        assert (router.root / "e").is_dir()


def test_an_operation_that_waits_can_be_cancelled(router: RouterProcess, gateway: Gateway) -> None:
    with Session(gateway) as session:
        channel = session._connected()
        held = Operation(session.origin, 2, "mkdir", "late", int(time.time()) + 60, after=(1,))
        channel.send(held)
        session._unsettled[2], session._seq = held, 2
        session.cancel(2)
        channel.send(Operation(session.origin, 1, "mkdir", "first", int(time.time()) + 60))
        _refused(ErrorClass.PERMISSION_DENIED, "late: cancelled", session.push)
    assert _names(router) == ["first"]


def test_only_what_is_below_the_prefix_is_seen_or_changed(
    router: RouterProcess, gateway: Gateway, small: Gateway, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("secret")
    put(gateway, tmp_path / "f", "f")
    with Session(small) as session:
        session.mkdir("small")
        assert list(session.entries("small")) == []
        for path in ("", "f", "smaller"):
            _refused(ErrorClass.PERMISSION_DENIED, "only for what is below 'small'", partial(session.stat, path))
            _refused(ErrorClass.PERMISSION_DENIED, "only for", partial(_entries, session, path))
        _refused(ErrorClass.BAD_URL, "below the root", lambda: session.stat("small/../f"))
        session.rename("small", "elsewhere")
        _refused(ErrorClass.PERMISSION_DENIED, "only for", session.push)


def test_symbolic_links_are_shown_and_never_followed(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("theirs")
    (router.root / "out").symlink_to(tmp_path / "outside")
    os.mkfifo(router.root / "pipe")
    with Session(gateway) as session:
        assert {entry.name: entry.kind for entry in session.entries("")} == {"out": "link", "pipe": "other"}
        assert session.stat("out").kind == "link"
        for path in ("out", "out/file", "nowhere", "pipe"):
            _refused(ErrorClass.NOT_FOUND, path, partial(_entries, session, path))
        _refused(ErrorClass.NOT_FOUND, "out/file", lambda: session.stat("out/file"))


def test_long_listings_come_in_pages(router: RouterProcess, gateway: Gateway) -> None:
    names = {f"{number:04}{'x' * 200}" for number in range(2500)} | {os.fsdecode(b"caf\xe9\n")}
    (router.root / "d").mkdir()
    for name in names:
        (router.root / "d" / name).touch()
    with Session(gateway) as session:
        assert {entry.name for entry in session.entries("d")} == names
        next(session.entries("d"))
        assert session.stat("d").kind == "directory", "a listing that nobody read to its end is in nobody's way"


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [(0, -1), (0, 0), (0, 5), (7, -1), (BLOCK_BYTES - 3, 6), (BLOCK_BYTES, BLOCK_BYTES), (3 * BLOCK_BYTES, 10**9)],
)
def test_ranges(router: RouterProcess, gateway: Gateway, offset: int, size_bytes: int) -> None:
    content = os.urandom(2 * BLOCK_BYTES + 100)
    (router.root / "f").write_bytes(content)
    wanted = content[offset:] if size_bytes < 0 else content[offset : offset + size_bytes]
    assert b"".join(read(gateway, "f", offset, size_bytes)) == wanted


@contextlib.contextmanager
def _cut_at(block: int, meanwhile: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """The connection is lost when that block is waited for, once."""
    real, cuts, calls = Channel.receive_block, list[int](), itertools.count(1)

    def receive_block(channel: Channel, view: memoryview, *proof: Proof | None) -> tuple[int, int]:
        if next(calls) == block:
            cuts.append(block)
            meanwhile()
            channel.close()
        return real(channel, view, *proof)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "receive_block", receive_block)
        yield cuts


def test_a_get_goes_on_where_it_was(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    content = os.urandom(9 * BLOCK_BYTES + 5)
    (router.root / "f").write_bytes(content)
    seen: list[int] = []
    with _cut_at(5) as cuts:
        assert get(gateway, "f", tmp_path / "back", progress=seen.append) == len(content)
    assert (tmp_path / "back").read_bytes() == content
    assert cuts == [5]
    assert seen == sorted(set(seen)), "no block counts twice"
    assert seen[-1] == len(content)
    with _cut_at(2) as cuts:
        assert b"".join(read(gateway, "f", 100)) == content[100:]
    assert cuts == [2]


def test_two_versions_are_never_mixed(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    old, new = os.urandom(9 * BLOCK_BYTES), os.urandom(8 * BLOCK_BYTES)
    for name, content in (("old", old), ("new", new)):
        (tmp_path / name).write_bytes(content)
    put(gateway, tmp_path / "old", "versions")
    with _cut_at(5, lambda: put(gateway, tmp_path / "new", "versions")) as cuts:
        get(gateway, "versions", tmp_path / "back")
    assert cuts == [5]
    assert (tmp_path / "back").read_bytes() == new
    with Channel(gateway) as channel:
        channel.send(Get("versions", generation=1))
        _refused(ErrorClass.CONFLICT, "replaced", channel.receive)
    with Channel(gateway) as channel:
        channel.send(Get("versions", generation=2, blocks=1))
        found = channel.receive()
        assert isinstance(found, Found)
        assert found == Found(len(new), BLOCK_BYTES, 2, 0o644, found.manifest, found.digest)


def test_a_session_without_a_router_says_so(router: RouterProcess, gateway: Gateway) -> None:
    router.stop()
    with Session(dataclasses.replace(gateway, timeout_s=2)) as session:
        session.mkdir("d")
        _refused(ErrorClass.CONNECT_FAILED, "refused", session.push)


def test_the_example_of_the_document(
    router: RouterProcess, gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs/overlay/files.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.S)
    with tarfile.open(tmp_path / "results.tar", "w") as archive:
        archive.add(__file__, "events.root")
    size_bytes = (tmp_path / "results.tar").stat().st_size
    put(gateway, tmp_path / "results.tar", "alice/results.tar")
    here = {"gateway.example.org": "127.0.0.1", "9621": str(router.port)}
    here["/etc/condor/stageout-overlay.key"] = str(router.key_file("site"))
    for code in (first, second):
        for written, real in here.items():
            code = code.replace(written, real)
        exec(compile(code, "files.md", "exec"), {})
    assert capsys.readouterr().out == f"results.tar file {size_bytes}\n['events.root']\n"
    assert (router.root / "alice/run7/summary.txt").read_text() == "42 events\n"


def test_a_file_is_read_and_written_as_pythons_own(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    data, small = os.urandom(2 * BLOCK_BYTES + 77), tmp_path / "small"
    small.write_bytes(b"another version")
    with overlay.open(gateway, "d/f", "wb") as new:
        new.write(data)
        assert not (router.root / "d").exists(), "nothing is to be seen before it is whole"
    assert new.published is not None
    assert new.published.generation == 1
    with overlay.open(gateway, "d/f") as file:
        for offset, whence, count in ((5, 0, 9), (BLOCK_BYTES - 3, 0, 7), (-20, 2, 50), (-9, 1, 9), (0, 0, -1)):
            at = file.seek(offset, whence)
            assert file.read(count) == data[at:][: count if count >= 0 else None]
        file.seek(0)
        put(gateway, small, "d/f")
        with pytest.raises(TransferFailure) as caught:
            file.read()
        assert caught.value.kind is ErrorClass.CONFLICT
    with pytest.raises(KeyError), overlay.open(gateway, "d/g", "wb") as given_up:
        raise KeyError
    overlay.open(gateway, "d/h", "wb").write(b"never closed")
    gc.collect()
    assert [entry.name for entry in Session(gateway).entries("d")] == ["f"]
    assert given_up.closed
    for path, kind in (("d", ErrorClass.CONFLICT), ("d/g", ErrorClass.NOT_FOUND)):
        with pytest.raises(TransferFailure) as caught:
            overlay.open(gateway, path)
        assert caught.value.kind is kind
