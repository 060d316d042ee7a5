"""When the carrier lends a connection to who receives, and when it has it back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from stageout.overlay.channel import Channel
from stageout.overlay.way import Way
from stageout.overlay.wire.messages import BLOCK_BYTES, Open
from tests.unit.test_overlay_loans import _Channel
from tests.unit.test_overlay_ring import _sending


class _Loan:
    """One that is back when it was recalled, or was waited for so often. :param left: what has left by each wait."""

    def __init__(self, left: Sequence[Collection[int]]) -> None:
        self._coming, self.waits_s = list(left), list[float]()
        self.was_recalled = False

    def __enter__(self) -> _Loan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.recall()

    @property
    def is_back(self) -> bool:
        return self.was_recalled or not self._coming

    def recall(self) -> None:
        self.was_recalled = True

    def wait(self, within_s: float) -> Collection[int]:
        self.waits_s.append(within_s)
        return self._coming.pop(0)

    def rest(self) -> Collection[int]:
        return ()


class _Lending:
    """A route with connections that carry blocks, and somebody who would send by them."""

    def __init__(self, connections: int, loan: _Loan) -> None:
        self.sending, self.loan, self.control = _sending(), loan, cast(Any, object())
        self.way = Way(self.sending, (), False)
        self.way.control = self.control
        self.channels = [cast(Any, _Channel()) for _ in range(connections)]
        self.way._channels = set(self.channels)
        self.lends = 0
        cargo = cast(Any, self.sending.cargo)
        cargo.lend, cargo.ask = self._lend, lambda: Open("0" * 32, 1, "f", 4 * BLOCK_BYTES, BLOCK_BYTES, 99)

    def _lend(self, channel: Channel, tid: int) -> _Loan:
        self.lends += 1
        return self.loan

    def lend(self, place: int) -> bool:
        return self.way._lend(self.control, self.channels[place], self.sending.carrier(self.way))


def test_one_by_which_nothing_leaves_is_looked_at_ever_more_seldom() -> None:
    loan = _Loan([*[()] * 9, [0], ()])
    assert _Lending(2, loan).lend(0)
    idle, busy = loan.waits_s[:10], loan.waits_s[10:]
    assert idle == sorted(idle) and idle[-1] == 0.5
    assert busy[0] == idle[0]


def test_one_by_which_nothing_leaves_comes_back_where_blocks_wait_for_it() -> None:
    lending = _Lending(2, loan := _Loan([()] * 99))
    lending.sending.arrived([0])
    assert lending.lend(0)
    assert loan.was_recalled
    assert len(loan.waits_s) < 10
    assert not lending.lend(0), "blocks wait: nothing is lent again at once"


@pytest.mark.parametrize("connections", [1, 2, 3])
def test_one_connection_is_never_lent(connections: int) -> None:
    """However many there are: fewer than were allowed, where few blocks are left or some could not be made."""
    lending = _Lending(connections, _Loan([()]))
    lending.way._lent = set(lending.channels[1:])
    assert not lending.lend(0)
    assert not lending.lends


def test_the_last_one_comes_back_where_all_others_have_ended() -> None:
    lending = _Lending(2, loan := _Loan([(), [0], *[()] * 99]))
    lending.loan.__dict__["wait"] = lambda within_s: (lending.way._channels.discard(lending.channels[1]), ())[1]
    assert lending.lend(0)
    assert loan.was_recalled
