"""For unit tests: none leaves descriptors or threads behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

#: For threads that are about to end, on a machine that is busy.
_PATIENCE_S = 20.0
#: The table of lanes, which a process opens once, in whichever test comes first.
_OF_THE_PROCESS = "/dev/shm/stageout-links."
#: Modules with tests that leave some. The list only becomes shorter.
_LEAVE_SOME = frozenset(
    {
        "test_agent_trust",
        "test_daemons_loop",
        "test_handoff",
        "test_handover_cut_off",
        "test_intake",
        "test_ledger",
        "test_overlay_destination",
        "test_overlay_egress",
        "test_overlay_fetching",
        "test_overlay_greeting",
        "test_overlay_links",
        "test_overlay_loans",
        "test_overlay_own_key",
        "test_overlay_pack_custody",
        "test_overlay_pack_faults",
        "test_overlay_pack_said",
        "test_overlay_packs",
        "test_overlay_place",
        "test_overlay_receiver",
        "test_overlay_ring",
        "test_overlay_sent_files",
        "test_overlay_telling",
        "test_overlay_uplink",
        "test_overlay_whole",
        "test_policy_book",
        "test_policy_service",
    }
)


@pytest.fixture(autouse=True)
def _nothing_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test opens it closes, and does not leave it to the collector of garbage.

    It is set up before all that a test has for itself, and so looks when that is gone; what it shares with others of
    its module is there before it.
    """
    if request.path.stem in _LEAVE_SOME:
        yield
        return
    files_before, threads_before = _files(), set(threading.enumerate())
    yield
    request.node.funcargs.clear()  # what it was given goes with the test
    end_s = time.monotonic() + _PATIENCE_S
    while left := _left(files_before, threads_before):
        if time.monotonic() > end_s:
            pytest.fail(f"the test has left open: {', '.join(left)}")
        time.sleep(0.01)


def _left(files_before: dict[str, str], threads_before: set[threading.Thread]) -> list[str]:
    threads = [f"the thread {one.name}" for one in threading.enumerate() if one not in threads_before]
    files = [f"{name} -> {target}" for name, target in _files().items() if name not in files_before]
    return threads + [file for file in files if _OF_THE_PROCESS not in file]


def _files() -> dict[str, str]:
    """What is open, by number; not that by which it is looked at."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - before and after each test: the cheapest way
        with suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found
