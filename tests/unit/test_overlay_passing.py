"""Blocks that only the next hop has, where the records of a custodian cannot be written."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router.custodians import forwarder
from overlay_router.custodians.carrier import Note
from overlay_router.custodians.forwarder import Forwarder, _Order
from overlay_router.local.replies import Reply
from overlay_router.peers.keys import OwnCredential
from stageout.overlay.wire.messages import Opened
from tests.unit.test_overlay_custodian import ORIGIN, PEER, TERMINAL, Clock, Spooling, passing, spooling

__all__ = ["spooling"]


def test_what_is_gone_is_asked_for_when_the_database_has_room_again(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    tid, operation = passing(spooling)
    spooling.one.operate(operation, PEER, "blake2b-128")
    with monkeypatch.context() as patched:
        patched.setattr(spooling.store, "withdraw", full)
        with pytest.raises(sqlite3.OperationalError):
            spooling.one.gone(tid, [1])
    (held,) = spooling.one.due()
    assert len(spooling.one.blocks(held)[1]) == 1, "it is tried again, and found to be gone again"
    (reply,) = spooling.one.gone(tid, [1])
    assert isinstance(reply.message, Opened)
    assert reply.message.staged == ((0, 1),)


def test_after_the_death_of_its_process_every_sender_hears_what_must_come_again(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "FIRST_S", 0.0)
    asked: list[int] = []
    told: list[str] = []

    def gone(tid: int, blocks: object) -> list[Reply]:
        asked.append(tid)
        if tid == 1 and asked.count(1) == 1:
            raise sqlite3.OperationalError("disk I/O error")
        return [Reply(f"peer-{tid}", Opened(tid, "e"))]

    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    async def nothing() -> None:
        pass

    async def died() -> bool:
        return True

    async def run() -> None:
        one = Forwarder(
            spooling.one,
            on_disk,
            lambda replies: told.extend(reply.to for reply in replies),
            OwnCredential(),
            1,
            Clock(),
        )
        monkeypatch.setattr(spooling.one, "gone", gone)
        monkeypatch.setattr(one, "_start", nothing)
        one._carrier = cast(Any, SimpleNamespace(is_running=False, has_died=died))
        for tid in (1, 2, 3):
            one._orders[tid] = _Order((ORIGIN, tid), f"f{tid}", TERMINAL, tid, passes=tid != 3)
        await one._begin()
        assert sorted(told) == ["peer-1", "peer-2"], "once each, and of what is all on the disk nothing"
        assert not one.busy

    asyncio.run(run())


def test_what_cannot_be_recorded_is_not_tried_again_for_each_block_of_another_file(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That syncs, and writes a line of the log, each time."""
    asked: list[int] = []

    def passed(tid: int, blocks: object) -> list[Reply]:
        asked.append(tid)
        if tid == 1:
            raise sqlite3.OperationalError("database or disk is full")
        return []

    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    async def run() -> None:
        one = Forwarder(spooling.one, on_disk, lambda replies: None, OwnCredential(), 1, Clock())
        monkeypatch.setattr(spooling.one, "passed", passed)
        for tid in (1, 2):
            one._orders[tid] = _Order((ORIGIN, tid), f"f{tid}", TERMINAL, tid, passes=True)
        for number in (1, 2, 2, 2):
            await one._noted(Note(number, [[0, "00"]], []))
        assert asked == [1, 2, 2, 2]
        assert one._unheard.keys() == {1}

    asyncio.run(run())
