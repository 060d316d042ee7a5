"""The store: the memory follows the ledger, and observers hear of each change, whoever writes."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from sandbox_manager.custody import updates
from sandbox_manager.custody.ledger import Ledger, SandboxStore
from stageout.core.states import State
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import Sandbox, SlotKey
from stageout.wire.custody import Run

OWNER = RunFacts(Run("ap#1.0#1", 1, "a@x"), "a", 5, 5, SlotKey("ep", 1, 1), "slot1_1@ep")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "l")) as opened:
        yield opened


def accept(db: sqlite3.Connection) -> list[int]:
    file = StoredFile(0, "https://h/f", "f", 5, 1, 1)
    return [updates.add_ticket(db, OWNER, "t", "/p", [file], "boot", 100)]


def test_observers_are_told_after_the_memory_has_changed(ledger: Ledger) -> None:
    told: list[tuple[list[State], bool, dict[str, int], State]] = []

    async def story() -> None:
        store = SandboxStore(ledger, lambda box: 0.0)

        def observe(boxes: Sequence[Sandbox]) -> None:
            known = store.registry.by_id[1].state
            told.append(([box.state for box in boxes], store.changed.is_set(), dict(store.acknowledged), known))

        await store.write(accept)
        store.observe(observe)
        store.changed.clear()
        await store.write(lambda db: updates.set_state(db, 1, State.CANCELLED, 5) or [1], orders={"ap": 7})

    asyncio.run(story())
    assert told == [([State.CANCELLED], True, {"ap": 7}, State.CANCELLED)]


def test_orders_without_a_sandbox_here_are_acknowledged_too(ledger: Ledger) -> None:
    async def story() -> SandboxStore:
        store = SandboxStore(ledger, lambda box: 0.0)
        await store.write(lambda db: [], orders={"ap": 7})
        return store

    store = asyncio.run(story())
    assert store.changed.is_set() and store.acknowledged == {"ap": 7}


def test_a_change_that_fails_is_told_to_nobody(ledger: Ledger) -> None:
    told: list[object] = []

    async def story() -> SandboxStore:
        store = SandboxStore(ledger, lambda box: 0.0)
        store.observe(told.append)
        with pytest.raises(ZeroDivisionError):
            await store.write(lambda db: [1 // 0], orders={"ap": 7})
        return store

    store = asyncio.run(story())
    assert told == [] and store.acknowledged == {} and not store.changed.is_set()


def test_the_memory_follows_the_ledger_when_the_writer_is_cancelled_after_the_commit(ledger: Ledger) -> None:
    """Else the sandbox would be planned and reported as it was, and nobody would free its bytes, until a restart."""
    told: list[list[State]] = []
    begun, may_go_on = threading.Event(), threading.Event()

    def change(db: sqlite3.Connection) -> list[int]:
        begun.set()
        assert may_go_on.wait(30)
        return accept(db)

    async def story() -> SandboxStore:
        store = SandboxStore(ledger, lambda box: 0.0)
        store.observe(lambda boxes: told.append([box.state for box in boxes]))
        writer = asyncio.ensure_future(store.write(change))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30)
        writer.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writer
        return store

    store = asyncio.run(story())
    assert [box.state for box in store.registry.by_id.values()] == [State.ACCEPTED]
    assert told == [[State.ACCEPTED]]
