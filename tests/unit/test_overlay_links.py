"""Lanes of several processes on one link: who is held back, and until when."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlay_router.data import sending
from overlay_router.data.jobs import Job
from stageout.overlay import links as links_module
from stageout.overlay.book import Book, Row, shared_book
from stageout.overlay.links import Claim, Lane, Links, _Meter
from stageout.overlay.tcp import waiting_bytes
from tests.polling import wait_for

_PATIENCE_S = 30.0


class _Sender:
    """Sends for ever in a thread, a little at a time."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self._over = lane, False
        self._tap = lane.tap()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            self._tap.take(64 * 1024)
            time.sleep(0.002)

    def stop(self) -> None:
        self._over = True
        self.lane.close()
        self._thread.join()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[Links, Links]]:
    """Two, as far as links go."""
    yield Links(shared_book(tmp_path)), Links(shared_book(tmp_path))


def test_a_lane_that_begins_during_the_last_plan_is_planned_by_the_same_thread(tmp_path: Path) -> None:
    book = shared_book(tmp_path)
    here, is_last, goes_on = Links(book), threading.Event(), threading.Event()

    def exchange(mine: Sequence[Row], now_s: float) -> list[Row]:
        if not mine:
            is_last.set()
            goes_on.wait(_PATIENCE_S)
        return list(mine)

    book.exchange = exchange  # type: ignore[method-assign]
    lane = here.lane("host:1", Claim())
    first = here._thread
    lane.close()
    assert is_last.wait(_PATIENCE_S)
    with here.lane("host:1", Claim()):
        assert here._thread is first
    goes_on.set()
    wait_for(lambda: here._thread is None)


def test_one_with_less_weight_is_held_until_the_other_has_ended(processes: tuple[Links, Links]) -> None:
    bulk = _Sender(processes[0].lane("host:1", Claim("bulk")))
    urgent = _Sender(processes[1].lane("host:1", Claim("urgent", priority=10)))
    try:
        wait_for(lambda: bulk.lane.limit is not None)
        urgent.stop()
        wait_for(lambda: bulk.lane.limit is None)
    finally:
        bulk.stop()


def test_other_links_and_equal_flows_are_left_alone(processes: tuple[Links, Links]) -> None:
    lanes = [
        processes[0].lane("host:1", Claim("a", priority=3)),
        processes[1].lane("host:1", Claim("b", priority=3)),
        processes[1].lane("host:2", Claim("c", priority=10)),
        processes[0].lane("host:3", Claim("d")),
        processes[0].lane("host:3", Claim("e", priority=1)),
    ]
    senders = [_Sender(lane) for lane in lanes]
    try:
        wait_for(lambda: lanes[3].limit is not None)
        assert [lane.limit for lane in lanes[:3]] == [None] * 3
    finally:
        for sender in senders:
            sender.stop()


def test_who_waits_goes_on_when_the_limit_is_lifted() -> None:
    lane = Lane(Links(Book()), 1, "host:1", Claim())
    lane.hold(1.0)
    done = threading.Event()

    def take() -> None:
        for _ in range(2):
            lane.tap().take(1 << 30)
        done.set()

    threading.Thread(target=take, daemon=True).start()
    assert not done.wait(0.05)
    lane.close()
    assert done.wait(_PATIENCE_S)


def test_a_lane_that_is_closed_is_held_no_more() -> None:
    lane = Lane(Links(Book()), 1, "host:1", Claim())
    lane.close()
    lane.hold(1.0)
    assert lane.limit is None


def test_no_connection_of_many_stands_still() -> None:
    here = Links(Book())
    bulk, urgent = here.lane("host:1", Claim("bulk")), here.lane("host:1", Claim("urgent", priority=10))
    taps = [bulk.tap() for _ in range(50)]
    try:
        wait_for(lambda: taps[0].take(1) is None and bulk.limit is not None)
        assert bulk.limit is not None
        assert bulk.limit / len(taps) > 128 * 1024 / 60, "a piece within the silence after which routers give up"
    finally:
        urgent.close()
        bulk.close()


def test_lanes_of_one_flow_are_not_each_compared_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    here, moves = Links(Book()), _Meter.moves
    asked: list[float] = []

    def counted(meter: _Meter, now_s: float) -> bool:
        asked.append(now_s)
        return moves(meter, now_s)

    monkeypatch.setattr(_Meter, "moves", counted)
    lanes = [Lane(here, number, "host:1", Claim("many")) for number in range(200)]
    lanes.append(Lane(here, 200, "host:1", Claim("urgent", priority=10)))
    taps = [lane.tap() for lane in lanes]
    wait_for(lambda: bool([tap.take(1) for tap in taps]) and here._tick(lanes) is None and lanes[0].limit is not None)
    asked.clear()
    here._tick(lanes)
    assert len(asked) <= 2 * len(lanes)


def test_what_the_kernel_still_has_does_not_count() -> None:
    answers: Iterator[int | None] = iter([None, 700, 701, None])
    tap = Lane(Links(Book()), 1, "host:1", Claim()).tap(lambda: next(answers))
    tap.take(10_000)
    assert [tap.moved_bytes for _ in range(4)] == [10_000, 700, 701, 701]


def test_a_rate_is_known_however_seldom_one_looks() -> None:
    meter = _Meter()
    for number in range(4):
        meter.note(700 * number, 0.7 * number, 0.7 * number)
    assert meter.rate == pytest.approx(1000)


def test_a_plan_that_takes_long_is_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = itertools.count(0.0, 0.05)
    watch = SimpleNamespace(
        monotonic=time.monotonic, time=time.time, sleep=slept.append, thread_time=lambda: next(clock)
    )
    monkeypatch.setattr("stageout.overlay.links.time", watch)
    with Links(Book()).lane("host:1", Claim()):
        wait_for(lambda: len(slept) > 1)
    assert slept[0] == pytest.approx(0.2)


class _Broken(Book):
    """Fails as soon as somebody is held."""

    lane: Lane | None = None

    def exchange(self, mine: Sequence[Row], now_s: float) -> list[Row]:
        if self.lane is not None and self.lane.limit is not None:
            raise ValueError
        return super().exchange(mine, now_s)


def test_nobody_is_held_while_no_plan_can_be_made_and_then_links_are_shared_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    book = _Broken()
    here = Links(book)
    bulk = _Sender(here.lane("host:1", Claim("bulk")))
    urgent = _Sender(here.lane("host:1", Claim("urgent", priority=10)))
    try:
        wait_for(lambda: bulk.lane.limit is not None)
        book.lane = bulk.lane
        wait_for(lambda: bulk.lane.limit is None and "link-sharing-failed" in caplog.text)
        assert caplog.text.count("link-sharing-failed") == 1
        book.lane = None
        wait_for(lambda: bulk.lane.limit is not None)
    finally:
        urgent.stop()
        bulk.stop()


def test_answers_of_one_transfer_share_a_lane_which_ends_behind_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_KEPT_S", 0.0)
    here = Links(Book())
    with here.answer("host:1", Claim("bulk")) as first, here.answer("host:1", Claim("bulk")) as second:
        assert first is second
        with here.answer("host:1", Claim("other")) as another, here.answer("host:2", Claim("bulk")) as elsewhere:
            assert len({first, another, elsewhere}) == 3
    wait_for(lambda: not here._lanes and not here._answers)
    with here.answer("host:1", Claim("bulk")) as later:
        assert later is not first


def test_a_process_that_may_have_no_more_threads_shares_its_links_once_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    here = Links(Book())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        first = here.lane("host:1", Claim())
    with first, here.lane("host:1", Claim()) as second:
        wait_for(lambda: second.number in {lane for _, lane in here._meters})
    wait_for(lambda: here._thread is None)


def test_short_answers_are_held_from_their_beginning(processes: tuple[Links, Links]) -> None:
    claim = Claim("bulk")
    urgent = _Sender(processes[1].lane("host:1", Claim("urgent", priority=10)))

    def is_held(at_the_end: bool) -> bool:
        with processes[0].answer("host:1", claim) as lane:
            was_held = lane.limit is not None
            tap = lane.tap()
            for _ in range(4):
                tap.take(64 * 1024)
            tap.leave()
            return lane.limit is not None if at_the_end else was_held

    try:
        wait_for(lambda: is_held(at_the_end=True))
        assert is_held(at_the_end=False)
    finally:
        urgent.stop()


def test_what_passed_counts_when_a_connection_goes_on_without_its_tap() -> None:
    with Links(Book()).lane("host:1", Claim()) as lane:
        tap = lane.tap(lambda: 10)
        tap.take(100)
        assert lane.moved_bytes == 10
        tap.leave()
        assert (lane.moved_bytes, lane.connections) == (100, 0)


def test_an_answer_counts_none_of_what_the_one_before_it_has_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    here, told = Links(Book()), [1000]
    monkeypatch.setattr(sending, "links", lambda: here)
    monkeypatch.setattr(sending, "acked_bytes", lambda connection: told[0])
    monkeypatch.setattr(sending, "waiting_bytes", lambda connection: 500)
    job = Job("send", size_bytes=1 << 30, block_bytes=1 << 20, blocks=1, to="host", flow="bulk")
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        with sending.ordered(job, one) as tap:
            assert tap is not None
            lane = tap._lane
            for told[0], moved_bytes in ((1400, 0), (1500, 0), (1510, 10)):
                assert tap.moved_bytes == moved_bytes
        with sending.ordered(job, one) as tap:
            assert tap is not None
            assert tap._lane is lane


def test_what_the_other_side_has_not_confirmed_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        reader, _ = server.accept()
        with reader:
            assert waiting_bytes(sender) == 0
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:  # until neither side takes more
                    sender.send(bytes(1 << 20))
            assert waiting_bytes(sender) > 0


def _row(lane: int, pid: int = 1) -> Row:
    return Row(pid, lane, 1, 2, 3, 0, 0, 4.0, 5)


def test_rows_written_while_this_process_looks_count_and_keep_their_places(tmp_path: Path) -> None:
    one, other = shared_book(tmp_path), shared_book(tmp_path)
    one.exchange([_row(1)], 100.01)
    assert [(row.lane, row.at_s) for row in other.exchange([], 100.0)] == [(1, 100.01)]
    other.exchange([_row(2, pid=9)], 100.0)
    assert sorted(row.lane for row in shared_book(tmp_path).exchange([], 100.1)) == [1, 2]


def test_a_process_that_stands_still_with_the_table_makes_nobody_wait_for_those_of_before(tmp_path: Path) -> None:
    one, other = shared_book(tmp_path), shared_book(tmp_path)
    one.exchange([_row(1)], 100.0)
    assert [row.lane for row in other.exchange([], 100.1)] == [1]
    with (tmp_path / f"stageout-links.{os.geteuid()}").open("rb") as table:
        fcntl.flock(table, fcntl.LOCK_EX)
        assert [row.lane for row in other.exchange([], 100.2)] == [1]
        assert other.exchange([], 102.0) == []


def test_a_process_that_stood_still_does_not_write_where_others_are_now(tmp_path: Path) -> None:
    one, other = shared_book(tmp_path), shared_book(tmp_path)
    one.exchange([_row(1)], 100.0)
    other.exchange([_row(2, pid=9)], 120.0)
    one.exchange([_row(1)], 120.1)
    assert sorted(row.lane for row in shared_book(tmp_path).exchange([], 120.2)) == [1, 2]
    other.exchange([], 120.3)
    assert [row.lane for row in shared_book(tmp_path).exchange([], 120.4)] == [1]


def test_processes_of_two_containers_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for container in (1, 2):
        monkeypatch.setattr("stageout.overlay.links._namespace", lambda kind, number=container: number)
        rows.append(Lane(Links(Book()), 1, "host:1", Claim()).row(1.0))
    assert rows[0].pid != rows[1].pid


def test_more_lanes_than_the_table_has_places_are_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    class _Counting(struct.Struct):
        def unpack_from(self, buffer: Any, offset: int = 0) -> tuple[Any, ...]:
            looked.append(offset)
            return super().unpack_from(buffer, offset)

    monkeypatch.setattr("stageout.overlay.book._ROW", _Counting("=dqqQQQqqdQ"))
    rows = [_row(number) for number in range(4500)]
    assert len(shared_book(tmp_path).exchange(rows, 100.0)) == len(rows)
    assert len(looked) < len(rows)


def test_there_is_room_for_the_whole_table_or_none_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_book(tmp_path)
    found = (tmp_path / f"stageout-links.{os.geteuid()}").stat()
    assert found.st_blocks * 512 >= found.st_size > 0

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shared_book(tmp_path).exchange([_row(1)], 100.0) == [_row(1)]
    monkeypatch.undo()
    assert shared_book(tmp_path).exchange([], 100.0) == []


def test_rows_of_the_dead_and_of_what_has_ended_are_not_seen(tmp_path: Path) -> None:
    one, other = shared_book(tmp_path), shared_book(tmp_path)
    one.exchange([_row(1), _row(2)], 100.0)
    assert sorted(row.lane for row in other.exchange([_row(3, pid=9)], 100.5)) == [1, 2, 3]
    one.exchange([_row(2)], 100.6)
    assert sorted(row.lane for row in other.exchange([], 100.7)) == [2]
    assert other.exchange([], 102.0) == []
    other.exchange([_row(number, pid=9) for number in range(3)], 120.0)  # its place is free again
    assert len(shared_book(tmp_path).exchange([], 120.0)) == 3


def test_a_table_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / f"stageout-links.{os.geteuid()}"
    path.touch(mode=0o600)
    path.chmod(0o666)
    shared_book(tmp_path).exchange([_row(1)], 100.0)
    assert path.stat().st_size == 0
    path.unlink()
    other = tmp_path / "of the same user"
    other.touch(mode=0o600)
    os.link(other, path)
    shared_book(tmp_path).exchange([_row(1)], 100.0)
    assert other.stat().st_size == 0
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    shared_book(tmp_path).exchange([_row(1)], 100.0)
    assert not (tmp_path / "elsewhere").exists()
    assert shared_book(tmp_path / "missing").exchange([], 1.0) == []
