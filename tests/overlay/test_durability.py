"""Data that a router has acknowledged survive a power loss, as the system calls of real routers show."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import Packer, SmallPut
from stageout.overlay.wire.messages import BLOCK_BYTES
from stageout.testing.starter import installed
from tests.harness.destination import Destination
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.tracing import Trace, first

pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="watches system calls with strace")
_PLUGIN = Path(__file__).parents[2] / "plugins" / "stageout_curl_plugin"
_SYNCS = ("fsync", "fdatasync")


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
    named = first(calls, ("rename", "renameat", "renameat2"), r"/staging/\d+")
    assert first(calls, ("fsync",), r"/staging/\d+") < named < first(calls, ("fsync",), "/root/d", named)


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
    first(trace.calls(), (*_SYNCS, "syncfs"), "/root/d")


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
    assert first(calls, _SYNCS, r"/packs/[^/]+") < first(calls, _SYNCS, "/packs")


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
    assert first(calls, _SYNCS, r"/egress/\.stageout/staging/\d+") < first(calls, _SYNCS, r"/egress/\.stageout/staging")
