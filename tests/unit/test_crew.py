"""Short work for a thread: in its order, answered one by one, and done to the end whoever stops waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox_manager.crew import Crew


def run(work: Callable[[Crew], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        with ThreadPoolExecutor(1) as thread:
            await asyncio.wait_for(work(Crew(thread)), 60)

    asyncio.run(all_of_it())


def test_in_its_order_with_the_answer_of_each() -> None:
    done: list[int] = []

    async def work(crew: Crew) -> None:
        answers = [crew.do(lambda number=number: done.append(number) or number) for number in range(1000)]  # type: ignore[misc]
        assert [await answer for answer in answers] == list(range(1000)) == done
        assert await crew.do(threading.get_ident) != threading.get_ident()

    run(work)


def test_what_fails_takes_nothing_with_it() -> None:
    async def work(crew: Crew) -> None:
        answers = [crew.do(lambda divisor=divisor: 10 // divisor) for divisor in (5, 0, 2)]  # type: ignore[misc]
        assert await answers[0] == 2
        with pytest.raises(ZeroDivisionError):
            await answers[1]
        assert await answers[2] == 5

    run(work)


def test_who_is_cancelled_waits_for_the_end_of_the_work() -> None:
    may_end = threading.Event()
    seen: list[str] = []

    async def hand_off(crew: Crew) -> None:
        try:
            await crew.do(lambda: (may_end.wait(60), seen.append("done")))
        finally:
            seen.append("undone")

    async def work(crew: Crew) -> None:
        task = asyncio.ensure_future(hand_off(crew))
        await asyncio.sleep(0)
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done() and seen == []
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["done", "undone"]

    run(work)
