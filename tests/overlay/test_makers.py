"""Files of a large batch made by processes of their own: as one alone would make them, whichever of them dies when."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from overlay_router.local import maker, makers
from overlay_router.local.destination import Destination
from overlay_router.local.makers import MANY, Heard, Makers
from overlay_router.local.store import Store
from overlay_router.local.tree import Tree
from stageout.overlay.channel import Gateway
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import Packer, SmallPut
from stageout.overlay.wire import messages
from stageout.overlay.wire.packs import PackedFile
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.unit.test_overlay_destination import ORIGIN, PEER, Router
from tests.unit.test_overlay_packs import arrived, execute, leftovers

FILES = {f"d{number % 9}/f{number}": os.urandom(number % 300).hex().encode() for number in range(2 * MANY)}


class Beside(Router):
    """A destination with processes that make its files."""

    def open(self) -> None:
        self.store = self._owned.enter_context(closing(Store(self.path)))
        self.tree = self._owned.enter_context(closing(Tree(self.root)))
        self.makers = Makers(2, self.root)
        self.place = Destination(self.store, self.tree, lambda: self.now, self.makers)

    def close(self) -> None:
        self.place.close()
        super().close()

    def wait(self) -> None:
        wait_until(lambda: self.makers.crew() is not None, what="processes that make files")


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    monkeypatch.setattr(makers, "_AGAIN_S", 0.0)
    made = Beside(tmp_path / "beside")
    made.wait()
    yield made
    made.close()


def _count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files they were given, each time."""
    real, given = makers.Crew.write, list[int]()

    def write(crew: makers.Crew, files: list[PackedFile]) -> list[int]:
        given.append(len(files))
        return real(crew, files)

    monkeypatch.setattr(makers.Crew, "write", write)
    return given


def _check(router: Beside) -> None:
    """All is there, and nothing else."""
    assert {path: text for path, text in router.content().items() if text != "/"} == {
        path: data.decode() for path, data in FILES.items()
    }
    assert (leftovers(router), router.store.pack_intents()) == ([], [])


def _send(gateway: Gateway, folder: Path, into: str) -> None:
    ends: dict[str, object] = {}
    with Packer(gateway, ends.__setitem__) as packer:
        for name in FILES:
            assert packer.add(name, folder / name, f"{into}/{name}")
        packer.finish()
    assert {type(end) for end in ends.values()} == {SmallPut}


def test_they_make_what_one_alone_makes(router: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file is refused, replaced, or one of them has no directory."""
    alone = Router(tmp_path / "alone")
    others = {
        "d1/sub": b"",
        "file/x": b"",
        "new/" + "x" * 300 + "/f": b"",
        "new/good": b"good",
        "x" * 300: b"",
        "d0/f0": b"1",
    }
    for place in (router, alone):
        (place.root / "d1/sub").mkdir(parents=True)
        (place.root / "file").write_text("file")
        execute(place, arrived(1, {"d0/f0": b"old", "d5/f5": b"old"}))
    packs = [arrived(3, {**FILES, **others}, mode=0o640), arrived(1000, {"other/f": b"other"}, mode=0o666)]
    written = _count(monkeypatch)
    told = execute(router, *packs)
    assert sum(written) == len(FILES) + len(others)
    assert told == execute(alone, *packs)
    assert len(told[0].failed) == 4
    assert router.content() == alone.content()
    assert {path.stat().st_mode & 0o777 for path in router.root.rglob("f*") if path.is_file()} >= {0o640, 0o666}
    assert leftovers(router) == []
    alone.close()


def test_names_that_depend_on_each_other_are_made_in_order(router: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    written = _count(monkeypatch)
    packs = arrived(1, FILES), arrived(1, {"d0/f0": b"newer", "d0/f0/x": b""}, origin="0b" * 16)
    told = execute(router, *packs)
    assert (written, told[1].generations, told[1].reasons) == ([], (2, 0), ("conflict",))
    assert router.content()["d0/f0"] == "newer"


@pytest.mark.parametrize("answers", [1, 6])
def test_one_that_dies_loses_no_file(router: Beside, answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While data are written, and while names are given."""
    real, heard = makers._Maker.answer, list[makers._Maker]()

    def answer(one: makers._Maker) -> Heard:
        heard.append(one)
        if len(heard) == answers + 1:
            os.kill(one.pid, signal.SIGKILL)
            os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        return real(one)

    monkeypatch.setattr(makers._Maker, "answer", answer)
    (told,) = execute(router, arrived(1, FILES))
    assert len(heard) > answers
    assert told == messages.Packed(ORIGIN, 1, (1,) * len(FILES))
    _check(router)
    router.wait()
    assert execute(router, arrived(1, FILES)) == [told], "others have taken their place"


@pytest.mark.parametrize("stopped", [1, 2])
def test_one_that_stands_still_holds_up_nobody(router: Beside, stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, and only then it is decided what became of its files."""
    monkeypatch.setattr(makers, "_SLOW_S", 0.3)
    written, said = _count(monkeypatch), dict[str, str]()
    monkeypatch.setattr(makers.log, "error", lambda event, **facts: said.update({event: str(facts.get("pids"))}))
    for one in router.makers._all[:stopped]:
        os.kill(one.pid, signal.SIGSTOP)
    (told,) = execute(router, arrived(1, FILES))
    assert (written[0], told) == (len(FILES), messages.Packed(ORIGIN, 1, (1,) * len(FILES)))
    assert ":T" in said["makers-stalled"], "who stopped it need not be waited for"
    _check(router)


def test_one_that_waits_for_the_disk_is_waited_for_and_that_is_said(
    router: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending it would not make it faster: nothing can be decided before it has ended."""
    real, waits, said = makers.readable, [makers._SLOW_S, 2 * makers._SLOW_S], list[str]()

    def readable(numbers: Iterable[int], within_s: float) -> list[int]:
        if waits[:1] == [within_s]:
            del waits[0]
            return []
        return real(numbers, within_s)

    monkeypatch.setattr(makers, "readable", readable)
    monkeypatch.setattr(makers.log, "warn", lambda event, **facts: said.append(event))
    written = _count(monkeypatch)
    (told,) = execute(router, arrived(1, FILES))
    assert told == messages.Packed(ORIGIN, 1, (1,) * len(FILES))
    assert (written[0], said) == (len(FILES), ["makers-slowed"] * 2)


def test_orders_that_nobody_hears_are_an_end(router: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(makers, "_SILENT_S", 0.3)
    router.makers.end()
    router.wait()
    one = router.makers._all[0]
    os.kill(one.pid, signal.SIGSTOP)
    with pytest.raises(makers.MakerDied):
        while True:
            one._say((makers.NAME, 0, ["x" * 4000] * 64))


def test_a_root_that_was_moved_is_the_one_that_files_arrive_in(router: Beside) -> None:
    """No process begins in the directory that has its name now."""
    moved = router.root.rename(router.root.with_name("moved"))
    router.root.mkdir()
    one = makers._Maker(router.place._small._place, router.root)
    try:
        with pytest.raises(makers.MakerDied):
            wait_until(one.is_ready, what="a process that makes files, or its end")
    finally:
        one.close()
    execute(router, arrived(1, FILES))
    assert {name: (moved / name).read_bytes() for name in FILES} == FILES


def test_without_shared_memory_there_are_none(router: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python may have been built without it."""
    router.makers.end()
    monkeypatch.delattr(os, "memfd_create")
    assert execute(router, arrived(1, FILES)) == [messages.Packed(ORIGIN, 1, (1,) * len(FILES))]


def test_what_is_gone_already_needs_no_cleaning(router: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that begins takes back itself all that it tries out."""
    real = os.unlink

    def unlink(name: str, dir_fd: int) -> None:
        real(name, dir_fd=dir_fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    (router.root / ".stageout/packs/probe1").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        router.place._small._clean()
    assert leftovers(router) == []


def test_what_cannot_be_forgotten_is_the_end_of_a_process(router: Beside) -> None:
    """An answer that nobody waits for would be taken for the next one."""
    place = os.open(router.root / ".stageout/packs", os.O_RDONLY)
    one = maker.Maker(place, router.tree, memoryview(bytearray(b"data")))
    one.write(0, [4], [0o600])
    os.close(one._hidden._open[0])
    with pytest.raises(OSError):
        one.answer(maker.FORGET)
    os.close(place)


@pytest.mark.parametrize("step", ["write", "give_names"])
def test_a_full_disk_is_said_and_asked_again(router: Beside, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data cannot be written; or no name is said to have been given, although all were."""
    real, whole = makers._Maker.answer, getattr(makers.Crew, step)

    def full(crew: makers.Crew, *what: object) -> object:
        patch.setattr(makers._Maker, "answer", lambda one: (real(one)[0], errno.ENOSPC))
        return whole(crew, *what)

    with monkeypatch.context() as patch:
        patch.setattr(makers.Crew, step, full)
        (reply,) = router.place.pack([arrived(1, FILES)])
    done = messages.Packed(ORIGIN, 1, (1,) * len(FILES))
    assert (reply.to, reply.message) == (PEER, messages.NoSpace(ORIGIN, 1, 5) if step == "write" else done)
    assert execute(router, arrived(1, FILES)) == [done]
    _check(router)


def test_a_router_works_with_them(tmp_path: Path) -> None:
    """One is killed, and then the router."""
    for name, data in FILES.items():
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_bytes(data)
    with RouterProcess(tmp_path / "router") as router:
        gateway = Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=20)
        _send(gateway, tmp_path / "from", "first")
        wait_until(lambda: len(router.makers()) == 2, what="processes that make files")
        os.kill(router.makers()[0], signal.SIGKILL)
        _send(gateway, tmp_path / "from", "second")
        router.kill()
        router.start()
        _send(gateway, tmp_path / "from", "third")
        for into in ("first", "second", "third"):
            assert {name: (router.root / into / name).read_bytes() for name in FILES} == FILES
        assert not any((router.root / ".stageout/packs").iterdir())
