"""Promises of the overlay (docs/developer/promises-tested.md) by each way to a router, as its users see them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool.waiting import wait_until
from tests.overlay.gate import Gate
from tests.overlay.http_site import Site, site
from tests.overlay.tracing import Trace, first
from tests.overlay.wires import WIRES, Wire

_MIB = 1 << 20
_OLD = b"the version before"

each_wire = pytest.mark.parametrize("way", WIRES, ids=lambda way: way.__name__.lower())


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path / "site") as found:
        yield found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(24 * _MIB + 7))
    return path


def _is_whole(here: Site, name: str, new: bytes) -> bool:
    """Whether the new version is there; else it is the one before."""
    found = (here.root / name).read_bytes()
    assert found in (_OLD, new), f"{len(found)} bytes that are no version"
    return found == new


@each_wire
def test_a_sender_that_dies_leaves_the_version_before(here: Site, source: Path, way: type[Wire]) -> None:
    """Complete and verified, or not at all."""
    (here.root / "f").write_bytes(_OLD)
    with Gate(here.router.port, 8 * _MIB) as gate, way(here, gate.port).begin("put", "/f", str(source)) as sending:
        assert gate.shut.wait(30)
        sending.kill()
        assert (here.root / "f").read_bytes() == _OLD
    assert not _is_whole(here, "f", source.read_bytes())
    assert way(here).run("put", "/f", str(source)) == ""
    assert _is_whole(here, "f", source.read_bytes())


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
@pytest.mark.parametrize(
    ("way", "step"),
    [pytest.param(way, step, id=f"{way.__name__.lower()}-{step}") for way in WIRES for step in way.steps],
)
def test_a_router_that_is_killed_has_one_version(
    tmp_path: Path, source: Path, way: type[Wire], step: str, when: str
) -> None:
    """The sender heard the truth, nothing is in between, and the same put works after the restart."""
    armed = tmp_path / "armed"
    with site(tmp_path / "site", {"STAGEOUT_FAULTS": f"{step}={when}@{armed}"}) as here:
        (here.root / "f").write_bytes(_OLD)
        armed.touch()
        with way(here).begin("put", "/f", str(source)) as sending:
            wait_until(lambda: not armed.exists(), what=step, timeout_s=30)
            here.router.wait_for_end()
            was_done = _is_whole(here, "f", source.read_bytes())
            here.router.start()
            sending.communicate(timeout=120)
        if was_done or not sending.returncode:
            assert _is_whole(here, "f", source.read_bytes())
        assert way(here).run("put", "/f", str(source)) == ""
        assert _is_whole(here, "f", source.read_bytes())
        here.router.stop()
        verified = here.router.run("--verify")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        here.router.start()


@each_wire
def test_names_change_as_they_are_told_to(here: Site, source: Path, tmp_path: Path, way: type[Wire]) -> None:
    wire = way(here)
    assert wire.run("mkdir", "/d") == ""
    assert wire.run("put", "/d/f", str(source)) == ""
    assert wire.run("mv", "/d/f", "/d/g") == ""
    assert wire.run("get", "/d/g", str(tmp_path / "back")) == ""
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert wire.run("get", "/d/f", str(tmp_path / "none")) != ""
    assert wire.run("rm", "/d/g") == ""
    assert [path.name for path in (here.root / "d").iterdir()] == []


@each_wire
def test_a_get_brings_a_whole_version_or_fails(here: Site, source: Path, tmp_path: Path, way: type[Wire]) -> None:
    """The file is replaced while somebody reads it."""
    data, new = source.read_bytes(), tmp_path / "new"
    new.write_bytes(os.urandom(len(data)))
    assert way(here).run("put", "/f", str(source)) == ""
    back = str(tmp_path / "back")
    with Gate(here.router.port, 8 * _MIB) as gate, way(here, gate.port).begin("get", "/f", back) as reading:
        assert gate.shut.wait(30)
        assert way(here).run("put", "/f", str(new)) == ""
        gate.open()
        reading.communicate(timeout=120)
    if not reading.returncode:
        assert (tmp_path / "back").read_bytes() in (data, new.read_bytes())
    assert way(here).run("get", "/f", str(tmp_path / "again")) == ""
    assert (tmp_path / "again").read_bytes() == new.read_bytes()


@each_wire
@pytest.mark.pool
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_a_full_disk_costs_nothing_that_is_there(tmp_path: Path, source: Path, way: type[Wire]) -> None:
    home = tmp_path / "site"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "small", str(home)], check=True)
    try:
        with site(home) as here:
            (here.root / "f").write_bytes(_OLD)
            (home / "ballast").write_bytes(bytes(20 * _MIB))
            assert way(here).run("put", "/f", str(source)) != ""
            assert (here.root / "f").read_bytes() == _OLD
            (home / "ballast").unlink()
            assert way(here).run("put", "/f", str(source)) == ""
            assert _is_whole(here, "f", source.read_bytes())
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


@each_wire
@pytest.mark.skipif(not shutil.which("strace"), reason="watches system calls with strace")
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, source: Path, way: type[Wire]) -> None:
    """Data, then the name, then the directory of the name."""
    trace = Trace(tmp_path)
    with site(tmp_path / "site") as here:
        here.router.stop()
        here.router.wrapper = trace.wrapper
        here.router.start()
        (here.root / "d").mkdir()
        assert way(here).run("put", "/d/f", str(source)) == ""
        assert (here.root / "d/f").exists()
    calls = trace.calls()
    named = first(calls, ("rename", "renameat", "renameat2"), r"/staging/\d+")
    assert first(calls, ("fsync", "fdatasync"), r"/staging/\d+") < named < first(calls, ("fsync",), "/root/d", named)
