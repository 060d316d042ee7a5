"""Tasks end, whatever they do with a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox_manager.custody.orders import Refused
from sandbox_manager.intake.acceptance import Acceptance
from sandbox_manager.intake.listener import Intake
from stageout.core import ending
from stageout.core.ending import Background


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


@pytest.mark.parametrize("part", ["intake", "background"])
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
        manager: Any = SimpleNamespace(_tasks={task}, _threads=[], _listener=None)
        monkeypatch.setattr("stageout.core.ending._LAST_S", 0.01)
        await (Intake.stop(manager, 0.01) if part == "intake" else Background.stop(manager))
        return task.cancelled()

    assert asyncio.run(asyncio.wait_for(stops(), 20))


@pytest.mark.parametrize("problem", [None, OSError("no room")])
def test_a_step_on_the_disk_ends_before_a_hand_off_that_is_cancelled(problem: OSError | None) -> None:
    """Its files would be removed while a thread moves them."""
    may_end = threading.Event()
    seen: list[str] = []

    def step() -> None:
        may_end.wait(60)
        seen.append("done")
        if problem is not None:
            raise problem

    async def hand_off(intake: Any) -> None:
        try:
            await Intake._on_disk(intake, 1, step)
        finally:
            seen.append("removed")

    async def story() -> None:
        with ThreadPoolExecutor(1) as thread:
            task = asyncio.ensure_future(hand_off(SimpleNamespace(_quick=thread)))
            for _ in range(3):
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.sleep(0)
            assert not task.done() and seen == []
            may_end.set()
            with pytest.raises(Refused if problem else asyncio.CancelledError):
                await task
        assert seen == ["done", "removed"]

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_hand_off_that_is_being_recorded_is_recorded_however_often_it_is_cancelled() -> None:
    """At the second time its files were discarded, while the ledger's thread recorded them."""

    async def story() -> str:
        goes_on = asyncio.Event()
        space = SimpleNamespace(add=lambda *which: None)
        acceptance: Any = SimpleNamespace(
            _record_ticket=lambda handoff: goes_on.wait(), _manager=SimpleNamespace(name="m", key=""),
            _custody=SimpleNamespace(space=space, syncs=space), unreserve=lambda reservation: None,
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
