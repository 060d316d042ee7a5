"""A connection by the first route that gives one."""

from __future__ import annotations

import threading

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import reaching
from stageout.overlay.channel import Channel
from stageout.overlay.reaching import reach
from stageout.overlay.wire.route import Route
from tests.harness.pool.waiting import wait_until

ONE, TWO, THREE = ("one:1",), ("two:1",), ("three:1",)


class _Channel(Channel):
    """It goes nowhere. :ivar closed: nobody has it any more."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class _Routes:
    """The outcome of each route: a connection, at once or once it is let go, or a failure."""

    def __init__(self, **silent: threading.Event) -> None:
        self.silent, self.tried = silent, list[Route]()
        self.channels = {route: _Channel() for route in (ONE, TWO, THREE)}
        self.fails: set[Route] = set()
        self.problems: dict[Route, BaseException] = {}
        self.late: list[tuple[Route, Channel]] = []

    def connect(self, route: Route) -> Channel:
        self.tried.append(route)
        if route in self.fails:
            raise TransferFailure(ErrorClass.CONNECT_FAILED, f"by {route[0]}")
        if route in self.problems:
            raise self.problems[route]
        wait = self.silent.get(route[0].partition(":")[0])
        if wait is not None:
            wait.wait(60)
        return self.channels[route]

    def reach(self, *routes: Route) -> tuple[Route, Channel]:
        return reach(routes, self.connect, lambda route, channel: self.late.append((route, channel)))


def test_the_first_route_is_used_and_no_other_is_tried() -> None:
    routes = _Routes()
    assert routes.reach(ONE, TWO) == (ONE, routes.channels[ONE])
    assert routes.tried == [ONE]


def test_the_next_follows_a_failure_at_once() -> None:
    routes = _Routes()
    routes.fails = {ONE, TWO}
    assert routes.reach(ONE, TWO, THREE) == (THREE, routes.channels[THREE])
    routes.fails.add(THREE)
    with pytest.raises(TransferFailure, match="by three:1"):
        routes.reach(ONE, TWO, THREE)
    with pytest.raises(TransferFailure, match="by one:1"):
        routes.reach(ONE)


def test_a_silent_route_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "_NEXT_AFTER_S", 0.01)
    back = threading.Event()
    routes = _Routes(one=back)
    assert routes.reach(ONE, TWO) == (TWO, routes.channels[TWO])
    back.set()
    wait_until(lambda: routes.late, timeout_s=30, what="the late one to be handed over")
    assert routes.late == [(ONE, routes.channels[ONE])]


def test_the_silent_one_is_used_when_the_others_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "_NEXT_AFTER_S", 0.01)
    back = threading.Event()
    routes = _Routes(one=back)
    routes.fails = {TWO}
    threading.Timer(0.05, back.set).start()
    assert routes.reach(ONE, TWO) == (ONE, routes.channels[ONE])


def test_what_comes_after_an_end_by_another_failure_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "_NEXT_AFTER_S", 0.01)
    back = threading.Event()
    routes = _Routes(one=back)
    routes.problems = {TWO: MemoryError("none")}
    with pytest.raises(MemoryError, match="none"):
        routes.reach(ONE, TWO)
    back.set()
    assert routes.channels[ONE].closed.wait(30)
    assert not routes.late


def test_what_came_before_an_end_by_another_failure_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits behind the failure, and nobody takes it."""
    routes, start = _Routes(), threading.Thread.start

    def ends(thread: threading.Thread) -> None:
        start(thread)
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", ends)
    with pytest.raises(KeyboardInterrupt):
        routes.reach(ONE, TWO)
    assert routes.channels[ONE].closed.is_set()


@pytest.mark.parametrize("threads", [0, 1])
def test_a_process_that_may_have_no_more_threads_tries_them_in_turn(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    routes, start, left = _Routes(), threading.Thread.start, [None] * threads
    routes.fails = {ONE}

    def begin(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    assert routes.reach(ONE, TWO, THREE) == (TWO, routes.channels[TWO])
    assert routes.tried == [ONE, TWO]
