"""Output that is deleted in the spool under a running manager: noticed at once, and nothing else is taken for that."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.core.states import State
from stageout.wire.custody import Action
from tests.unit.manager_site import Node, Site, made, run


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def _sandboxes(site: Site) -> Path:
    return site.base / "spool" / "sandboxes"


async def _paused(node: Node, job: str) -> str:
    """Output that waits for its owner. Returns its ticket."""
    facts = node.facts(job)
    receipt = await node.hand_off({f"copy://h/ok/{job}": b"x"}, facts)
    await node.confirm(receipt, facts=facts)
    await node.order(Action.PAUSE, facts)
    return receipt.ticket


def _problem(node: Node) -> str:
    return node.pipeline.housekeeping.facts()["SpoolProblem"]


def test_a_deleted_directory_of_all_sandboxes_is_noticed_while_the_manager_runs(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            for job in ("1.0", "2.0"):
                await _paused(node, job)
            shutil.rmtree(_sandboxes(site))
            await node.pipeline.run_housekeeping()
            for job in ("1.0", "2.0"):
                box = await node.until_state(State.LOST, node.facts(job))
                assert box.reason == "output was deleted in the spool while the manager ran"
            assert _problem(node) == "output was deleted in the spool, lately that of 2 runs"
            await _paused(node, "3.0")
            await node.pipeline.run_housekeeping()
            assert node.state(node.facts("3.0")) is State.CONFIRMED, "hand-offs go on"
            assert _sandboxes(site).stat().st_mode & 0o066 == 0

    run(story())
    (line,) = [record.message for record in caplog.records if record.message.startswith("spool-deleted ")]
    assert "keep cleaners away" in line


def test_one_deleted_directory_costs_one_sandbox(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            kept, gone = [await _paused(node, job) for job in ("1.0", "2.0")]
            shutil.rmtree(_sandboxes(site) / gone)
            await node.pipeline.run_housekeeping()
            at_risk, lost = node.pipeline.store.registry.bytes_at_risk, node.pipeline.store.lost_bytes
            assert lost == at_risk > 0, "one of two like sandboxes"
            await node.until_state(State.LOST, node.facts("2.0"))
            assert node.state(node.facts("1.0")) is State.CONFIRMED and (_sandboxes(site) / kept / "0").exists()

    run(story())


def test_a_spool_that_is_not_mounted_loses_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Below the place of the mount there may be nothing, or an older spool."""
    spool = site.base / "spool"

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await _paused(node, "1.0")
            spool.rename(site.base / "away")
            try:
                for below in ((), ("sandboxes",)):
                    spool.mkdir()
                    for name in below:
                        (spool / name).mkdir()
                    for _ in range(2):
                        await node.pipeline.housekeeping._find_deleted()
                    assert "is its filesystem mounted?" in _problem(node)
                    assert node.state() is State.CONFIRMED
                    shutil.rmtree(spool)
            finally:
                (site.base / "away").rename(spool)
            await node.pipeline.run_housekeeping()
            assert (_problem(node), node.state()) == ("", State.CONFIRMED)

    run(story())
    assert [record.message for record in caplog.records if record.message.startswith("spool-check-failed ")]


def test_output_that_was_delivered_is_not_missed(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"x"})
            await node.confirm(receipt)
            await node.until_state(State.RELEASED)
            await node.pipeline.run_housekeeping()
            assert (_problem(node), node.state()) == ("", State.RELEASED)

    run(story())
