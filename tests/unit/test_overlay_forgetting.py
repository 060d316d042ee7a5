"""What is remembered of deliveries that failed goes with them: nothing grows, and nobody reads of what is over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from overlay_router.custodians.carrier import Answer
from overlay_router.custodians.pack_carrier import Answer as PackAnswer
from overlay_router.delivery.outflow import Outflow
from overlay_router.pauses import FORGET_EVERY_S
from stageout.core.errors import ErrorClass
from tests.unit import test_overlay_pack_custody as packs
from tests.unit import test_overlay_places as places
from tests.unit.test_overlay_custodian import EXPIRES, TERMINAL, Spooling
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
    flow = Outflow(gate.one, _means(tmp_path), on_disk, lambda replies: None, cast(Any, gate.clock))
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
