"""Operations that expire while they are ordered, or while their end is recorded: each has one outcome, and none is
sent.

The router's thread for the disk ends what is late behind any call of those who deliver, and knows only what these
were doing when that call was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router.copying.copier import Copier, _Try
from overlay_router.custodians.forwarder import Forwarder
from overlay_router.custodians.pack_carrier import Answer
from overlay_router.custodians.spool import Key
from overlay_router.delivery.outflow import Outflow
from overlay_router.local.replies import Reply
from overlay_router.peers.keys import OwnCredential
from stageout.overlay.wire.messages import Packed
from stageout.overlay.wire.messages import Result as Told
from tests.in_loop import in_loop
from tests.unit.test_overlay_custodian import EXPIRES, ORIGIN, Spooling
from tests.unit.test_overlay_egress import Gate, _means, gate, home
from tests.unit.test_overlay_pack_custody import DONE, FILES, Delivering, pack, spooling

__all__ = ["gate", "home", "spooling"]
Expire = Callable[[Collection[Key]], "list[Reply]"]
MOST_CALLS = 4


class Disk:
    """Its thread, in which the end of what is late comes behind the call of that number.

    :param busy: what is being delivered. :ivar said: outcomes of what was late.
    """

    def __init__(self, expire: Expire, late: int) -> None:
        self._expire, self._calls_left = expire, late
        self.busy: Callable[[], Collection[Key]] = frozenset
        self.said: list[str] = []

    async def __call__(self, work: Callable[[], Any]) -> Any:
        busy, done = self.busy(), work()
        self._calls_left -= 1
        if self._calls_left == 0:
            for reply in self._expire(busy):
                message = reply.message
                assert isinstance(message, (Told, Packed))
                self.said += [message.outcome] if isinstance(message, Told) else message.outcomes
        return done


@pytest.mark.parametrize("late", range(1, MOST_CALLS))
def test_a_file_that_expires_while_it_is_ordered_is_not_sent(spooling: Spooling, late: int) -> None:
    spooling.take()
    spooling.clock.now_s = EXPIRES + 1.0
    disk, orders = Disk(spooling.one.expire, late), list[dict[str, Any]]()
    forwarder = in_loop(lambda: Forwarder(spooling.one, disk, lambda replies: None, OwnCredential(), 1, spooling.clock))
    forwarder._carrier = cast(Any, SimpleNamespace(is_running=True, write=orders.append))
    disk.busy = lambda: forwarder.busy
    asyncio.run(forwarder._begin())
    assert len(orders) + len(disk.said) == 1


@pytest.mark.parametrize("late", range(1, MOST_CALLS))
def test_a_pack_that_expires_while_it_is_ordered_is_not_sent(spooling: Spooling, late: int) -> None:
    spooling.one.packs.take([pack()])
    spooling.clock.now_s = EXPIRES + 1.0
    disk, delivering = Disk(spooling.one.packs.expire, late), Delivering(spooling)
    delivering.one._on_disk = disk
    disk.busy = lambda: delivering.one.busy
    assert len(delivering.step()) + bool(disk.said) == 1


@pytest.mark.parametrize("late", range(1, MOST_CALLS))
def test_a_pack_that_has_arrived_does_not_expire_while_that_is_recorded(spooling: Spooling, late: int) -> None:
    spooling.one.packs.take([pack(1), pack(11)])
    delivering = Delivering(spooling)
    delivering.step()
    spooling.clock.now_s = EXPIRES + 1.0
    disk = Disk(
        lambda busy: [one for one in spooling.one.packs.expire(busy) if cast(Packed, one.message).seq == 1], late
    )
    delivering.one._on_disk = disk
    disk.busy = lambda: delivering.one.busy
    arrived = Answer(delivering.number(1), [(one.outcome.value, "", 1, 0) for one in DONE])
    delivering.step(Answer(delivering.number(11), damaged=[0]), arrived)
    assert disk.said == []
    assert [one.message for one in delivering.told if isinstance(one.message, Packed)] == [
        Packed(ORIGIN, 1, (1,) * len(FILES))
    ]


@pytest.mark.parametrize("late", range(1, MOST_CALLS))
def test_what_expires_before_its_plugin_is_called_is_not_given_to_it(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    gate.put(1, "out/f")
    called: list[Any] = []

    async def carry_out(call: Any) -> None:
        called.append(call)

    disk = Disk(gate.one.expire, late)
    flow = in_loop(lambda: Outflow(gate.one, _means(tmp_path), disk, lambda replies: None, cast(Any, gate.clock)))
    monkeypatch.setattr(flow, "_carry_out", carry_out)
    monkeypatch.setattr(flow, "_table", SimpleNamespace(find=lambda path, scheme: object()))
    monkeypatch.setattr(flow, "_kit", lambda plugin, left_s: None)

    def ready(busy: Collection[Key]) -> Any:
        found = ready_(busy)
        gate.clock.now_s = EXPIRES + 1.0
        return found

    ready_ = gate.one.ready
    monkeypatch.setattr(gate.one, "ready", ready)

    async def run() -> None:
        await flow._begin()
        await asyncio.sleep(0)

    disk.busy = lambda: flow.busy
    asyncio.run(run())
    assert len(called) + len(disk.said) == 1


def test_a_copy_that_has_expired_is_not_carried_out() -> None:
    async def run() -> None:
        disk, copies = Disk(lambda busy: [], 0), SimpleNamespace(has=lambda commanded: False)
        copier = Copier(
            cast(Any, copies), cast(Any, None), disk, lambda replies: None, cast(Any, None), OwnCredential(), 1
        )
        one = _Try()
        await copier._try(cast(Any, SimpleNamespace(key=(ORIGIN, 1))), one)
        assert one.failures == 0

    asyncio.run(run())
