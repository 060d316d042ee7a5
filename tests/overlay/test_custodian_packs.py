"""Packs of small files by way of a custodian: each file once and whole, or said to be lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.copying import state
from stageout.overlay.finding import find
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import End, Packer, SmallPut
from stageout.overlay.wire.messages import Cancel, Custody, Low, Operation, Pack, Packed, Result, Status
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit

#: The others are planned in tests/unit/test_overlay_pack_custody.py, without a process.
_DEATHS = (
    "custody-pack-meet=kill-after",  # of the first pack that the terminal is to hear of
    "custody-pack-take=kill-after",
    "custody-pack-settle=kill-before",
    "custody-pack-withdraw=kill-after",
)


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("terminal")) as running:
        yield running


@pytest.fixture(scope="module")
def arming(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("arming")
    return {death: place / death for death in _DEATHS}


@pytest.fixture(scope="module")
def custodian(
    terminal: RouterProcess, arming: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterProcess]:
    faults = " ".join(f"{death}@{armed}" for death, armed in arming.items())
    with custodian_for(tmp_path_factory.mktemp("custodian"), [terminal], {"STAGEOUT_FAULTS": faults}) as running:
        yield running


@pytest.fixture
def gateway(custodian: RouterProcess) -> Gateway:
    return _gateway(custodian)


def _gateway(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=20)


class _Putting(threading.Thread):
    """Small files on their way, until all have ended."""

    def __init__(
        self, gateway: Gateway, terminal: RouterProcess, to: str, data: dict[str, bytes], place: Path, custody: bool
    ) -> None:
        super().__init__()
        self._packer = Packer(gateway, self._ended, terminal=terminal.address, custody=custody)
        self._to, self._data, self._place = to, data, place
        self.ends: dict[str, End] = {}
        self.start()

    def run(self) -> None:
        with self._packer as packer:
            for name, data in self._data.items():
                (self._place / name).write_bytes(data)
                packer.add(name, self._place / name, f"{self._to}/{name}")
            packer.finish()

    def _ended(self, name: str, end: End) -> None:
        self.ends[name] = end

    def done(self) -> dict[str, End]:
        self.join(60)
        assert not self.is_alive()
        return self.ends


def _data(count: int, size_bytes: int = 3000) -> dict[str, bytes]:
    return {f"f{number}": os.urandom(size_bytes) for number in range(count)}


def _there(terminal: RouterProcess, to: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (terminal.root / to).iterdir()}


def _spooled(custodian: RouterProcess) -> list[Path]:
    return list((custodian.home / "records/spool/.stageout/packs").iterdir())


def _freed(custodian: RouterProcess) -> None:
    wait_until(lambda: not _spooled(custodian), what="the spool to be empty", describe=lambda: custodian.log[-3000:])


def _in_custody(channel: Channel) -> int:
    said = channel.receive()
    assert isinstance(said, Custody), said
    return said.seq


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)


def test_killed_at_any_step_each_file_arrives_once(
    terminal: RouterProcess, custodian: RouterProcess, gateway: Gateway, arming: dict[str, Path], tmp_path: Path
) -> None:
    for number, (death, armed) in enumerate(arming.items()):
        data, to = _data(400), f"killed{number}"
        withdraws = "withdraw" in death
        if withdraws:
            terminal.stop()
        armed.touch()
        putting = _Putting(gateway, terminal, to, data, tmp_path, False)
        if withdraws:
            whole = wait_until(lambda: [one for one in _spooled(custodian) if one.stat().st_size > 900_000],
                               what="a pack in custody")  # fmt: skip
            _flip(whole[0], 900_000)
        wait_until(lambda arm=armed: not arm.exists(), what=death, timeout_s=60)  # type: ignore[misc]
        custodian.wait_for_end()
        if withdraws:
            terminal.start()
        custodian.start()
        ends = putting.done()
        assert {name for name, end in ends.items() if isinstance(end, SmallPut) and end.generation == 1} == set(data)
        assert _there(terminal, to) == data
        _freed(custodian)
    assert "task-failed" not in custodian.log


def test_what_was_freed_arrives_or_is_said_to_be_lost(
    terminal: RouterProcess, custodian: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    data = _data(20)
    terminal.stop()
    ends = _Putting(gateway, terminal, "freed", data, tmp_path, True).done()
    given = {name: end for name, end in ends.items() if isinstance(end, SmallPut) and end.origin}
    assert set(given) == set(data)
    first = given["f0"]
    assert isinstance(state(gateway, first.origin), Custody)
    custodian.kill()
    (spooled,) = _spooled(custodian)
    _flip(spooled, 16 * 20 + 3 * 3000 + 7)
    custodian.start()
    terminal.start()
    _freed(custodian)
    assert _there(terminal, "freed") == {name: one for name, one in data.items() if name != "f3"}
    with Channel(gateway) as channel:
        channel.send(Status(first.origin, given["f3"].seq))
        lost = channel.receive()
        channel.send(Status(first.origin, first.seq, len(data)))
        all_of_them = channel.receive()
    assert isinstance(lost, Result)
    assert (lost.outcome, lost.reason) == ("lost", "the copy in the custodian's spool was damaged")
    assert isinstance(all_of_them, Packed)
    assert (all_of_them.failed, all_of_them.outcomes) == ((3,), ("lost",))


@pytest.mark.parametrize("restarts", [False, True])
def test_small_files_are_looked_for_at_a_terminal_that_has_lost_its_records(tmp_path: Path, restarts: bool) -> None:
    armed, data = tmp_path / "armed", _data(5)
    running = RouterProcess(tmp_path / "terminal", {"STAGEOUT_FAULTS": f"overlay-pack-settle=kill-after@{armed}"})
    with running as terminal, custodian_for(tmp_path / "custodian", [terminal]) as custodian:
        armed.touch()
        putting = _Putting(_gateway(custodian), terminal, "lost", data, tmp_path, False)
        terminal.wait_for_end()
        if restarts:
            custodian.kill()
            custodian.start()
        for path in (terminal.home / "records").glob("*.sqlite*"):
            path.unlink()
        there = terminal.root / "lost"
        inodes = {path.name: path.stat().st_ino for path in there.iterdir()}
        (there / "f1").write_bytes(b"newer, of somebody else")
        os.utime(there / "f1", (time.time() + 60,) * 2)
        (there / "f2").unlink()
        (there / "f3").write_bytes(b"older")
        os.utime(there / "f3", (1000, 1000))
        terminal.start()
        ends = putting.done()
        refused = ends.pop("f1")
        assert isinstance(refused, TransferFailure)
        assert (refused.kind, "a file that is newer has this name" in str(refused)) == (ErrorClass.CONFLICT, True)
        assert all(isinstance(end, SmallPut) for end in ends.values()), ends
        assert _there(terminal, "lost") == {**data, "f1": b"newer, of somebody else"}
        assert [(there / name).stat().st_ino == inodes[name] for name in ("f0", "f4")] == [True, True]
        _freed(custodian)


def test_later_changes_of_names_come_after_the_pack(
    terminal: RouterProcess, custodian: RouterProcess, gateway: Gateway
) -> None:
    origin, expires = os.urandom(16).hex(), int(time.time()) + 1000
    terminal.stop()
    with Channel(gateway) as channel:
        names = tuple(f"ordered/{name}" for name in ("a", "b", "c"))
        channel.send(Low(origin, 0))
        data = [b"first", b"second", b"third"]
        pack = Pack(origin, 1, expires, names, tuple(map(len, data)), (0o644,) * 3, "", terminal=terminal.address)
        channel.send_pack(pack, [channel.digest(one) for one in data], data)
        channel.send(Cancel(origin, 3))
        assert [_in_custody(channel), _in_custody(channel)] == [1, 3], "whoever is quicker"
        channel.send(Operation(origin, 4, "rename", "ordered/a", expires, target="ordered/b", after=(1, 2),
                               terminal=terminal.address))  # fmt: skip
        assert _in_custody(channel) == 4
        terminal.start()
        packed, renamed = channel.receive(), channel.receive()
    assert isinstance(packed, Packed)
    assert (packed.generations, packed.failed, packed.outcomes) == ((1, 1, 0), (2,), ("cancelled",))
    assert isinstance(renamed, Result)
    assert renamed.outcome == "done", renamed
    assert _there(terminal, "ordered") == {"b": b"first"}


def test_a_pack_that_may_not_be_deposited_is_refused(
    terminal: RouterProcess, custodian: RouterProcess, tmp_path: Path
) -> None:
    key = read_key(custodian.key_file("small"))
    gateway = Gateway("127.0.0.1", custodian.port, *key, timeout_s=20)
    (end,) = _Putting(gateway, terminal, "elsewhere", _data(1), tmp_path, False).done().values()
    assert isinstance(end, TransferFailure)
    assert "only for what is below 'small'" in end.message
    (end,) = _Putting(_gateway(terminal), custodian, "elsewhere", _data(1), tmp_path, False).done().values()
    assert isinstance(end, TransferFailure)
    assert "takes nothing into custody" in end.message


def test_a_directory_goes_through_with_all_that_is_in_it(
    terminal: RouterProcess, custodian: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "small").write_bytes(b"small")
    (tree / "large").write_bytes(os.urandom(100_000))
    put = ["put", "-r", str(tree), f"overlay://{terminal.address}/whole", "--key", str(custodian.key_file("site"))]
    put += ["--through", custodian.address]
    assert main(put) == 0, capsys.readouterr().err
    assert {path.name for path in (terminal.root / "whole").iterdir()} == {"empty", "small", "large"}
    (tree / "hollow/in").mkdir(parents=True)
    (tree / "small").write_bytes(b"other")
    (tree / "second").write_bytes(b"second")
    capsys.readouterr()
    assert main([*put, "--custody"]) == 0
    asked = [line.partition("stageout ")[2].split() for line in capsys.readouterr().out.splitlines() if "ask" in line]
    assert len(asked) == 3
    for words in asked:
        wait_until(lambda words=words: main([*words, "--key", put[5]]) == 0, what="the delivery")  # type: ignore[misc]
    assert "2 done" in capsys.readouterr().out
    assert (terminal.root / "whole/small").read_bytes() == b"other"
    assert (terminal.root / "whole/hollow/in").is_dir()


def test_a_pack_passes_two_custodians_and_each_keeps_it_until_it_is_there(
    terminal: RouterProcess, custodian: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one knows nothing of the terminal; it leads to the second one all the same."""
    data = _data(5)
    terminal.stop()
    place = tmp_path / "first"
    shown = {"STAGEOUT_ROUTER_KEY": str(place / "carrier.key"), "STAGEOUT_ROUTER_NEIGHBOURS": custodian.address}
    with custodian_for(place, [custodian], {**shown, "STAGEOUT_ROUTER_INTERVAL": "1"}) as first:
        packer_ends: dict[str, End] = {}
        with Packer(
            _gateway(first), packer_ends.__setitem__, terminal=f"{custodian.address},{terminal.address}", custody=True
        ) as packer:
            for name, content in data.items():
                (tmp_path / name).write_bytes(content)
                packer.add(name, tmp_path / name, f"chained/{name}")
            packer.finish()
        wait_until(lambda: _spooled(custodian), what="the second custodian to have it")
        assert len(_spooled(first)) == 1
        back = str(tmp_path / "back")
        url, key = f"overlay://{terminal.address}/chained", ["--key", str(custodian.key_file("site"))]
        through = ["--through", first.address, "--stale-ok"]
        assert main(["get", f"{url}/f1", back, *key, *through]) == 0
        assert Path(back).read_bytes() == data["f1"]
        assert f"{first.address} has a version" in capsys.readouterr().out
        (tmp_path / "f9").write_bytes(b"by the second one alone")
        deposit(_gateway(custodian), tmp_path / "f9", "chained/f9", terminal.address)
        wait_until(lambda: main(["get", f"{url}/f9", back, *key, *through]) == 0, what="the second one to be known")
        assert Path(back).read_bytes() == b"by the second one alone"
        assert f"{custodian.address} has a version" in capsys.readouterr().out
        unwanted = packer_ends.pop("f2")
        assert isinstance(unwanted, SmallPut)
        with Channel(_gateway(first)) as channel:
            channel.send(Cancel(unwanted.origin, unwanted.seq))
            assert _in_custody(channel) == unwanted.seq
        second = _gateway(custodian)
        wait_until(lambda: find(second, terminal.address, "chained/f2") is None, what="the second one to hear it")
        custodian.kill()
        custodian.start()
        terminal.start()
        _freed(first)
        _freed(custodian)
        assert main(["get", f"{url}/none", back, *key, *through]) == 1
        said = capsys.readouterr().err
        assert "nothing of it at" in said
        assert first.address in said
        assert custodian.address in said
    wait_until(lambda: (terminal.root / "chained/f9").exists(), what="the one that went straight to the second")
    data["f9"] = b"by the second one alone"
    assert _there(terminal, "chained") == {name: data[name] for name in [*packer_ends, "f9"]}
