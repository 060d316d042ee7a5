"""One record or file that fails in a custodian holds up no other one, and keeps no space."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from overlay_router.custodians import pack_custody
from overlay_router.custodians.forwarder import Forwarder
from overlay_router.custodians.pack_carrier import Answer
from overlay_router.custodians.pack_records import HeldPack
from overlay_router.custodians.spool import Held
from overlay_router.peers.keys import OwnCredential
from stageout.wire.overlay import Cancel, Custody, Packed
from tests.unit.test_overlay_custodian import Spooling, _faulty
from tests.unit.test_overlay_destination import ORIGIN, PEER
from tests.unit.test_overlay_pack_custody import DONE, Delivering, pack, spooling

__all__ = ["spooling"]


def _broken(*facts: object) -> Any:
    raise sqlite3.DatabaseError("database disk image is malformed")


def test_a_pack_whose_record_cannot_be_read_holds_up_no_other(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(held: HeldPack) -> Any:
        return _broken() if held.seq == 1 else read(held)

    spooling.one.packs.take([pack(1), pack(11)])
    read, delivering = spooling.one.packs.order, Delivering(spooling)
    with monkeypatch.context() as patch:
        patch.setattr(spooling.one.packs, "order", order)
        assert delivering.step() == [(11, False)]
    assert delivering.step() == []
    spooling.clock.now_s += 1.1
    assert delivering.step() == [(1, False)]


def test_a_cancellation_that_cannot_be_passed_on_now_is_later(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooling.one.packs.take([pack(1), pack(11)])
    delivering = Delivering(spooling)
    assert delivering.step() == [(1, False), (11, False)]
    for seq in (1, 11):
        spooling.one.cancel(Cancel(ORIGIN, seq), PEER)
    with monkeypatch.context() as patch:
        patch.setattr(spooling.one.packs, "order", _broken)
        assert delivering.step() == []
    assert delivering.step() == [(1, True), (11, True)]


def test_a_file_whose_record_cannot_be_read_holds_up_no_other(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    def blocks(held: Held) -> Any:
        return _broken() if held.operation.seq == 1 else read(held)

    async def nothing() -> None:
        return

    for seq in (1, 2):
        spooling.take(seq)
    read, given = spooling.one.blocks, list[int]()
    monkeypatch.setattr(spooling.one, "blocks", blocks)
    forwarder = Forwarder(spooling.one, on_disk, lambda replies: None, OwnCredential(), 3, spooling.clock)
    monkeypatch.setattr(forwarder, "_keep_carrier", nothing)
    monkeypatch.setattr(forwarder, "_give", lambda order, *facts, **more: given.append(order.key[1]))
    asyncio.run(forwarder._begin())
    assert given == [2]
    assert "malformed" in str(forwarder.problems)


def test_packs_that_cannot_be_looked_up_keep_no_space(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    known = spooling.one.packs._known
    monkeypatch.setattr(
        spooling.one.packs, "_known", lambda one, others: known(one, others) if one.pack.seq == 1 else _broken()
    )
    with pytest.raises(sqlite3.DatabaseError):
        spooling.one.packs.take([pack(1), pack(11)])
    assert not spooling.spool.lots


def test_a_pack_that_was_recorded_although_that_failed_is_taken_when_it_comes_again(spooling: Spooling) -> None:
    with _faulty("custody-pack-take", OSError(errno.EIO, "planned"), True), pytest.raises(OSError, match="planned"):
        spooling.one.packs.take([pack()])
    (reply,) = spooling.one.packs.take([pack()])
    assert isinstance(reply.message, Custody)
    spooling.restart()
    assert [held.seq for held in spooling.one.packs.held()] == [1]


def test_a_file_that_cannot_be_removed_holds_up_no_end(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*place: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    spooling.one.packs.take([pack(1), pack(11)])
    delivering = Delivering(spooling)
    delivering.step()
    said = [(one.outcome.value, "", 1, 0) for one in DONE]
    with monkeypatch.context() as patch:
        patch.setattr(pack_custody.durable, "unlink", read_only)
        delivering.step(*(Answer(delivering.number(seq), said) for seq in (1, 11)))
    assert [one.message for one in delivering.told] == [Packed(ORIGIN, seq, (1, 1, 1)) for seq in (1, 11)]
    assert not spooling.one.packs.held()
    assert not spooling.spool.lots
    spooling.restart()
    assert not list((spooling.home / ".stageout/packs").iterdir())
