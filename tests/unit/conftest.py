"""For unit tests: none leaves descriptors or threads behind."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

_HERE = Path(__file__).parent
#: For threads that are about to end, on a machine that is busy: when a test was run once, and when it is run again.
_FIRST_PATIENCE_S, _PATIENCE_S = 1.0, 20.0
#: Of these, without a collection of garbage, which takes longer than all the rest.
_BEFORE_GARBAGE_S = 0.1
_LOOK_INTERVAL_S = 0.01
#: Seconds for one unit test, also on a machine that is busy.
_TIMEOUT_S = 300
#: Modules with tests that leave some. The list only becomes shorter.
_LEAVE_SOME = frozenset(
    {
        "test_overlay_destination",
        "test_overlay_fetching",
        "test_overlay_links",
        "test_overlay_own_key",
        "test_overlay_pack_custody",
        "test_overlay_pack_faults",
        "test_overlay_pack_said",
        "test_overlay_packs",
        "test_overlay_place",
        "test_overlay_receiver",
        "test_overlay_ring",
        "test_overlay_uplink",
    }
)


#: The descriptors that were left when it was run first.
_FIRST = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give unit tests less time than tests that need pools."""
    for item in items:
        if item.path.parent == _HERE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test, and once more when it has left something.

    Descriptors that a process opens once, in whichever test comes first, are there by then; those of each run of a test
    are not.
    """
    if not (isinstance(item, pytest.Function) and item.path.parent == _HERE):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if _FIRST in item.stash and all(report.passed for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(autouse=True)
def _nothing_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test closes every descriptor that it opens.

    It is set up before all that a test has for itself, and so looks when that is gone; what it shares with others of
    its module is there before it.
    """
    if request.path.stem in _LEAVE_SOME:
        yield
        return
    files_before, threads_before = _files(), set(threading.enumerate())
    yield
    request.node.funcargs.clear()  # what it was given goes with the test
    is_first = _FIRST not in request.node.stash
    left = _left_in_the_end(files_before, threads_before, _FIRST_PATIENCE_S if is_first else _PATIENCE_S)
    if left and not is_first:
        pytest.fail(f"the test leaves open, each time that it runs: {', '.join(left)}")
    if left:
        request.node.stash[_FIRST] = left


@pytest.fixture(autouse=True)
def _log_is_closed(_nothing_stays_open: None) -> Iterator[None]:
    """A daemon that ran inside the test has opened it for its whole process."""
    yield
    for handler in logging.getLogger("stageout").handlers:
        handler.close()


def _left_in_the_end(files_before: dict[str, str], threads_before: set[threading.Thread], most_s: float) -> list[str]:
    """The descriptors that are still there after so long. When garbage is collected is chance, so that is done here."""
    begin_s = time.monotonic()
    is_collected = False
    while left := _left(files_before, threads_before):
        waited_s = time.monotonic() - begin_s
        if waited_s > most_s and is_collected:
            break
        if waited_s > _BEFORE_GARBAGE_S:
            gc.collect()
            is_collected = True
        time.sleep(_LOOK_INTERVAL_S)
    return left


def _left(files_before: dict[str, str], threads_before: set[threading.Thread]) -> list[str]:
    threads = [f"the thread {one.name}" for one in threading.enumerate() if one not in threads_before]
    return threads + [f"{name} -> {target}" for name, target in _files().items() if name not in files_before]


def _files() -> dict[str, str]:
    """The open descriptors, by number, without the one that is used for this look."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - before and after each test: the cheapest way
        with suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found
