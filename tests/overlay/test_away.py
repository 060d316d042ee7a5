"""A root or spool that is away, or read-only: senders hear where that is and what to do, and go on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Deposit, put
from stageout.overlay.copying import state
from stageout.overlay.fetch import get
from stageout.overlay.key_file import read_key
from stageout.overlay.many import put_many
from stageout.overlay.operations import Session
from stageout.overlay.wire.messages import BLOCK_BYTES, Result
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit
from tests.overlay.loop_disk import loop_disk, needs_loop_disk


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(2 * BLOCK_BYTES + 7))
    return path


def gateway_of(router: RouterProcess, timeout_s: float = 20) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=timeout_s)


def refused(work: Callable[[], object], *words: str) -> None:
    with pytest.raises(TransferFailure, match=".*".join(re.escape(word) for word in words)) as caught:
        work()
    assert caught.value.kind is ErrorClass.SERVER_ERROR


def test_senders_hear_that_the_root_is_away_and_go_on_when_it_is_back(
    router: RouterProcess, gateway: Gateway, source: Path, tmp_path: Path
) -> None:
    put(gateway, source, "before")
    small = tmp_path / "small"
    small.write_bytes(b"small")
    away = router.root.rename(tmp_path / "away")
    router.root.mkdir()
    where = str(router.root), "is not there", "mount it"
    refused(lambda: put(gateway, source, "f"), *where)
    with Session(gateway) as session:
        session.rename("before", "after")
        working = threading.Thread(target=session.push)
        working.start()
        wait_until(lambda: "rename-batch-failed" in router.log, what="the rename to be refused for now")
        router.root.rmdir()
        away.rename(router.root)
        working.join(60)
        assert not working.is_alive()
        assert session.stat("after").kind == "file"
    put(gateway, source, "f")
    assert (router.root / "f").read_bytes() == source.read_bytes()


@needs_loop_disk
def test_a_root_that_becomes_read_only_is_read_on_and_senders_go_on_when_it_is_mended(
    tmp_path: Path, source: Path
) -> None:
    """As ext4 does by itself after an error; it comes back when it is mounted anew."""
    home = tmp_path / "router"
    small = tmp_path / "small"
    small.write_bytes(b"small")
    with loop_disk(tmp_path / "image", home / "root") as disk, RouterProcess(home) as router:
        put(gateway_of(router), source, "before")
        disk.fail()
        where = str(router.root), "read-only", "mount it for writing"
        refused(lambda: put(gateway_of(router), source, "f"), *where)
        ends: list[object] = []
        put_many(gateway_of(router, 1), [("small", small, "small")], lambda key, end: ends.append(end))
        assert isinstance(ends[0], TransferFailure)
        assert (ends[0].kind, "read-only" in ends[0].message) == (ErrorClass.SERVER_ERROR, True)
        get(gateway_of(router), "before", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == source.read_bytes()
        with Session(gateway_of(router)) as session:
            session.rename("before", "after")
            refused(session.push, "read-only", "mount it for writing")
            router.stop()
            disk.unmount()
            disk.mount()
            router.start()
            session.push()
        put(gateway_of(router), source, "f")
        assert (router.root / "f").read_bytes() == (router.root / "after").read_bytes() == source.read_bytes()


@needs_loop_disk
def test_a_put_hears_that_the_disk_became_read_only_in_the_middle(tmp_path: Path) -> None:
    home, source = tmp_path / "router", tmp_path / "large"
    source.write_bytes(os.urandom(40 * BLOCK_BYTES))
    with loop_disk(tmp_path / "image", home / "root") as disk, RouterProcess(home) as router:

        def fails(sent_bytes: int, once: list[int] = []) -> None:  # noqa: B006
            if sent_bytes > 4 * BLOCK_BYTES and not once:
                once.append(1)
                disk.fail()

        refused(lambda: put(gateway_of(router, 3), source, "f", progress=fails), "read-only", "mount it for writing")


def test_a_router_without_its_root_at_its_start_writes_nothing_there_and_goes_on_when_it_is_back(
    router: RouterProcess, gateway: Gateway, source: Path, tmp_path: Path
) -> None:
    """As a mount point looks whose filesystem is not mounted."""
    put(gateway, source, "before")
    router.stop()
    away = router.root.rename(tmp_path / "away")
    router.root.mkdir()
    verified = router.run("--verify")
    assert verified.returncode != 0
    assert f"{router.root} is not the directory" in verified.stderr
    starting = threading.Thread(target=router.start)
    starting.start()
    wait_until(lambda: "root-lost" in router.log, what="the router to say that its root is away")
    assert "mount it, or put it back" in router.log
    assert list(router.root.iterdir()) == []
    router.root.rmdir()
    away.rename(router.root)
    starting.join(60)
    assert router.log.count(" daemon-started ") == 2
    put(gateway_of(router), source, "f")
    get(gateway_of(router), "before", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert router.run("--verify").returncode == 0


def test_a_router_that_waits_for_its_root_has_the_keys_that_it_is_told_to_read_meanwhile(
    router: RouterProcess, source: Path, tmp_path: Path
) -> None:
    router.stop()
    away = router.root.rename(tmp_path / "away")
    router.root.mkdir()
    starting = threading.Thread(target=router.start)
    starting.start()
    wait_until(lambda: "root-lost" in router.log, what="the router to say that its root is away")
    keys = router.home / "keys"
    keys.write_text(keys.read_text().replace("small ", "later ", 1))
    os.kill(router.pid, signal.SIGHUP)
    router.root.rmdir()
    away.rename(router.root)
    starting.join(60)
    assert router.log.count(" daemon-started ") == 2
    later = Gateway("127.0.0.1", router.port, *read_key(router.key_file("later")), timeout_s=20)
    put(later, source, "small/f")
    assert (router.root / "small" / "f").read_bytes() == source.read_bytes()


def test_a_root_that_is_lost_for_good_is_replaced_as_the_router_says(
    router: RouterProcess, gateway: Gateway, source: Path
) -> None:
    put(gateway, source, "before")
    router.stop()
    shutil.rmtree(router.root)
    router.root.mkdir()
    starting = threading.Thread(target=router.start)
    starting.start()
    wait_until(lambda: "mkdir -p" in router.log, what="the router to say what to do")
    found = re.search(r"mkdir -p [^\"]*", router.log)
    assert found
    subprocess.run(found.group(), shell=True, check=True)
    starting.join(60)
    put(gateway_of(router), source, "f")
    assert (router.root / "f").read_bytes() == source.read_bytes()


def said(custodian: RouterProcess, given: Deposit) -> str:
    answer = state(gateway_of(custodian), given.origin)
    return answer.outcome if isinstance(answer, Result) else "custody"


@needs_loop_disk
def test_what_a_read_only_spool_holds_is_delivered_and_new_deposits_hear_why_they_are_not_taken(
    tmp_path: Path, router: RouterProcess, source: Path
) -> None:
    home, small = tmp_path / "custodian", tmp_path / "small"
    small.write_bytes(b"small")
    spool = home / "records/spool"
    with loop_disk(tmp_path / "image", spool) as disk, custodian_for(home, [router]) as custodian:
        router.stop()
        given = deposit(gateway_of(custodian), source, "held", terminal=router.address)
        ends: list[object] = []
        way = {"terminal": router.address, "custody": True}
        put_many(gateway_of(custodian), [("s", small, "small")], lambda key, end: ends.append(end), **way)  # type: ignore[arg-type]
        disk.only_read()
        where = str(spool), "read-only", "mount it for writing"
        refused(lambda: deposit(gateway_of(custodian), source, "new", terminal=router.address), *where)
        put_many(gateway_of(custodian, 1), [("t", small, "t")], lambda key, end: ends.append(end), **way)  # type: ignore[arg-type]
        assert isinstance(ends[1], TransferFailure)
        assert (ends[1].kind, "read-only" in ends[1].message) == (ErrorClass.SERVER_ERROR, True)
        router.start()
        wait_until(lambda: said(custodian, given) == "done", what="the delivery")
        wait_until((router.root / "small").exists, what="the delivery of the small file")
        assert (router.root / "held").read_bytes() == source.read_bytes()
        disk.write_again()
        deposit(gateway_of(custodian), source, "new", terminal=router.address)
        wait_until((router.root / "new").exists, what="the delivery of the next file")


@needs_loop_disk
def test_nothing_in_custody_is_lost_while_spool_and_records_take_no_writes(
    tmp_path: Path, router: RouterProcess, source: Path
) -> None:
    home = tmp_path / "custodian"
    with loop_disk(tmp_path / "image", home / "records") as disk, custodian_for(home, [router]) as custodian:
        router.stop()
        given = deposit(gateway_of(custodian), source, "held", terminal=router.address)
        disk.fail()
        refused(lambda: deposit(gateway_of(custodian), source, "new", terminal=router.address), "database")
        router.start()
        wait_until(lambda: "its records cannot be read" in custodian.log, what="a delivery that cannot be recorded")
        assert said(custodian, given) == "custody"
        assert not (router.root / "held").exists(), "it would not be known here that it was said"
        custodian.stop()
        disk.unmount()
        disk.mount()
        custodian.start()
        wait_until(lambda: said(custodian, given) == "done", what="the delivery")
        assert (router.root / "held").read_bytes() == source.read_bytes()
