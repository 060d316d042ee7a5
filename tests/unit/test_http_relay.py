"""CONNECT at the daemon: addresses, tokens that count once, and why there is no connection."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from overlay_router import http_relay
from overlay_router.http_relay import Relaying
from stageout.overlay.http.heads import Refused

NOW = 1_000_000.0


class _World:
    """A relay at ``here`` to ``far``, a clock, and the outcome of connecting."""

    def __init__(self) -> None:
        self.now, self.problem, self.dialled = NOW, None, list[str]()  # type: Exception | None
        self.relaying = Relaying(lambda: {"far:1", "here:1"}, "here:1", self._connect, lambda: self.now)

    async def _connect(self, address: str) -> socket.socket:
        self.dialled.append(address)
        if self.problem is not None:
            raise self.problem
        return socket.socket()

    def ask(self, to: str = "far:1", token: str = "t", once: bool = True, made: float = NOW) -> int:
        """200, or the status of the refusal."""
        try:
            asyncio.run(self.relaying.connected(to, once, "alice", token, made, made + 60)).close()
        except Refused as why:
            return why.status
        return 200


def test_only_what_is_listed_and_never_itself() -> None:
    world = _World()
    assert [world.ask(to) for to in ("other:1", "here:1", "far:2")] == [403] * 3
    assert world.dialled == [] and world.ask("far:1") == 200, "a refused address uses no token up"


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 502), (socket.gaierror(-2, "no such name"), 502),
        (asyncio.TimeoutError(), 504), (OSError(errno.ETIMEDOUT, "silent"), 504),
        (OSError(errno.EHOSTUNREACH, "no route"), 504),
    ],
)  # fmt: skip
def test_why_there_is_no_connection(problem: Exception, status: int) -> None:
    world = _World()
    world.problem = problem
    assert world.ask() == status


def test_a_token_counts_once_and_only_if_it_was_made_since_the_start() -> None:
    world = _World()
    assert [world.ask(), world.ask(), world.ask(token="u"), world.ask(token="v", made=NOW - 0.1)] == [
        200,
        407,
        200,
        407,
    ]
    assert [world.ask(once=False, made=NOW - 100), world.ask(once=False, made=NOW - 100)] == [200, 200]


def test_tokens_are_remembered_until_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_relay, "_MOST_USED", 2)
    world = _World()
    assert [world.ask(token=one) for one in "abc"] == [200, 200, 429]
    world.now += 119
    assert [world.ask(token=one) for one in "ac"] == [407, 429]
    world.now += 2
    assert world.ask(token="c", made=world.now) == 200
