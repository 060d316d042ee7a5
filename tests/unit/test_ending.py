"""Tasks end, whatever they do with a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox_manager.acceptance import Acceptance
from sandbox_manager.intake import Intake
from sandbox_manager.pipeline import Pipeline
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


@pytest.mark.parametrize("part", ["intake", "pipeline"])
def test_a_manager_ends_although_a_task_loses_its_cancellation(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever for a hand-off that had lost its own, or left a batch's task behind."""
    monkeypatch.setattr(ending, "_AGAIN_S", 0.01)

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def stops() -> bool:
        task = asyncio.ensure_future(deaf())
        await asyncio.sleep(0)
        thread = SimpleNamespace(shutdown=lambda **how: None)
        manager: Any = SimpleNamespace(
            _tasks={task}, _threads=[], _listener=None, _syncing=thread, _movers=thread, _disk=thread,
            stop_accepting=lambda: None, stop_sending=lambda grace_s: asyncio.sleep(0),
            _syncs=SimpleNamespace(stop=lambda: asyncio.sleep(0)),
        )  # fmt: skip
        monkeypatch.setattr("sandbox_manager.pipeline._LAST_S", 0.01)
        await (Intake.stop(manager, 0.01) if part == "intake" else Pipeline.stop(manager, 0.01))
        return task.cancelled()

    assert asyncio.run(asyncio.wait_for(stops(), 20))


def test_a_hand_off_that_is_being_recorded_is_recorded_however_often_it_is_cancelled() -> None:
    """At the second time its files were discarded, while the ledger's thread recorded them."""

    async def story() -> str:
        goes_on = asyncio.Event()
        space = SimpleNamespace(add=lambda *which: None)
        acceptance: Any = SimpleNamespace(
            _record_ticket=lambda handoff: goes_on.wait(), _admission=SimpleNamespace(space=space),
            _manager=SimpleNamespace(name="m", key=""), release=lambda reservation: None,
            _sync=lambda ticket, size_bytes: None,
        )  # fmt: skip
        handoff: Any = SimpleNamespace(
            ticket="t", facts=SimpleNamespace(owner="o"), files=[], reservation=None, size_bytes=0
        )
        task = asyncio.ensure_future(Acceptance.accept(acceptance, handoff))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        goes_on.set()
        return (await task).ticket

    assert asyncio.run(asyncio.wait_for(story(), 20)) == "t"
