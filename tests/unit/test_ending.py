"""Tasks end, whatever they do with a cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from stageout.core import ending


def test_who_is_cancelled_while_it_ends_others_ends_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_AGAIN_S", 0.01)
    left: list[str] = []

    async def deaf() -> None:
        for _ in range(3):  # cancellations that are lost
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def serves() -> None:
        inner = asyncio.ensure_future(deaf())
        try:
            await asyncio.Event().wait()
        finally:
            await ending.end([inner])
            left.append("all ended" if inner.done() else "one goes on")

    async def daemon() -> bool:
        outer = asyncio.ensure_future(serves())
        await asyncio.sleep(0)
        await ending.end([outer])
        return outer.cancelled()

    assert asyncio.run(asyncio.wait_for(daemon(), 20))
    assert left == ["all ended"]
