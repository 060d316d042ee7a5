"""When a custodian's daemon is told of blocks that were passed and are on nobody's disk but the next hop's."""

from __future__ import annotations

from typing import Any

import pytest

from overlay_router.custodians import spooled
from overlay_router.custodians.spooled import Growth
from stageout.overlay.sending import Sending
from stageout.wire import blocks
from tests.unit.test_overlay_loans import CHECKSUM, FAR_TID, _lends
from tests.unit.test_overlay_ring import DIGEST, _sending, _Told


def _left_three(monkeypatch: pytest.MonkeyPatch) -> tuple[Growth, Sending, _Told]:
    """Three blocks are under way by a connection on loan."""
    monkeypatch.setattr(spooled, "_TELL_S", 1e9)
    told, sending = _Told(), _sending()
    growth = Growth({}, None, (), told)
    growth.follow(sending)
    lend: Any = _lends()
    growth.asked(lend)
    assert growth.lend(3, FAR_TID, CHECKSUM) is not None
    lend.heard({0: DIGEST, 1: DIGEST, 2: DIGEST})
    blocks.went(sending.table, [0, 1, 2], 7)
    blocks.staged(sending.table, [0])
    growth.heard()
    assert told.said == [([0], [])], "the first is told at once"
    return growth, sending, told


def test_passed_blocks_are_told_at_once_when_nothing_else_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    assert told.said[1:] == []
    blocks.staged(sending.table, [2])
    growth.heard()
    assert told.said[1:] == [([1, 2], [])]


def test_passed_blocks_are_told_together_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    monkeypatch.setattr(spooled, "_TELL_S", 0.0)
    blocks.staged(sending.table, [1])
    growth.heard()
    assert told.said[1:] == [([1], [])]


def test_passed_blocks_are_told_at_once_when_all_others_are_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more may be heard of the next hop, and the sender waits."""
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    assert told.said[1:] == [], "block 2 is nowhere yet"
    growth.arrived([(2, DIGEST)])
    assert told.said[1:] == [([1], [])]


def test_what_was_passed_and_not_told_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    growth.close()
    assert told.said[1:] == [([1], []), ([], [2])]


def test_what_is_passed_and_lost_before_it_was_told_is_only_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    growth, sending, told = _left_three(monkeypatch)
    blocks.staged(sending.table, [1])
    growth.heard()
    growth.lose()
    assert told.said[1:] == [([], [0, 1, 2])]
