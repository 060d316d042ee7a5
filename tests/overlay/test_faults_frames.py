"""Faults that the protocol of frames still has. Its removal, or a mend, is noticed here: then the test goes, too.

The same faults over HTTP have tests in the other files of this name.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Deposit, put
from stageout.overlay.copying import state
from stageout.overlay.key_file import read_key
from stageout.overlay.wire.messages import BLOCK_BYTES, Cancel, Open, Opened, Result
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit

#: A refused deposit is tried again by then.
_AGAIN_S = 20


def _gateway(router: RouterProcess, name: str = "site") -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file(name)), timeout_s=20)


@pytest.mark.xfail(strict=True, reason="19: a cancel of a transfer without data has no answer at its terminal")
def test_every_cancel_is_answered(router: RouterProcess) -> None:
    with Channel(_gateway(router)) as channel:
        channel.send(Open("19" * 16, 1, "f", BLOCK_BYTES, BLOCK_BYTES, int(time.time()) + 600))
        assert isinstance(channel.receive(), Opened)
        channel.send(Cancel("19" * 16, 1))
        assert channel.has_more(5)


@contextmanager
def _small_disk(place: Path) -> Iterator[None]:
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "small", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.pool
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
@pytest.mark.xfail(strict=True, reason="18: a transfer without a byte takes all the room until it expires, for days")
def test_a_transfer_without_data_takes_no_room_from_others(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(20 * BLOCK_BYTES))
    with _small_disk(tmp_path / "router"), RouterProcess(tmp_path / "router") as router:
        with Channel(_gateway(router)) as channel:
            sizes = [size * BLOCK_BYTES for size in (60, 55, 50, 45)]
            for seq, size_bytes in enumerate(sizes, 1):
                channel.send(Open("18" * 16, seq, "f", size_bytes, BLOCK_BYTES, int(time.time()) + 6 * 86400))
                if isinstance(channel.receive(), Opened):
                    break
            else:
                raise AssertionError("the disk is smaller than it should be")
        put(_gateway(router, "small"), tmp_path / "source", "small/f")


def _outcome(custodian: RouterProcess, given: Deposit) -> str:
    answer = state(_gateway(custodian), given.origin)
    return answer.outcome if isinstance(answer, Result) else ""


@contextmanager
def _refused(tmp_path: Path, expires_after_s: float) -> Iterator[tuple[RouterProcess, RouterProcess, Deposit]]:
    """Terminal, custodian, and a deposit that the terminal has refused: a directory has that name."""
    (tmp_path / "source").write_bytes(b"the only copy")
    with RouterProcess(tmp_path / "terminal") as terminal:
        settings = {"STAGEOUT_ROUTER_KEY": str(terminal.key_file("small"))}
        with custodian_for(tmp_path / "custodian", [terminal], settings) as custodian:
            given = deposit(
                _gateway(custodian), tmp_path / "source", "f", terminal.address, expires_after_s=expires_after_s
            )
            wait_until(lambda: _outcome(custodian, given) == "failed", what="the refusal")
            yield terminal, custodian, given


@pytest.mark.xfail(strict=True, reason="22: custody that its terminal has refused is never tried again")
def test_refused_custody_is_tried_again_when_rights_change(tmp_path: Path) -> None:
    with _refused(tmp_path, 3600) as (terminal, _, _):
        keys = terminal.home / "keys"
        keys.write_text(re.sub(r"^(small \S+) small$", r"\1 /", keys.read_text(), flags=re.M))
        terminal.reload()
        wait_until((terminal.root / "f").exists, what="the delivery", timeout_s=_AGAIN_S)


def test_the_end_of_an_only_copy_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with _refused(tmp_path, 8) as (_, custodian, given):
        wait_until(lambda: time.time() > given.expires + 1, what="its expiry")
        custodian.stop()
        custodian.start()
        packs = custodian.home / "records/spool/.stageout/packs"
        staging = custodian.home / "records/spool/.stageout/staging"
        wait_until(lambda: not [*packs.iterdir(), *staging.iterdir()], what="the spool to be empty", timeout_s=60)
        assert [line for line in custodian.log.splitlines() if " ERROR " in line and "path=f" in line]
