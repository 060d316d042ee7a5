"""Operations on names of a router that has lost its records, without a router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.operations import Session
from stageout.overlay.wire.messages import Message, Operation


def test_nothing_waits_for_what_was_lost_with_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router comes back without them just when the next operation is on its way: it must not wait for ever."""
    said = list[Message]()
    answers = iter([None, SimpleNamespace(store="new", send=said.append)])

    def reached(first: Gateway) -> Any:
        found = next(answers)
        if found is None:
            raise TransferFailure(ErrorClass.CONNECT_FAILED, "not up yet")
        return found

    session = Session(Gateway("host", 1, "key", b"secret"))
    monkeypatch.setattr(session, "_reached", reached)
    session._store, session._seq = "old", 1
    session._unsettled[1] = Operation(session.origin, 1, "mkdir", "d", 99)
    session.rename("d", "e")
    (operation,) = said
    assert (cast(Operation, operation).seq, cast(Operation, operation).after) == (2, ())
    assert session._unsettled == {2: operation}
