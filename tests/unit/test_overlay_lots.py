"""Reserved space at the terminal: allocated, used once, given back, the same after any death."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay_router.local.reservations import MAX_LIFETIME_S, MAX_OF_A_KEY
from overlay_router.rules import lots
from overlay_router.rules.lots import Spool
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Lot, Open, Reserved
from tests.unit.test_overlay_destination import BLOCK, EXPIRES, ORIGIN, PEER, Crash, Router, _dying, home, op, outcome

__all__ = ["home"]
ONE, TWO = "01" * 16, "02" * 16


@pytest.fixture
def router(home: Path) -> Iterator[Router]:
    made = Router(home / "router")
    yield made
    made.close()


def ask(
    router: Router, action: str, *, lot: str = ONE, size_bytes: int = 0, path: str = "", key: str = "k"
) -> Reserved:
    return router.place.lot(Lot(lot, action, size_bytes, 100, path), key)


def held_bytes(router: Router) -> dict[str, int]:
    return {path.name: path.stat().st_blocks * 512 for path in (router.root / ".stageout/lots").iterdir()}


def put(router: Router, seq: int, size_bytes: int, *, lot: str = ONE, path: str = "a/f", key: str = "k") -> str:
    answer = router.place.open(Open(ORIGIN, seq, path, size_bytes, BLOCK, EXPIRES, lot=lot), f"{key}/{ORIGIN}").message
    return "opened" if isinstance(answer, messages.Opened) else getattr(answer, "reason", "no space")


def test_space_is_held_used_once_and_given_back(router: Router) -> None:
    assert ask(router, "reserve", size_bytes=81920) == Reserved(ONE, 81920, 100)
    assert held_bytes(router) == {ONE: 81920}
    assert ask(router, "reserve", size_bytes=5) == Reserved(ONE, 81920, 100), "asked again"
    for _ in range(2):
        assert put(router, 1, 40960) == "opened"
        assert ask(router, "renew").left_bytes == 40960
        assert held_bytes(router) == {ONE: 40960}
        router.restart()
    assert put(router, 2, 40961) == "lot"
    router.now = 50
    assert ask(router, "renew") == Reserved(ONE, 40960, 150)
    assert ask(router, "release") == Reserved(ONE, 0, 0)
    assert held_bytes(router) == {}
    assert ask(router, "release").code == ErrorClass.NOT_FOUND.code
    assert put(router, 3, 1) == "lot"
    assert put(router, 4, 1, lot="") == "opened"


def test_a_lot_is_for_its_owner_and_its_names(router: Router) -> None:
    ask(router, "reserve", size_bytes=100, path="a")
    for action in ("reserve", "renew", "release"):
        assert ask(router, action, key="other").code == ErrorClass.PERMISSION_DENIED.code
    assert put(router, 1, 1, key="other") == "lot"
    assert put(router, 2, 1, path="ab/f") == "lot"
    assert put(router, 3, 1, path="a/f") == "opened"


def test_spool_is_used_to_its_last_byte_and_no_further() -> None:
    spool = Spool(1000)
    usable_bytes = lots.usable_bytes(spool)
    assert lots.reserve(spool, "one", usable_bytes - 1, 0.0) is None
    assert lots.reserve(spool, "two", 2, 0.0) is not None
    assert lots.reserve(spool, "two", 1, 0.0) is None
    assert lots.reserved_bytes(spool) == usable_bytes


def test_lots_end_with_their_time(router: Router) -> None:
    ask(router, "reserve", size_bytes=4096)
    assert router.place.lot(Lot(TWO, "reserve", 4096, 10**9), "k").expires == MAX_LIFETIME_S
    router.now = 101
    assert put(router, 1, 1) == "lot"
    router.place.expire()
    assert list(held_bytes(router)) == [TWO]


def test_what_there_is_no_room_for_is_refused_whole(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ask(router, "reserve", size_bytes=1 << 60)
    assert (refused.code, refused.retry_after_s) == (ErrorClass.NO_SPACE_REMOTE.code, 5)

    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert ask(router, "reserve", size_bytes=4096).code == ErrorClass.NO_SPACE_REMOTE.code
    assert held_bytes(router) == {}
    for number in range(MAX_OF_A_KEY):
        assert not ask(router, "reserve", lot=f"{number:032x}", size_bytes=1).code
    assert ask(router, "reserve", size_bytes=1).code == ErrorClass.QUOTA_EXCEEDED.code
    assert not ask(router, "reserve", size_bytes=1, key="other").code


def _cancel(router: Router, seq: int) -> None:
    router.place.cancel(messages.Cancel(ORIGIN, seq), f"k/{ORIGIN}")
    assert outcome(router.place.operate(op(seq, "publish", "a/f"), f"k/{ORIGIN}"), seq) == "cancelled"


def test_a_put_that_fails_gives_back_what_it_took(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(router, "reserve", size_bytes=40960)
    for seq, end in ((1, "cancel"), (2, "low"), (3, "expire")):
        assert put(router, seq, 8192) == "opened"
        assert (ask(router, "renew").left_bytes, held_bytes(router)) == (32768, {ONE: 32768}), end
        if end == "cancel":
            _cancel(router, seq)
        elif end == "low":
            router.place.low(messages.Low(ORIGIN, seq))
        else:
            ask_for_long = Lot(ONE, "renew", 0, 10 * EXPIRES)
            router.place.lot(ask_for_long, "k")
            router.now = EXPIRES + 1
            router.place.expire()
        assert (ask(router, "renew").left_bytes, held_bytes(router)) == (40960, {ONE: 40960}), end


def test_a_put_that_found_no_room_takes_nothing(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(router, "reserve", size_bytes=8192)

    def full(tid: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(router.tree, "allocate", full)
        assert put(router, 1, 4096) == "no space"
    assert (ask(router, "renew").left_bytes, held_bytes(router)) == (8192, {ONE: 8192})


def test_of_two_senders_only_the_one_whose_data_were_published_uses_the_lot(router: Router) -> None:
    ask(router, "reserve", size_bytes=8192)
    data = b"four"
    for key in ("k", PEER):
        opening = Open(ORIGIN, 1, "f", len(data), BLOCK, EXPIRES, lot=ONE if key == "k" else "")
        router.place.open(opening, f"{key}/{ORIGIN}")
    assert ask(router, "renew").left_bytes == 8188
    assert router.send(op(1, "publish", "f"), data) == "done", "by a third, without the lot"
    assert (ask(router, "renew").left_bytes, held_bytes(router)) == (8192, {ONE: 8192})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "label",
    [
        "overlay-lot-allocate", "overlay-lot-record", "overlay-lot-trim", "overlay-lot-free", "overlay-lot-refill",
        "overlay-settle", "overlay-discard",
    ],
)  # fmt: skip
def test_death_at_every_step_changes_nothing_in_the_end(home: Path, label: str, when: str) -> None:
    hits = 0
    for count in (1, 2, 3):
        router = Router(home / str(count))
        with _dying(label, count, when):
            try:
                _story(router)
            except Crash:
                hits += 1
                router.restart()
        _story(router)
        assert held_bytes(router) == {TWO: 8192 - 4096}
        router.restart()
        assert held_bytes(router) == {TWO: 8192 - 4096}
        assert ask(router, "renew", lot=TWO).left_bytes == 4096
        router.close()
    assert hits, f"nobody passes {label}"


def _story(router: Router) -> None:
    ask(router, "reserve", size_bytes=4096)
    ask(router, "reserve", lot=TWO, size_bytes=8192)
    assert put(router, 1, 4096, lot=TWO) == "opened"
    put(router, 2, 4096, lot=TWO)
    _cancel(router, 2)
    ask(router, "release")
