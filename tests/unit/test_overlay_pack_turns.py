"""Packs in custody: whose turn it is after a restart, an expiry, a gap."""

from __future__ import annotations

import pytest

from overlay_router.custodians import pack_custody
from overlay_router.custodians.pack_carrier import Answer
from stageout.core.errors import ErrorClass
from tests.unit.test_overlay_custodian import Spooling
from tests.unit.test_overlay_destination import ORIGIN
from tests.unit.test_overlay_pack_custody import DONE, Delivering, _seqs, pack, spooling

__all__ = ["spooling"]


def test_a_clock_that_was_set_back_does_not_order_versions(spooling: Spooling) -> None:
    spooling.clock.now_s = 50.0
    spooling.one.packs.take([pack(1)])
    spooling.clock.now_s = 20.0
    spooling.one.packs.take([pack(11, after=(1,))])
    spooling.restart()
    assert Delivering(spooling).step() == [(1, False)]


def test_what_expired_while_a_terminal_was_away_holds_up_nobody(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_custody, "_EXPIRE_AT_ONCE", 3)
    spooling.spool.size_bytes = 10**6
    seqs = _seqs(5)
    spooling.one.packs.take([pack(seq, expires=100) for seq in seqs])
    delivering = Delivering(spooling)
    delivering.step()
    away = ErrorClass.CONNECT_FAILED.code
    delivering.step(*(Answer(delivering.number(seq), failure="away", code=away) for seq in seqs))
    spooling.clock.now_s = 200.0
    assert [len(spooling.one.packs.expire(())) for _ in range(3)] == [3, 2, 0], "a part at a time"
    spooling.one.packs.take([pack(101)])
    assert delivering.step() == [(101, False)]


def test_what_has_arrived_behind_a_gap_takes_little_memory(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_custody, "_MOST_AHEAD", 2)
    spooling.spool.size_bytes = 10**6
    spooling.one.packs.take([pack(seq) for seq in (1, 4, 7, 10, 13)])
    first, *others = spooling.one.packs.held()
    spooling.one.packs.settle([(held, DONE) for held in others])
    done = spooling.one.packs._done[ORIGIN]
    assert done.ahead == {4: 7, 7: 10}
    spooling.one.packs.settle([(first, DONE)])
    assert (done.next, done.ahead) == (10, {})


def test_a_router_that_is_there_again_is_not_waited_for(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(1)])
    delivering = Delivering(spooling)
    delivering.step()
    away = Answer(delivering.number(1), failure="away", code=ErrorClass.CONNECT_FAILED.code)
    assert delivering.step(away) == []
    (held,) = spooling.one.packs.held()
    delivering.one.reached("another:1")
    assert delivering.step() == []
    delivering.one.reached(held.terminal)
    assert delivering.step() == [(1, False)]
