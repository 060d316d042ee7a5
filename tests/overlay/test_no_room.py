"""A disk without room, for a moment, at any step: what was on its way goes on, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway, gateway_of
from stageout.overlay.client import put
from stageout.overlay.operations import Session
from stageout.testing.pool.waiting import wait_until
from stageout.testing.router import RouterProcess, custodian_for
from stageout.wire.overlay import BLOCK_BYTES, Open, Opened

_STEPS = ("overlay-grant", "overlay-stage", "overlay-intent", "overlay-settle")
_IN_CUSTODY = ("overlay-grant", "overlay-stage", "custody-take", "custody-settle")


def _end(router: RouterProcess) -> Gateway:
    return gateway_of("127.0.0.1", router.port, router.key_file("site"), timeout_s=30)


def _arms(home: Path, steps: tuple[str, ...]) -> tuple[dict[str, str], list[Path]]:
    """Settings with which each step finds no room when its file is there, and these files."""
    files = [home / f"no-room-{step}" for step in steps]
    return {"STAGEOUT_FAULTS": " ".join(f"{step}=ENOSPC@{file}" for step, file in zip(steps, files))}, files


def _put_and_try(arm: Path, end: Gateway, source: Path, terminal: str = "") -> None:
    """A put while a step finds no room once; refused for lack of room, it is begun again."""
    arm.touch()
    try:
        put(end, source, arm.name, terminal=terminal)
    except TransferFailure as failure:
        assert failure.kind is ErrorClass.NO_SPACE_REMOTE
        put(end, source, arm.name, terminal=terminal)
    assert not arm.exists()


def test_a_put_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * BLOCK_BYTES + 7))
    settings, arms = _arms(tmp_path, _STEPS)
    with RouterProcess(tmp_path / "router", settings) as router:
        for arm in arms:
            _put_and_try(arm, _end(router), source)
            assert (router.root / arm.name).read_bytes() == source.read_bytes()
        arm.touch()
        with Session(_end(router)) as session:
            session.rename(arm.name, "renamed")
            session.push()
        assert not arm.exists()
        assert (router.root / "renamed").read_bytes() == source.read_bytes()
        assert "task-failed" not in router.log


def test_so_does_one_by_way_of_a_custodian(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * BLOCK_BYTES + 7))
    settings, arms = _arms(tmp_path, _IN_CUSTODY)
    with RouterProcess(tmp_path / "router") as router, contextlib.ExitStack() as more:
        custodian = more.enter_context(custodian_for(tmp_path / "custodian", [router], settings))
        for arm in arms:
            _put_and_try(arm, _end(custodian), source, router.address)
            assert (router.root / arm.name).read_bytes() == source.read_bytes()
        staging = custodian.home / "records/spool/.stageout/staging"
        wait_until(lambda: not any(staging.iterdir()), what="the spool to be empty")
        assert "task-failed" not in custodian.log


def test_what_nobody_goes_on_with_is_removed_although_the_disk_was_full_once(tmp_path: Path) -> None:
    settings, (arm,) = _arms(tmp_path, ("overlay-forget",))
    with RouterProcess(tmp_path / "router", settings) as router:
        expires = int(time.time()) + 1
        with Channel(_end(router)) as channel:
            channel.send(Open("0b" * 16, 1, "f", 10, BLOCK_BYTES, expires))
            assert isinstance(channel.receive(), Opened)
        staging = router.root / ".stageout/staging"
        assert list(staging.iterdir())
        router.stop()
        wait_until(lambda: time.time() > expires + 1, what="the end of its time while the router is down")
        arm.touch()
        router.start()
        wait_until(lambda: not arm.exists(), timeout_s=20, what="the step without room")
        wait_until(lambda: not any(staging.iterdir()), timeout_s=30, what="the second look")
