"""Accepted data come to the disk in groups: what waits meanwhile is next, and nothing is recorded that is not there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox_manager.custody import syncing
from sandbox_manager.custody.spool import Synced
from sandbox_manager.custody.syncing import Syncs
from tests.polling import until

MB = 1024 * 1024


class Disk:
    """A spool whose syncs are let through one by one. :param gone: tickets that were released meanwhile.

    :ivar refused: tickets that the disk refuses.
    """

    def __init__(self, *gone: str) -> None:
        self.groups: list[list[str]] = []
        self.gone = gone
        self.may_go = threading.Semaphore(0)
        self.problem: OSError | None = None
        self.refused: tuple[str, ...] = ()
        self.written: list[str] = []

    def write_back(self, tickets: Sequence[str]) -> None:
        self.written += tickets

    def sync(self, tickets: Sequence[str]) -> Synced:
        assert set(tickets) <= set(self.written)
        self.groups.append(list(tickets))
        assert self.may_go.acquire(timeout=60)
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem
        on_disk = [ticket for ticket in tickets if ticket not in (*self.gone, *self.refused)]
        return Synced(on_disk, {ticket: "EIO" for ticket in tickets if ticket in self.refused})


def run(
    disk: Disk, work: Callable[[Syncs, list[list[str]]], Awaitable[None]], failing: int = 0, stopping: bool = False
) -> list[list[str]]:
    """The records; "begins" stands before the tickets of a sync that begins, "-" before those that are lost.

    :param failing: so many records fail first. :param stopping: the manager stops in the end.
    """
    recorded: list[list[str]] = []

    def note(*facts: str) -> None:
        recorded.append(list(facts))
        if len(recorded) <= failing:
            raise OSError("the ledger's disk fails")

    async def begin(tickets: Sequence[str]) -> None:
        note("begins", *tickets)

    async def record(synced: Synced) -> None:
        note(*synced.on_disk, *(f"-{ticket}" for ticket in synced.lost))

    async def all_of_it() -> None:
        tasks: list[asyncio.Task[Any]] = []
        with ThreadPoolExecutor(1) as thread:
            add = lambda work: tasks.append(asyncio.ensure_future(work))  # noqa: E731
            records, background = SimpleNamespace(begin=begin, record=record), SimpleNamespace(run=add)
            syncs = Syncs(disk, thread, records, background)  # type: ignore[arg-type]
            await work(syncs, recorded)
            stop = asyncio.ensure_future(syncs.stop()) if stopping else asyncio.sleep(0)
            await asyncio.sleep(0)
            for _ in range(100):
                disk.may_go.release()
            await asyncio.wait_for(asyncio.gather(*tasks, stop), 60)

    asyncio.run(all_of_it())
    return recorded


async def first_then(syncs: Syncs, disk: Disk, *others: tuple[str, int]) -> None:
    """The others come in while the first is being synced."""
    syncs.add("first", 1)
    await until(lambda: disk.groups, "the first sync")
    for ticket, size_bytes in others:
        syncs.add(ticket, size_bytes)


def test_what_comes_in_meanwhile_is_synced_together() -> None:
    disk = Disk("b")
    recorded = run(disk, lambda syncs, _: first_then(syncs, disk, ("a", 1), ("b", 1), ("c", 1)))
    assert disk.groups == [["first"], ["a", "b", "c"]]
    assert recorded == [["begins", "first"], ["first"], ["begins", "a", "b", "c"], ["a", "c"]]


def test_large_data_are_not_waited_for_by_small() -> None:
    disk = Disk()
    run(disk, lambda syncs, _: first_then(syncs, disk, ("a", MB), ("large", 100 * MB), ("huge", 1 << 40), ("b", MB)))
    assert disk.groups == [["first"], ["a"], ["large"], ["huge"], ["b"]]


def test_no_group_is_without_bound() -> None:
    disk = Disk()
    run(disk, lambda syncs, _: first_then(syncs, disk, *((str(number), 0) for number in range(500))))
    assert [len(group) for group in disk.groups] == [1, 200, 200, 100]
    assert [ticket for group in disk.groups[1:] for ticket in group] == [str(number) for number in range(500)]


def test_after_a_failure_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    disk.problem = OSError(5, "EIO")
    assert run(disk, lambda syncs, _: first_then(syncs, disk, ("a", 1)))[-1] == ["a"]
    monkeypatch.setattr(syncing, "_AGAIN_S", 0.001)
    disk = Disk()
    recorded = run(disk, lambda syncs, _: first_then(syncs, disk, ("a", 1)), failing=2)
    assert recorded == [["begins", "first"]] * 3 + [["first"], ["begins", "a"], ["a"]]


def test_what_could_not_be_tried_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncing, "_AGAIN_S", 0.001)
    disk = Disk()
    disk.problem = OSError(5, "EIO")

    async def work(syncs: Syncs, recorded: list[list[str]]) -> None:
        disk.may_go.release(2)
        syncs.add("a", 1)
        await until(lambda: ["a"] in recorded, "the record")

    assert run(disk, work) == [["begins", "a"], ["begins", "a"], ["a"]]


def test_what_the_disk_refuses_is_said_once_and_never_synced_again() -> None:
    disk = Disk()
    disk.refused = ("a",)
    recorded = run(disk, lambda syncs, _: first_then(syncs, disk, ("a", 1), ("b", 1)))
    assert recorded[2:] == [["begins", "a", "b"], ["b", "-a"]]
    assert disk.groups == [["first"], ["a", "b"]]


def test_a_manager_that_stops_records_what_has_begun_and_begins_nothing_more() -> None:
    disk = Disk()
    recorded = run(disk, lambda syncs, _: first_then(syncs, disk, ("large", 1 << 40), ("b", 1)), stopping=True)
    assert recorded == [["begins", "first"], ["first"]]


def test_one_that_comes_when_all_was_done_is_synced_too() -> None:
    disk = Disk()

    async def work(syncs: Syncs, recorded: list[list[str]]) -> None:
        disk.may_go.release()
        syncs.add("a", 1)
        await until(lambda: ["a"] in recorded, "the record")
        for _ in range(5):
            await asyncio.sleep(0)
        syncs.add("b", 1)

    assert run(disk, work) == [["begins", "a"], ["a"], ["begins", "b"], ["b"]]
