"""Keys that are taken away: their open connections end with them, at the routers where they hold and on the way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.key_file import read_key
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Get, Open, Opened, Result, Staged, Status
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, relay

_ORIGIN = "0a" * 16


@pytest.fixture
def between(tmp_path: Path, router: RouterProcess) -> Iterator[RouterProcess]:
    with relay(tmp_path / "between", [router]) as running:
        yield running


def _gateway(router: RouterProcess, name: str) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file(name)), timeout_s=60)


def _change(router: RouterProcess, change: Callable[[str], str]) -> None:
    """Have the lines of the keys file read as they are now."""
    before, keys = router.log.count(" configuration-reloaded"), router.home / "keys"
    keys.write_text("".join(map(change, keys.read_text().splitlines(keepends=True))))
    os.kill(router.pid, signal.SIGHUP)
    wait_until(lambda: router.log.count(" configuration-reloaded") > before, what="the keys to be read again")


def _without(name: str) -> Callable[[str], str]:
    return lambda line: "" if line.startswith(f"{name} ") else line


def _has_ended(channel: Channel) -> bool:
    with pytest.raises(TransferFailure) as caught:
        while channel.has_more(30):
            channel.receive()
        raise AssertionError("it goes on")
    return caught.value.kind in (ErrorClass.CONNECTION_LOST, ErrorClass.SERVER_BUSY, ErrorClass.PERMISSION_DENIED)


def _goes_on(channel: Channel) -> bool:
    channel.send(Status(_ORIGIN, 7))
    return channel.receive() == Result(_ORIGIN, 7, "unknown")


def _carrying(router: RouterProcess, control: Channel, data: Channel) -> int:
    """Have a block of a file sent; the number of its transfer."""
    control.send(Open(_ORIGIN, 1, "small/f", 4 * BLOCK_BYTES, BLOCK_BYTES, int(time.time()) + 600))
    opened = control.receive()
    assert isinstance(opened, Opened), opened
    data.send(Attach(opened.tid))
    data.send_block(opened.tid, 0, memoryview(bytes(BLOCK_BYTES)))
    assert isinstance(control.receive(), Staged)
    return opened.tid


def test_a_key_that_is_removed_loses_its_open_connections(router: RouterProcess) -> None:
    small = _gateway(router, "small")
    (router.root / "small").mkdir()
    (router.root / "small/there").write_bytes(b"x")
    with Channel(small) as control, Channel(small) as data, Channel(small) as early, Channel(small) as reading:
        _carrying(router, control, data)
        reading.send(Get("small/there"))
        reading.receive()
        reading.receive_block(memoryview(bytearray(BLOCK_BYTES)))  # another GET may follow
        with Channel(_gateway(router, "site")) as other:
            assert _goes_on(other)
            _change(router, _without("small"))
            assert all(map(_has_ended, (control, data, early, reading)))
            assert _goes_on(other), "others hear nothing of it"
    assert "key-withdrawn key=small" in router.log
    with pytest.raises(TransferFailure, match="no key of the name 'small'"):
        Channel(small)


def test_a_key_that_may_less_from_now_on_connects_anew(router: RouterProcess) -> None:
    with Channel(_gateway(router, "small")) as control, Channel(_gateway(router, "small")) as data:
        _carrying(router, control, data)
        _change(router, lambda line: line.replace(" small\n", " elsewhere\n"))
        assert _has_ended(control)
        assert _has_ended(data)
    with Channel(_gateway(router, "small")) as control:
        control.send(Open(_ORIGIN, 2, "small/f", 1, BLOCK_BYTES, int(time.time()) + 600))
        assert "only for what is below 'elsewhere'" in getattr(control.receive(), "reason", "")


def test_what_a_relay_passes_on_for_a_key_ends_with_it(router: RouterProcess, between: RouterProcess) -> None:
    site, way = _gateway(router, "site"), (between.address,)
    with Channel(site, way) as control, Channel(site, way) as data:
        _carrying(router, control, data)
        _change(between, _without("site"))
        assert _has_ended(control)
        assert _has_ended(data)
