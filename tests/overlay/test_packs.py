"""Small files through a real router: each arrives once and whole, whoever dies."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import packs
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.helpers import MOST
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import End, Packer, SmallPut
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_PACK_BYTES, MAX_TAKEN_BYTES
from tests.harness.router import RouterProcess
from tests.overlay.between import Between

Ends = dict[str, End]
Meanwhile = Callable[[int], object]


def _make(folder: Path, count: int, size_bytes: int) -> dict[str, bytes]:
    folder.mkdir()
    files = {f"d{number % 7}/f{number}": os.urandom(size_bytes) for number in range(count)}
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return files


def _send(
    gateway: Gateway, folder: Path, names: list[str], meanwhile: Meanwhile = lambda n: None, most_connections: int = 1
) -> Ends:
    ends: Ends = {}
    with Packer(gateway, ends.__setitem__, most_connections=most_connections) as packer:
        for number, name in enumerate(names):
            if not packer.add(name, folder / name, f"to/{name}"):
                ends[name] = TransferFailure(ErrorClass.TOO_LARGE, "not for a pack")
            meanwhile(number)
        packer.finish()
    return ends


def _there(router: RouterProcess) -> dict[str, bytes]:
    place = router.root / "to"
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_many_small_files_arrive_although_the_router_is_killed(
    router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    files = _make(tmp_path / "from", 500, 9000)

    def kill(number: int) -> None:
        if number == 300:
            router.kill()
            router.start()

    ends = _send(gateway, tmp_path / "from", list(files), kill)
    assert {name for name, end in ends.items() if isinstance(end, SmallPut)} == set(files)
    assert {end.generation for end in ends.values() if isinstance(end, SmallPut)} == {1}, "each executed once"
    assert _there(router) == files
    assert not any((router.root / ".stageout/packs").iterdir())


def test_larger_files_arrive_beside_small_ones_although_the_router_is_killed(
    router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    """Each in a pack of its own; the router makes small ones beside them."""
    files = {**_make(tmp_path / "from", 200, 3000), "last": b"last"}
    for number in range(12):
        files[f"d{number % 3}/large{number}"] = os.urandom(MAX_PACK_BYTES + number * 250_000)
    for name, data in files.items():
        (tmp_path / "from" / name).write_bytes(data)
    names = sorted(files, key=lambda name: hash(name))

    def kill(number: int) -> None:
        if number == 150:
            router.kill()
            router.start()

    ends = _send(gateway, tmp_path / "from", names, kill)
    assert {name for name, end in ends.items() if isinstance(end, SmallPut)} == set(files)
    assert {end.generation for end in ends.values() if isinstance(end, SmallPut)} == {1}, "each executed once"
    assert _there(router) == files
    assert not any((router.root / ".stageout/packs").iterdir())


@pytest.mark.parametrize("cut_at", [-1, 700])
def test_several_connections_over_a_long_way(
    router: RouterProcess, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int
) -> None:
    """All of them are lost, perhaps, while packs are under way."""
    monkeypatch.setattr(packs, "_FAR_S", 0.0)
    files = _make(tmp_path / "from", 1000, 9000)
    with Between(router.port) as between:

        def cut(number: int) -> None:
            if number == cut_at:
                between.cut()

        far = dataclasses.replace(gateway, port=between.port)
        ends = _send(far, tmp_path / "from", list(files), cut, most_connections=24)
        assert between.connections >= 1 + MOST
    assert {name for name, end in ends.items() if isinstance(end, SmallPut)} == set(files)
    assert {end.generation for end in ends.values() if isinstance(end, SmallPut)} == {1}, "each executed once"
    assert _there(router) == files


def test_the_biggest_the_empty_and_the_same_name_again(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    files = {
        "big": os.urandom(MAX_TAKEN_BYTES),
        "more": os.urandom(MAX_FILE_BYTES + 1),
        "empty": b"",
        os.fsdecode(b"caf\xe9\n"): b"x",
        "n" * 255: b"long",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o640)
    ends = _send(gateway, tmp_path, [*files, "big"])
    assert _there(router) == files
    assert (router.root / "to/big").stat().st_mode & 0o777 == 0o640
    assert isinstance(ends["big"], SmallPut)
    assert ends["big"].generation == 2
    with Channel(gateway) as channel:
        assert ends["big"].digest == channel.digest(files["big"]).hex()


def test_what_cannot_be_sent_fails_alone(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "good").write_text("good")
    (tmp_path / "large").write_bytes(bytes(MAX_TAKEN_BYTES + 1))
    (tmp_path / "pp").write_text("where a directory is")
    (router.root / "to/pp").mkdir(parents=True)
    ends = _send(gateway, tmp_path, ["good", "none", "large", "pp"])
    kinds = {name: end.kind for name, end in ends.items() if isinstance(end, TransferFailure)}
    assert kinds == {
        "none": ErrorClass.LOCAL_FILE,
        "large": ErrorClass.TOO_LARGE,
        "pp": ErrorClass.CONFLICT,
    }
    assert _there(router) == {"good": b"good"}


def test_only_below_the_prefix_and_only_with_a_router(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("f")
    small = Gateway("127.0.0.1", router.port, *read_key(router.key_file("small")), timeout_s=20)
    (end,) = _send(small, tmp_path, ["f"]).values()
    assert isinstance(end, TransferFailure)
    assert end.kind is ErrorClass.PERMISSION_DENIED
    assert "only for what is below 'small'" in end.message
    assert not (router.root / "to").exists()
    router.stop()
    with pytest.raises(TransferFailure, match="refused"):
        _send(dataclasses.replace(gateway, timeout_s=1), tmp_path, ["f"])


def test_a_router_that_lost_its_records_is_not_sent_what_it_has(tmp_path: Path) -> None:
    armed, names = tmp_path / "armed", [f"d0/f{number}" for number in range(0, 35, 7)]
    files = _make(tmp_path / "from", 35, 100)
    settings = {"STAGEOUT_FAULTS": f"overlay-pack-settle=kill-after@{armed}"}
    with RouterProcess(tmp_path / "router", settings) as router:
        gateway = Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=60)
        armed.touch()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(_send, gateway, tmp_path / "from", names)
            router.wait_for_end()
            for path in (router.home / "records").glob("*.sqlite*"):
                path.unlink()
            there = router.root / "to/d0"
            kept = {name: (there / name).stat().st_ino for name in ("f0", "f28")}
            (there / "f7").write_bytes(b"newer, of somebody else")
            os.utime(there / "f7", (time.time() + 60,) * 2)
            (there / "f14").unlink()
            (there / "f21").write_bytes(b"older")
            os.utime(there / "f21", (1000, 1000))
            router.start()
            ends = sending.result(60)
        newer = ends.pop("d0/f7")
        assert isinstance(newer, TransferFailure)
        assert (newer.kind, "a file that is newer has this name" in str(newer)) == (ErrorClass.CONFLICT, True)
        assert all(isinstance(end, SmallPut) for end in ends.values()), ends
        assert _there(router) == {**{name: files[name] for name in names}, "d0/f7": b"newer, of somebody else"}
        assert {name: (there / name).stat().st_ino for name in kept} == kept
