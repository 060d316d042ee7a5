"""The disk of the spool is really full: nothing is taken, nothing is lost, and what is held makes room again."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_manager.custody.ledger import Ledger, LedgerError
from sandbox_manager.intake.acceptance import Refusal
from stageout.core.states import State
from stageout.wire.custody import Action
from tests.polling import until
from tests.pool.conftest import open_directory
from tests.unit.manager_site import Node, Site, made, run

# Not a pool, but root: the test mounts a filesystem of its own.
pytestmark = pytest.mark.pool

MIB = 1 << 20


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A node whose directories are all on a filesystem of 64 MiB."""
    with open_directory("disk") as disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", str(disk)], check=True)
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        try:
            with made({"STAGEOUT_SPOOL_QUOTA_MB": "1000"}) as found:
                yield found
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(site: Site) -> Path:
    """Write until not a byte is left, as a job does that has no limit."""
    path = site.base / "filler"
    with open(path, "ab", buffering=0) as stream:
        for chunk in (b"f" * MIB, b"f" * 4096):
            while True:
                try:
                    stream.write(chunk)
                except OSError as problem:
                    assert problem.errno == errno.ENOSPC
                    break
    assert os.statvfs(site.base).f_bavail == 0
    return path


def reserve(site: Site) -> Path:
    return site.base / "spool" / "ledger" / "reserve"


async def held_and_full(site: Site, node: Node) -> Path:
    """Twenty files in custody on a disk that is full."""
    await node.pipeline.run_housekeeping()
    assert reserve(site).exists()
    files = {f"copy://h/ok/{number}": bytes([number]) * 1000 for number in range(20)}
    receipt = await node.hand_off(files)
    filler = fill(site)
    await node.confirm(receipt)
    return filler


def test_what_is_held_is_delivered_and_nothing_more_is_taken_until_there_is_room(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            filler = await held_and_full(site, node)
            assert node.state() is State.CONFIRMED
            refused = node.offer(node.facts("2.0"), ["copy://h/ok/x"])
            assert isinstance(refused, Refusal)
            assert "the filesystem of the spool is full" in refused.reason
            moving = asyncio.ensure_future(node.pipeline.run())
            await node.until_state(State.RELEASED)
            moving.cancel()
            filler.unlink()
            await node.pipeline.run_housekeeping()
            assert reserve(site).exists()
            await node.hand_off({"copy://h/ok/x": b"x"}, node.facts("2.0"))

    run(story())
    for number in range(20):
        assert (site.base / "dest" / str(number)).read_bytes() == bytes([number]) * 1000


def test_a_cancelled_run_gives_its_room_back_although_the_disk_is_full(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            await held_and_full(site, node)
            await node.order(Action.CANCEL)
            assert node.state() is State.CANCELLED
            spool = site.base / "spool" / "sandboxes"
            await until(lambda: not list(spool.iterdir()), "the bytes to go")

    run(story())


def test_a_manager_starts_on_a_full_disk(site: Site) -> None:
    """The manager gives up its reserve, and sends. Without the reserve it cannot start, and is started again."""

    async def before() -> None:
        async with site.manager(moving=False) as node:
            receipts.append(await node.hand_off({"copy://h/ok/a": b"a" * 1000}))
            await node.pipeline.run_housekeeping()

    async def after() -> None:
        async with site.manager() as node:
            await node.confirm(*receipts)
            await node.until_state(State.RELEASED)

    receipts: list[object] = []
    run(before())
    assert reserve(site).exists()
    filler = fill(site)
    run(after())
    assert not reserve(site).exists()
    fill(site)
    with pytest.raises(LedgerError, match="condor_master starts the manager again") as raised:
        Ledger(site.base / "spool" / "ledger" / "ledger.sqlite")
    assert raised.value.is_temporary
    filler.unlink()
    Ledger(site.base / "spool" / "ledger" / "ledger.sqlite").close()


def test_without_anything_left_to_give_up_nothing_is_lost(site: Site) -> None:
    """The order fails and is not acknowledged; with room it is carried out, by the next manager too."""

    async def full() -> None:
        async with site.manager(moving=False) as node:
            receipts.append(await node.hand_off({"copy://h/ok/a": os.urandom(1000)}))
            fillers.append(fill(site))
            for number in range(2, 400):
                try:
                    await node.order(Action.PAUSE if number % 2 else Action.RESUME)
                except Exception:
                    break
            assert node.state() is State.ACCEPTED

    async def roomy() -> None:
        async with site.manager() as node:
            assert node.state() is State.ACCEPTED
            await node.order(Action.RESUME)
            await node.confirm(*receipts)
            await node.until_state(State.RELEASED)

    receipts: list[object] = []
    fillers: list[Path] = []
    run(full())
    fillers[0].unlink()
    run(roomy())
