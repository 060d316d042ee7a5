"""Accepted data come to the disk in groups: what waits meanwhile is next, and nothing is recorded that is not there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sandbox_manager.syncing import Syncs

MB = 1024 * 1024


class Disk:
    """A spool whose syncs are let through one by one. :param gone: tickets that were released meanwhile."""

    def __init__(self, *gone: str) -> None:
        self.groups: list[list[str]] = []
        self.gone = gone
        self.may_go = threading.Semaphore(0)
        self.problem: OSError | None = None

    def sync(self, tickets: Sequence[str]) -> list[str]:
        self.groups.append(list(tickets))
        assert self.may_go.acquire(timeout=60)
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem
        return [ticket for ticket in tickets if ticket not in self.gone]


def run(disk: Disk, work: Callable[[Syncs, list[list[str]]], Awaitable[None]], failing: int = 0) -> list[list[str]]:
    """What is recorded. :param failing: so many records fail first."""
    recorded: list[list[str]] = []

    async def record(tickets: Sequence[str]) -> None:
        recorded.append(list(tickets))
        if len(recorded) <= failing:
            raise OSError("the ledger's disk fails")

    async def all_of_it() -> None:
        tasks: list[asyncio.Task[Any]] = []
        with ThreadPoolExecutor(1) as thread:
            syncs = Syncs(disk, thread, record, lambda work: tasks.append(asyncio.ensure_future(work)))  # type: ignore[arg-type]
            await work(syncs, recorded)
            for _ in range(100):
                disk.may_go.release()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)

    asyncio.run(all_of_it())
    return recorded


async def first_then(syncs: Syncs, disk: Disk, *others: tuple[str, int]) -> None:
    """The others come in while the first is being synced."""
    syncs.add("first", 1)
    while not disk.groups:
        await asyncio.sleep(0.001)
    for ticket, size_bytes in others:
        syncs.add(ticket, size_bytes)


def test_what_comes_in_meanwhile_is_synced_together() -> None:
    disk = Disk("b")
    recorded = run(disk, lambda syncs, _: first_then(syncs, disk, ("a", 1), ("b", 1), ("c", 1)))
    assert disk.groups == [["first"], ["a", "b", "c"]]
    assert recorded == [["first"], ["a", "c"]]


def test_large_data_are_not_waited_for_by_small() -> None:
    disk = Disk()
    run(disk, lambda syncs, _: first_then(syncs, disk, ("a", MB), ("large", 100 * MB), ("huge", 1 << 40), ("b", MB)))
    assert disk.groups == [["first"], ["a"], ["large"], ["huge"], ["b"]]


def test_no_group_is_without_bound() -> None:
    disk = Disk()
    run(disk, lambda syncs, _: first_then(syncs, disk, *((str(number), 0) for number in range(500))))
    assert [len(group) for group in disk.groups] == [1, 200, 200, 100]
    assert [ticket for group in disk.groups[1:] for ticket in group] == [str(number) for number in range(500)]


def test_after_a_failure_it_goes_on() -> None:
    disk = Disk()
    disk.problem = OSError(5, "EIO")
    assert run(disk, lambda syncs, _: first_then(syncs, disk, ("a", 1))) == [["a"]]
    disk = Disk()
    assert run(disk, lambda syncs, _: first_then(syncs, disk, ("a", 1)), failing=1) == [["first"], ["a"]]


def test_one_that_comes_when_all_was_done_is_synced_too() -> None:
    disk = Disk()

    async def work(syncs: Syncs, recorded: list[list[str]]) -> None:
        disk.may_go.release()
        syncs.add("a", 1)
        while not recorded:
            await asyncio.sleep(0.001)
        for _ in range(5):
            await asyncio.sleep(0)
        syncs.add("b", 1)

    assert run(disk, work) == [["a"], ["b"]]
