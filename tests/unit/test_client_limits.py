"""Clients of a socket are bounded for each user and in all, cannot take root's place, and fill no log."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from sandbox_manager.intake import client_limits
from sandbox_manager.intake.client_limits import ClientLimits, Full, ThrottledLog
from tests.polling import until


def test_root_keeps_its_places_when_others_have_taken_theirs() -> None:
    limits = ClientLimits(most=3, most_of_user=2, reserved={0})
    with ExitStack() as held:
        for uid in (7, 7, 8):
            held.enter_context(limits.admit(uid))
        for uid in (7, 9):
            with pytest.raises(Full, match="too many connections"), limits.admit(uid):
                pass
        held.enter_context(limits.admit(0))
    with limits.admit(9):
        pass


def test_memory_is_bounded_for_each_user_and_for_all_and_comes_back() -> None:
    limits = ClientLimits(9, 9, most_bytes=100, most_bytes_of_user=60)
    with limits.admit(7) as one, limits.admit(7) as two, limits.admit(8) as other:
        one.use_memory(40)
        with pytest.raises(Full, match="files of uid 7"):
            two.use_memory(21)
        two.use_memory(20)
        with pytest.raises(Full, match="too many files on offer"):
            other.use_memory(41)
        other.use_memory(40)
    with limits.admit(7) as again:
        again.use_memory(60)


def test_a_flood_of_one_user_is_a_few_lines_and_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(client_limits.log, "event", lambda name, level, **facts: written.append((name, facts)))
    monkeypatch.setattr(client_limits, "_INTERVAL_S", 0.05)

    async def flood() -> None:
        lines = ThrottledLog("handoff-refused")
        for _ in range(1000):
            lines.add(7, 70, reason="no")
        lines.add(8, 80, reason="another")
        await until(lambda: any(name == "handoff-refused-repeated" for name, _ in written), "the summary")

    asyncio.run(flood())
    assert [facts["uid"] for name, facts in written if name == "handoff-refused"] == [7] * 5 + [8]
    assert [facts for name, facts in written if name == "handoff-refused-repeated"] == [
        {"uid": 7, "count": 995, "within_s": 0}
    ]
