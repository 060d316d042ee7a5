"""Further connections for packs, without a network."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.helpers import Helpers, Parcel
from stageout.overlay.wire.messages import Pack


class _Channel:
    """A connection that takes a pack and ends, at a time when nothing is to be sent."""

    def __init__(self, *arguments: object) -> None:
        self._looks = -1
        self.aborted = threading.Event()

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def send(self, message: object) -> None:
        return

    def send_pack(self, *pack: object) -> None:
        self._looks = 0

    def has_more(self, within_s: float) -> bool:
        self._looks += self._looks >= 0
        return self._looks > 1

    def receive(self) -> None:
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "it has ended")

    def abort(self) -> None:
        self.aborted.set()


def test_a_pack_that_went_with_a_connection_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for its result has to hear of it, also when no other pack is to be sent."""
    monkeypatch.setattr("stageout.overlay.helpers.Channel", _Channel)
    helpers = Helpers(Gateway("host", 1, "key", b"secret"), (), "0" * 32, 1)
    hearing = _Channel()
    pack = Pack("0" * 32, 1, 99, ("f",), (1,), (0o644,), "")
    assert helpers.send(Parcel(pack, [b""], b"x"), cast(Channel, hearing))
    assert hearing.aborted.wait(30)
    helpers.close()
