"""The records of failed deliveries go with them: nothing grows, and nobody reads of deliveries that are over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from overlay_router.custodians.carrier import Answer
from overlay_router.custodians.pack_carrier import Answer as PackAnswer
from overlay_router.custodians.said import ASKS_S
from overlay_router.delivery.outflow import Outflow
from overlay_router.pauses import FORGET_EVERY_S
from overlay_router.rules.lots import LEASE_S
from stageout.core.errors import ErrorClass
from tests.in_loop import in_loop
from tests.unit import test_overlay_pack_custody as packs
from tests.unit import test_overlay_places as places
from tests.unit.test_overlay_custodian import EXPIRES, ORIGIN, TERMINAL, Spooling, coming
from tests.unit.test_overlay_egress import Gate, _means, gate, home
from tests.unit.test_overlay_pack_custody import pack, spooling

__all__ = ["gate", "home", "spooling"]


@pytest.mark.parametrize("kind", [ErrorClass.CONNECT_FAILED, ErrorClass.SERVER_BUSY])
def test_of_files_that_have_ended_nothing_stays(spooling: Spooling, kind: ErrorClass) -> None:
    spooling.take(1)
    delivering = places.Delivering(spooling)
    delivering.begin()
    failed = Answer(delivering.orders[0], failure="not now", code=kind.code)
    asyncio.run(delivering.one._answered(failed))
    spooling.clock.now_s += FORGET_EVERY_S
    delivering.one._most = 0  # it is not begun again meanwhile
    delivering.begin()
    assert delivering.one.problems == {TERMINAL: "not now"}
    assert len(delivering.one._pauses) == 1
    spooling.clock.now_s = EXPIRES + 1.0
    assert spooling.one.expire(frozenset())
    delivering.begin()
    assert (delivering.one.problems, delivering.one._pauses) == ({}, {})


def test_a_router_that_is_there_again_is_not_waited_for(spooling: Spooling) -> None:
    spooling.take(1)
    delivering = places.Delivering(spooling)
    delivering.begin()
    failed = Answer(delivering.orders[0], failure="away", code=ErrorClass.CONNECT_FAILED.code)
    asyncio.run(delivering.one._answered(failed))
    delivering.begin()
    assert len(delivering.orders) == 1
    delivering.one.reached(TERMINAL)
    delivering.begin()
    assert len(delivering.orders) == 2


def test_of_packs_that_have_ended_nothing_stays(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    delivering = packs.Delivering(spooling)
    delivering.step()
    delivering.step(PackAnswer(delivering.number(1), failure="not now", code=ErrorClass.CONNECT_FAILED.code))
    assert len(delivering.one.problems) == len(delivering.one._away) == 1
    spooling.clock.now_s = EXPIRES + 1.0
    assert spooling.one.expire(frozenset())
    delivering.step()
    assert (delivering.one.problems, delivering.one._away, delivering.one._pauses) == ({}, {}, {})


def test_of_what_plugins_could_not_deliver_nothing_stays(gate: Gate, tmp_path: Path) -> None:
    async def on_disk(work: Any) -> Any:
        return work()

    gate.put(1, "out/f")
    flow = in_loop(lambda: Outflow(gate.one, _means(tmp_path), on_disk, lambda replies: None, cast(Any, gate.clock)))
    (held,) = gate.one.held()
    target = gate.one.targets.find("out/f")
    assert target is not None
    for what in (held.key, target.url):
        flow._pause(target, what, 1e6, "not now")
    gate.clock.now_s += FORGET_EVERY_S
    asyncio.run(flow._begin())
    assert len(flow.problems) == 1
    assert len(flow._pauses) == 2
    gate.clock.now_s = EXPIRES + 1.0
    assert gate.one.expire(frozenset())
    asyncio.run(flow._begin())
    assert (flow.problems, flow._pauses) == ({}, {})


def test_what_was_to_be_sent_early_and_never_came_is_not_remembered(spooling: Spooling) -> None:
    """There was no place for it while its sender was there."""
    delivering = places.Delivering(spooling)
    delivering.one._most = 0
    tid = coming(spooling, 1)
    delivering.one.opened(tid)
    delivering.begin()
    assert [*delivering.one._early] == [tid]
    spooling.clock.now_s += LEASE_S + FORGET_EVERY_S
    spooling.one.expire(())
    delivering.begin()
    assert delivering.one._early == {}


def test_an_order_whose_operation_has_its_end_is_stopped(spooling: Spooling) -> None:
    """Behind its next hop, whose clock is wrong, it would wait for ever, and never be called expired."""
    spooling.take(1)
    delivering = places.Delivering(spooling)
    delivering.begin()
    key = (ORIGIN, 1)
    spooling.clock.now_s = EXPIRES + ASKS_S + 1.0
    assert spooling.one.expire(delivering.one.busy) == []
    spooling.clock.now_s += ASKS_S
    assert len(spooling.one.expire(delivering.one.busy)) == 1
    assert key in delivering.one.busy
    delivering.begin()
    assert delivering.stopped == delivering.orders


def test_who_hears_that_it_has_expired_hears_what_was_in_the_way(spooling: Spooling) -> None:
    spooling.spool.size_bytes = 1000
    spooling.take(1)
    spooling.one.packs.take([pack(11)])
    spooling.clock.now_s = EXPIRES + 1.0
    found = [reply.message for reply in spooling.one.expire(frozenset(), {TERMINAL: "nobody listens"})]
    assert [str(message).count("in time: nobody listens") for message in found] == [1, len(packs.FILES)]
