"""Owners share a node's spool: none fills it for all, names count, and only what can move keeps jobs away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from manager_site import Site, made, run
from test_pipeline import refusal

from sandbox_manager.intake.acceptance import Refusal
from stageout.core.states import State
from stageout.model.sandbox import NAME_BYTES
from stageout.wire.custody import Action
from tests.polling import until

_MB = 10**6


@pytest.fixture
def site() -> Iterator[Site]:
    with made({"STAGEOUT_SPOOL_QUOTA_MB": "10"}) as found:
        yield found


def of_bob(node: Any, job: str = "9.0") -> Any:
    return node.facts(job, owner="bob@test", user="bob", slot_name="slot1_9@ep", dslot_id=9)


def test_an_owner_has_half_of_the_spool_unless_the_node_says_otherwise(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            assert "of 5.0 MB (STAGEOUT_OWNER_QUOTA_MB)" in refusal(node, size_bytes=5 * _MB + 1)
            await node.hand_off({"copy://h/ok/a": b"x" * (4 * _MB)})
            assert "STAGEOUT_OWNER_QUOTA_MB" in refusal(node, size_bytes=_MB)
            assert not isinstance(node.offer(of_bob(node), ["copy://h/ok/a"], 4 * _MB), Refusal)
            node.pipeline.rules = replace(node.pipeline.rules, owner_quota_bytes=10 * _MB)
            assert refusal(node, size_bytes=_MB) == ""

    run(story())


def test_output_that_cannot_move_fills_its_owner_s_share_and_keeps_no_job_away(site: Site) -> None:
    site.knobs["STAGEOUT_OWNER_QUOTA_MB"] = "10"

    async def story() -> None:
        async with site.manager() as node:
            admission = node.pipeline.admission
            await node.hand_off({"copy://h/ok/z": b"x" * _MB}, node.facts("2.0"))
            assert admission.movable_bytes == 0, "nobody has confirmed it: it waits for its access point"
            receipt = await node.hand_off({"copy://h/refuse/a": b"x" * (8 * _MB)})
            site.flag("hold")
            await node.confirm(receipt)
            await node.until_state(State.FAILED)
            assert admission.movable_bytes == 0
            assert admission.used_bytes == 9 * _MB + 2 * NAME_BYTES
            offer = node.offer(of_bob(node), ["copy://h/ok/b"], 2 * _MB)
            assert isinstance(offer, Refusal) and "STAGEOUT_SPOOL_QUOTA_MB" in offer.reason
            await node.order(Action.RETRY)
            assert admission.movable_bytes == 8 * _MB + NAME_BYTES

    run(story())


def test_names_count_until_their_records_go(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            many = {f"copy://h/ok/{number}": b"" for number in range(1000)}
            await node.hand_off(many)
            admission = node.pipeline.admission
            assert admission.used_bytes == 1000 * NAME_BYTES
            urls = [f"copy://h/ok/x{number}" for number in range(1000)]
            assert "STAGEOUT_OWNER_QUOTA_MB" in refusal(node, urls=urls)
            await node.order(Action.CANCEL)
            await until(lambda: node.box().freed, lambda: node.box())
            assert admission.used_bytes == 1000 * NAME_BYTES, "the records are still there"
            await node.order(Action.FORGET)
            await until(lambda: node.box() is None, lambda: node.box())
            assert admission.used_bytes == 0

        async with site.manager(moving=False) as node:
            await node.hand_off(many, node.facts("2.0"))
        async with site.manager(moving=False) as node:
            assert node.pipeline.admission.used_bytes == 1000 * NAME_BYTES, "and after a restart"

    run(story())


def test_what_plugins_are_told_counts_too(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.hand_off({"copy://h/ok/a": b""}, job_ad="[ A = 1 ]", plugin_data="[ B = 1 ]")
            assert node.pipeline.admission.used_bytes == NAME_BYTES + 18

    run(story())


def test_a_run_has_some_hand_offs_only(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            for number in range(31):
                await node.hand_off({f"copy://h/ok/{number}": b""})
            promise = node.offer(node.facts(), ["copy://h/ok/a"])
            assert not isinstance(promise, Refusal)
            assert "has made 32 hand-offs" in refusal(node)
            node.pipeline.acceptance.unreserve(promise)
            assert refusal(node) == ""
            assert refusal(node, number=2) == "", "the next run begins anew"

    run(story())
