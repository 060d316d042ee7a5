"""The meaning of a router's answers to those that wait for them, whatever else it says in between."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from overlay_router.custodians.forwarder import AWAY
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import client, copying, safekeeping
from stageout.overlay.channel import Gateway
from stageout.overlay.wire.messages import Cancel, Custody, Message, Result, Staged, Status

_GATEWAY = Gateway("h", 1, "k", b"s", timeout_s=0.01)
_ORDER = client.deposit_order("f", "t:1", 0o644, 600, 0, 0, "0a" * 16)


class _Channel:
    """A router that has its words ready. :param answers: a question -> what it says to it."""

    def __init__(self, answers: dict[type[Any], list[Message]], before: list[Message] | None = None) -> None:
        self.gateway, self._answers, self._said = _GATEWAY, answers, list(before or ())
        self.asked: list[Message] = []

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *problem: object) -> None:
        self.left_after, self.unread = len(self.asked), list(self._said)

    def send(self, message: Message) -> None:
        self.asked.append(message)
        self._said += [
            Result(item.origin, message.seq, item.outcome) if isinstance(item, Result) else item  # type: ignore[union-attr]
            for item in self._answers.get(type(message), ())
        ]

    def has_more(self, timeout_s: float) -> bool:
        return bool(self._said)

    def receive(self) -> Message:
        return self._said.pop(0)

    def failure(self, kind: ErrorClass, message: str) -> TransferFailure:
        return TransferFailure(kind, message)


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_operation_that_waits_at_a_router_does_not_mean_that_the_router_is_away(is_silent: bool) -> None:
    """Else what one depositor makes wait, for ever perhaps, holds up the files of all others to that terminal."""
    pending: list[Message] = [] if is_silent else [Result(_ORDER.origin, 1, "pending")]
    channel: Any = _Channel({Status: pending})
    with pytest.raises(TransferFailure) as caught:
        client.answer_to(channel, _ORDER, patience_s=0.0)
    assert (caught.value.kind in AWAY) is is_silent
    assert caught.value.kind.retryable


def test_who_gives_up_a_deposit_stays_until_the_router_has_heard_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general answers about that origin come before, perhaps; and a peer's answers are dropped with it."""
    late = Custody(_ORDER.origin, 1, "r:1")
    channel = _Channel({Status: [Result(_ORDER.origin, 0, "unknown")]}, before=[late, late])
    monkeypatch.setattr(safekeeping, "Channel", lambda gateway, route: channel)
    safekeeping._give_up(_GATEWAY, _ORDER, ())
    assert isinstance(channel.asked[0], Cancel)
    assert not channel.unread, "it has left before the answer to what it asked behind its CANCEL"


def test_what_is_said_of_other_operations_is_no_state_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = "0a" * 16, "0b" * 16
    channel = _Channel({}, [Custody(mine, 1, "me"), Result(mine, 2, "failed"), Result(other, 1, "lost")])
    monkeypatch.setattr(copying, "Channel", lambda gateway: channel)
    monkeypatch.setattr(copying.secrets, "token_hex", lambda size_bytes: "ff" * 16)
    channel._said.append(Result("ff" * 16, 1, "unknown"))
    assert copying.state(_GATEWAY, mine) == Custody(mine, 1, "me")


def test_of_a_file_whose_data_come_in_it_is_known_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who asks for many would wait for an answer that has no number."""
    mine, other = "0a" * 16, "0b" * 16
    said: list[Message] = [
        Result(mine, 1, "done"),
        Staged(7, ()),
        Custody(other, 2, "me"),
        Result("ff" * 16, 1, "unknown"),
    ]
    monkeypatch.setattr(copying, "Channel", lambda gateway: _Channel({}, said))
    monkeypatch.setattr(copying.secrets, "token_hex", lambda size_bytes: "ff" * 16)
    assert [one.outcome for one in copying.states(_GATEWAY, mine, 2) if isinstance(one, Result)] == ["done", "pending"]


def test_who_is_named_first_delivers_first_whichever_thread_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the only one that could be had stood by for ten minutes."""
    late: list[Any] = []

    class Thread:
        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            self._run = partial(target, *args)

        def start(self) -> None:
            late.append(self._run)

        def join(self) -> None:
            while late:
                late.pop()()

    monkeypatch.setattr("stageout.overlay.safekeeping.threading.Thread", Thread)
    places: list[tuple[str, int]] = []

    def give(custodian: safekeeping.Custodian, place: int) -> Any:
        places.append((custodian.terminal, place))
        return SimpleNamespace(router=custodian.terminal)

    candidates = [safekeeping._Candidate(safekeeping.Custodian(_GATEWAY, name)) for name in ("one", "two", "three")]
    search = safekeeping._Search(candidates, 2, 0.0, give)
    search.run()
    assert sorted(places) == [("one", 0), ("two", 1)]
    assert len(search.kept) == 2
