"""Blocks that only the next hop has, where the records of a custodian cannot be written."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from stageout.wire.overlay import Opened
from tests.unit.test_overlay_custodian import PEER, Spooling, passing, spooling

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
