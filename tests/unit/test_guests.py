"""Clients of a socket are bounded for each user and in all, cannot take root's place, and fill no log."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from sandbox_manager import guests
from sandbox_manager.guests import Full, Guests, Lines


def test_root_keeps_its_places_when_others_have_taken_theirs() -> None:
    all_guests = Guests(most=3, most_of_user=2, reserved={0})
    with ExitStack() as held:
        for uid in (7, 7, 8):
            held.enter_context(all_guests.seat(uid))
        for uid in (7, 9):
            with pytest.raises(Full, match="too many connections"), all_guests.seat(uid):
                pass
        held.enter_context(all_guests.seat(0))
    with all_guests.seat(9):
        pass


def test_memory_is_bounded_for_each_user_and_for_all_and_comes_back() -> None:
    all_guests = Guests(9, 9, most_bytes=100, most_bytes_of_user=60)
    with all_guests.seat(7) as one, all_guests.seat(7) as two, all_guests.seat(8) as other:
        one.take(40)
        with pytest.raises(Full, match="files of uid 7"):
            two.take(21)
        two.take(20)
        with pytest.raises(Full, match="too many files on offer"):
            other.take(41)
        other.take(40)
    with all_guests.seat(7) as again:
        again.take(60)


def test_a_flood_of_one_user_is_a_few_lines_and_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(guests.log, "event", lambda name, level, **facts: written.append((name, facts)))
    monkeypatch.setattr(guests, "_INTERVAL_S", 0.05)

    async def flood() -> None:
        lines = Lines("refused")
        for _ in range(1000):
            lines.add(7, 70, reason="no")
        lines.add(8, 80, reason="another")
        while not any(name == "refused-more" for name, _ in written):
            await asyncio.sleep(0.01)

    asyncio.run(flood())
    assert [facts["uid"] for name, facts in written if name == "refused"] == [7] * 5 + [8]
    assert [facts for name, facts in written if name == "refused-more"] == [{"uid": 7, "count": 995, "within_s": 0}]
