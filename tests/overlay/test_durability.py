"""Data that a router has acknowledged survive a power loss, as the system calls of real routers show."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import Packer, SmallPut
from stageout.overlay.wire.messages import BLOCK_BYTES
from stageout.testing.starter import installed
from tests.harness.destination import Destination
from tests.harness.router import RouterProcess, custodian_for

pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="watches system calls with strace")
_PLUGIN = Path(__file__).parents[2] / "plugins" / "stageout_curl_plugin"
_CALL = re.compile(r"^(\w+)\((.*)\)\s+= 0$")
_UNFINISHED, _RESUMED = " <unfinished ...>", re.compile(r"^<\.\.\. \w+ resumed>")
_PATH = re.compile(r'\d+<([^>]*)>|"([^"]*)"')
_SYNCS = ("fsync", "fdatasync")


class Call(NamedTuple):
    """One system call that changed names or brought data to the disk: its name, and the paths in it."""

    name: str
    paths: tuple[str, ...]


class Trace:
    """Watches a router's system calls. :param home: where its notes lie."""

    def __init__(self, home: Path) -> None:
        self._path = home / "trace"
        calls = "trace=fsync,fdatasync,syncfs,rename,renameat,renameat2,link,linkat"
        # -D: the router is the child of its starter, who ends it by its pid.
        self.wrapper = ("strace", "-D", "-f", "-y", "-q", "-q", "-s", "4096", "-o", str(self._path), "-e", calls)

    def calls(self) -> list[Call]:
        """All that have returned without an error."""
        found = (_CALL.match(line) for line in _joined(self._path.read_text(errors="replace").splitlines()))
        return [Call(one[1], tuple(a or b for a, b in _PATH.findall(one[2]))) for one in found if one]


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Calls in the order of their ends: strace divides one during which another thread made a call."""
    begun: dict[str, str] = {}
    for line in lines:
        thread, call = line.split(maxsplit=1)
        if call.endswith(_UNFINISHED):
            begun[thread] = call[: -len(_UNFINISHED)]
        elif _RESUMED.match(call):
            yield begun.pop(thread) + _RESUMED.sub("", call)
        else:
            yield call


def _first(calls: Sequence[Call], names: Sequence[str], part: str, begin: int = 0) -> int:
    """Index of the first of these calls with a path that ends so."""
    found = [at for at in range(begin, len(calls)) if calls[at].name in names and _ends(calls[at], part)]
    assert found, f"none of {names} for {part}: {calls}"
    return found[0]


def _ends(call: Call, part: str) -> bool:
    return any(re.search(f"{part}$", path) for path in call.paths)


def _gateway(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=60)


def _watched(router: RouterProcess, trace: Trace) -> RouterProcess:
    router.wrapper = trace.wrapper
    return router


@pytest.fixture
def trace() -> Iterator[Trace]:
    with tempfile.TemporaryDirectory() as place:
        yield Trace(Path(place))


def _source(tmp_path: Path, size_bytes: int) -> Path:
    (tmp_path / "source").write_bytes(os.urandom(size_bytes))
    return tmp_path / "source"


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, trace: Trace) -> None:
    with _watched(RouterProcess(tmp_path / "router"), trace) as router:
        (router.root / "d").mkdir()
        put(_gateway(router), _source(tmp_path, 2 * BLOCK_BYTES + 5), "d/f")
    calls = trace.calls()
    named = _first(calls, ("rename", "renameat", "renameat2"), r"/staging/\d+")
    assert _first(calls, ("fsync",), r"/staging/\d+") < named < _first(calls, ("fsync",), "/root/d", named)


def test_name_that_a_crash_left_unsynced_is_on_the_disk_after_the_restart(tmp_path: Path, trace: Trace) -> None:
    armed = tmp_path / "armed"
    with RouterProcess(tmp_path / "router", {"STAGEOUT_FAULTS": f"overlay-publish=kill-after@{armed}"}) as router:
        (router.root / "d").mkdir()
        armed.touch()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(put, _gateway(router), _source(tmp_path, 10), "d/f")
            router.wait_for_end()
            _watched(router, trace).start()
            done.result()
    _first(trace.calls(), (*_SYNCS, "syncfs"), "/root/d")


def test_pack_in_custody_is_on_the_disk(tmp_path: Path, trace: Trace) -> None:
    with RouterProcess(tmp_path / "terminal") as terminal:
        away = terminal.address
    with RouterProcess(tmp_path / "terminal", port=terminal.port) as terminal:
        custodian = _watched(custodian_for(tmp_path / "custodian", [terminal]), trace)
        terminal.stop()  # the pack stays in custody
        with custodian:
            ends: dict[str, object] = {}
            with Packer(_gateway(custodian), ends.__setitem__, terminal=away, custody=True) as packer:
                packer.add("f", _source(tmp_path, 10), "to/f")
                packer.finish()
            assert isinstance(ends["f"], SmallPut)
    calls = trace.calls()
    assert _first(calls, _SYNCS, r"/packs/[^/]+") < _first(calls, _SYNCS, "/packs")


def test_pack_for_a_plugin_is_on_the_disk(tmp_path: Path, trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as place, Destination(Path(place)) as server:
        settings = {
            "STAGEOUT_ROUTER_EGRESS": f"/out={server.url('base')}",
            "FILETRANSFER_PLUGINS": str(installed(_PLUGIN, tmp_path)),
        }
        ends: dict[str, object] = {}
        with (
            _watched(RouterProcess(tmp_path / "gateway", settings), trace) as router,
            Packer(_gateway(router), ends.__setitem__) as packer,
        ):
            packer.add("f", _source(tmp_path, 10), "out/f")
            packer.finish()
        assert isinstance(ends["f"], SmallPut)
    calls = trace.calls()
    assert _first(calls, _SYNCS, r"/egress/\.stageout/staging/\d+") < _first(
        calls, _SYNCS, r"/egress/\.stageout/staging"
    )
