"""A router's uplink as its processes share it: whoever waits, dies or stands still, the others go on."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stageout.core.errors import StageoutError
from stageout.overlay import uplink as module
from stageout.overlay.book import shared_book
from stageout.overlay.links import Claim, Lane, Links, Tap
from stageout.overlay.uplink import VARIABLE, Sharer, Turn, Uplink, uplink_at, uplink_of_this_process
from tests.polling import wait_for

_RATE = 50e6
_PATIENCE_S = 30.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Uplink, Uplink]]:
    """Processes of one router, as far as uplinks go."""
    both = Uplink(_RATE, tmp_path / "shared"), Uplink(_RATE, tmp_path / "shared")
    yield both
    for one in both:
        one.close()


def _take(uplink: Uplink, turn: Turn, pieces: int) -> threading.Thread:
    def run() -> None:
        for _ in range(pieces):
            uplink.take(turn, uplink.piece_bytes)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _ends(*threads: threading.Thread) -> bool:
    for one in threads:
        one.join(_PATIENCE_S)
    return not any(one.is_alive() for one in threads)


def test_together_they_send_no_more_than_it_carries(two: tuple[Uplink, Uplink]) -> None:
    began_s = time.monotonic()
    threads = [_take(one, one.turn(("", 0), 0.5), 5) for one in two for _ in range(2)]
    assert _ends(*threads)
    assert time.monotonic() - began_s > 20 * two[0].piece_bytes / _RATE - 0.05


def test_threads_of_one_flow_all_get_their_turn(two: tuple[Uplink, Uplink]) -> None:
    turn = two[0].turn(("", 0), 1.0)
    assert _ends(*[_take(two[0], turn, 2) for _ in range(10)])
    assert not turn.waiting


def test_a_process_that_ended_while_it_waited_holds_up_nobody_for_long(two: tuple[Uplink, Uplink]) -> None:
    gone, here = two
    gone._show(-math.inf)
    assert _ends(_take(here, here.turn(("", 0), 1.0), 3))
    assert gone._table is not None
    heads = [slot[1] for place, slot in here._slots() if place == gone._slot]
    assert heads == [math.inf]


def test_messages_wait_for_nobody(two: tuple[Uplink, Uplink], monkeypatch: pytest.MonkeyPatch) -> None:
    here = two[0]
    turn = here.turn(("", 0), 1.0)
    here._turns.free_s = time.monotonic() + 0.2
    here._agreed.write([here._turns.free_s, 0.0, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(Uplink, "_try", lambda *rest: pytest.fail("it waits"))
    here.take(turn, 100)


def test_a_flow_begins_behind_what_its_owner_has_just_had(two: tuple[Uplink, Uplink]) -> None:
    here = two[0]
    small = here.turn(("alice", 0), 0.1)
    here.take(small, here.piece_bytes)
    here.end(small)
    assert here.turn(("alice", 0), 0.1).start == small.start > 0
    assert here.turn(("alice", 10), 0.1).start == here.turn(("bob", 0), 0.1).start == 0


def test_who_sends_is_seen_by_all(two: tuple[Uplink, Uplink]) -> None:
    two[0].say([Sharer("a:1", "alice", 0, 1, 0.25, 1000.0)])
    two[1].say([Sharer("a:1", "alice", 0, 1, 0.25, 3000.0), Sharer("b:1", "", 3, 2, 0.5, 6000.0)])
    _, found = two[0].used()
    assert found == [Sharer("b:1", "", 3, 2, 0.5, 6000.0), Sharer("a:1", "alice", 0, 2, 0.5, 4000.0)]


def test_who_was_killed_while_it_said_who_sends_is_passed_over(two: tuple[Uplink, Uplink]) -> None:
    two[0].say([Sharer("a:1", "alice", 0, 1, 0.25, 1000.0)])
    two[1].say([Sharer("b:1", "bob", 0, 1, 0.25, 1000.0)])
    two[0]._table[two[0]._slot + module._SLOT.size + 3] = 0
    assert [one.to for one in two[1].used()[1]] == ["b:1"]


def test_of_thousands_of_sharers_the_fastest_are_told(two: tuple[Uplink, Uplink]) -> None:
    two[0].say([Sharer(f"host{number}:9621", "alice", 0, 1, 0.001, 9e6 - number) for number in range(5000)])
    _, found = two[1].used()
    assert 10 < len(found) < 5000
    assert found[0].to == "host0:9621"


def test_places_of_processes_that_are_gone_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_lives", lambda pid: False)
    one, other = Uplink(_RATE, tmp_path / "shared"), Uplink(_RATE, tmp_path / "shared")
    assert one._slot == other._slot


def test_more_processes_than_places_still_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIZE_BYTES", module._SLOT_BYTES)
    here = Uplink(_RATE, tmp_path / "shared")
    here.say([Sharer("a:1", "", 0, 1, 1.0, 1.0)])
    assert _ends(_take(here, here.turn(("", 0), 1.0), 2))
    assert here.used()[1] == []


def test_its_processes_find_it_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    uplink_of_this_process.cache_clear()
    assert uplink_of_this_process() is None
    with uplink_at(tmp_path, _RATE) as here:
        uplink_of_this_process.cache_clear()
        found = uplink_of_this_process()
        assert found is not None
        assert (found.rate, found.path, found.number) == (here.rate, here.path, here.number)
    assert not here.path.exists()
    assert VARIABLE not in os.environ
    uplink_of_this_process.cache_clear()


def test_without_shared_memory_a_router_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*place: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with uplink_at(tmp_path, _RATE) as here:
        path = here.path
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StageoutError, match="cannot be had"), uplink_at(tmp_path, _RATE):
        pass
    path.unlink()


def test_who_takes_the_name_of_the_shared_memory_keeps_no_router_out(tmp_path: Path) -> None:
    with uplink_at(tmp_path, _RATE) as here:
        path = here.path
    path.mkdir()
    try:
        with uplink_at(tmp_path, _RATE) as here:
            assert os.environ[VARIABLE].endswith(str(here.path))
            assert here.path != path
        assert not here.path.exists()
    finally:
        path.rmdir()


def _moves(lane: Lane, over: threading.Event) -> threading.Thread:
    tap = lane.tap()

    def run() -> None:
        while not over.is_set():
            tap.take(8192)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _weights(*lanes: Lane) -> list[float]:
    return [round(lane.turn.weight, 2) if lane.turn else 0.0 for lane in lanes]


def test_weights_count_whatever_the_next_hop(tmp_path: Path, two: tuple[Uplink, Uplink]) -> None:
    here, there = (Links(shared_book(tmp_path), uplink) for uplink in two)
    over = threading.Event()
    lanes = [
        here.lane("host:1", Claim("one", priority=2)),
        here.lane("host:1", Claim("one", priority=2)),
        there.lane("host:1", Claim("one", priority=2)),
        there.lane("host:2", Claim("other")),
    ]
    threads: list[threading.Thread] = []
    try:
        assert lanes[0].turn is lanes[1].turn, "connections of a transfer share its part"
        assert all(lane.tap().held for lane in lanes)
        threads += [_moves(lane, over) for lane in lanes]
        # two of the first one's three connections are in the first process
        wait_for(lambda: _weights(*lanes) == [0.53, 0.53, 0.27, 0.2])
        wait_for(lambda: {one.to for one in two[0].used()[1]} == {"host:1", "host:2"})
    finally:
        over.set()
        for lane in lanes:
            lane.close()
        wait_for(lambda: here._thread is None and there._thread is None)
        assert _ends(*threads)


def test_without_an_uplink_a_lane_has_no_turn(tmp_path: Path) -> None:
    here = Links(shared_book(tmp_path))
    with here.lane("host:1", Claim()) as lane:
        assert lane.turn is None
        assert not lane.tap().held
    wait_for(lambda: here._thread is None)


def test_a_transfer_that_moves_seldom_still_counts(
    tmp_path: Path, two: tuple[Uplink, Uplink], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Uplink(100e3, tmp_path / "slow")
    here, now_s = Links(shared_book(tmp_path), slow), [1000.0]
    monkeypatch.setattr("stageout.overlay.links.time", SimpleNamespace(monotonic=lambda: now_s[0], time=lambda: 0.0))
    lanes = [Lane(here, 1, "host:1", Claim("less")), Lane(here, 2, "host:2", Claim("more", priority=2))]
    taps = [lane.tap() for lane in lanes]
    for lane in lanes:
        lane.turn = here._turn(lane)

    def weights(*moved: Tap, after_s: float) -> list[float]:
        now_s[0] += after_s
        for tap in moved:
            tap.take(1)
        here._tick(lanes)
        return _weights(*lanes)

    weights(*taps, after_s=0.0)
    assert weights(*taps, after_s=0.1) == [0.2, 0.8]
    assert weights(taps[1], after_s=1.5) == [0.2, 0.8], "a piece of the other one takes longer than a second"
    assert weights(taps[1], after_s=9.0) == [0.2, 1.0], "it sends no more"


def test_each_connection_has_enough_whatever_the_others_ask_for(tmp_path: Path, two: tuple[Uplink, Uplink]) -> None:
    slow = Uplink(100e3, tmp_path / "slow")
    here = Links(shared_book(tmp_path), slow)
    lanes = [Lane(here, 1, "host:1", Claim("bulk")), Lane(here, 2, "host:2", Claim("urgent", priority=10))]
    for lane, connections in zip(lanes, (3, 1)):
        lane.turn = here._turn(lane)
        for _ in range(connections):
            lane.tap().take(1)
    here._tick(lanes)
    assert _weights(*lanes) == [0.38, 0.98], "of half of the line three parts of four"
    assert slow.connections == 4
