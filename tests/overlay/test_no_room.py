"""A disk without room, for a moment, at any step: what was on its way goes on, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Deposit, put
from stageout.overlay.copying import state
from stageout.overlay.key_file import gateway_of
from stageout.overlay.operations import Session
from stageout.overlay.wire.messages import BLOCK_BYTES, Open, Opened, Result
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit

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


def test_who_waits_for_a_record_that_finds_no_room_hears_that(tmp_path: Path) -> None:
    """Its data are there, and the router is well: else nothing would say why it waits."""
    source, failures = tmp_path / "source", list[TransferFailure]()
    source.write_bytes(os.urandom(2 * BLOCK_BYTES + 7))
    with RouterProcess(tmp_path / "router", {"STAGEOUT_FAULTS": "overlay-stage=ENOSPC"}) as router:
        end = replace(_end(router), timeout_s=2)

        def fails() -> None:
            try:
                put(end, source, "f")
            except TransferFailure as failure:
                failures.append(failure)

        threading.Thread(target=fails, daemon=True).start()
        wait_until(lambda: failures, timeout_s=60, what="the put to hear what it waits for")
        assert (failures[0].kind, failures[0].server) == (ErrorClass.NO_SPACE_REMOTE, end.server)
        assert "the disk of this router is full" in failures[0].message


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


@contextlib.contextmanager
def _small_disk(place: Path, size_mib: int) -> Iterator[None]:
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "small", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(path: Path) -> None:
    """To the last byte."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.pool
def test_a_full_disk_under_the_records_does_not_keep_anybody_from_deleting(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(100))
    records = tmp_path / "router/records"
    with _small_disk(records, 12), RouterProcess(tmp_path / "router") as router:
        put(_end(router), tmp_path / "source", "f")
        _fill(records / "ballast")
        with Session(_end(router)) as session:
            session.delete("f")
            session.push()
        assert not (router.root / "f").exists()
        assert not any((router.root / ".stageout/trash").iterdir())


@pytest.mark.pool
def test_a_custodian_whose_disk_is_full_says_so_and_loses_nothing(tmp_path: Path) -> None:
    """The disk really is: of spool and database both."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * BLOCK_BYTES))
    records = tmp_path / "custodian/records"
    large = {"STAGEOUT_ROUTER_SPOOL_MB": "1000"}
    with _small_disk(records, 12), RouterProcess(tmp_path / "router") as router, contextlib.ExitStack() as more:
        custodian = more.enter_context(custodian_for(tmp_path / "custodian", [router], large))
        router.stop()
        given = deposit(_end(custodian), source, "kept", router.address)
        _fill(records / "ballast")
        custodian.kill()
        custodian.start()
        assert "start-write-failed" in custodian.log
        with pytest.raises(TransferFailure) as caught:
            deposit(_end(custodian), source, "refused", router.address)
        assert (caught.value.kind, caught.value.retry_after_s) == (ErrorClass.NO_SPACE_REMOTE, 5.0)
        router.start()
        wait_until(lambda: (router.root / "kept").exists(), what="the delivery from a full disk")
        assert (router.root / "kept").read_bytes() == source.read_bytes()
        (records / "ballast").unlink()
        wait_until(lambda: _said(custodian, given) == "done", what="the record of the delivery")
        deposit(_end(custodian), source, "refused", router.address)
        wait_until(lambda: (router.root / "refused").exists(), what="the other delivery")
        staging = records / "spool/.stageout/staging"
        wait_until(lambda: not any(staging.iterdir()), what="the spool to be empty")
        assert "task-failed" not in custodian.log


def _said(custodian: RouterProcess, given: Deposit) -> str:
    try:
        answer = state(_end(custodian), given.origin)
    except TransferFailure:  # nor can it answer everything while there is no room
        return ""
    return answer.outcome if isinstance(answer, Result) else "custody"
