"""For all tests: none sees the log of another, and none fails because the machine is busy."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from _pytest._code.code import TracebackEntry

pytest_plugins = ["tests.harness.pool.pytest_plugin"]

# Tests start processes by the hundred: each would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that runs tests in the background has these signals ignored, and processes inherit that: no Ctrl-C would be
# heard.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# An example takes as long as the machine lets it: speed is shown by benchmarks, never by tests.
hypothesis.settings.register_profile("stageout", deadline=None)
hypothesis.settings.load_profile("stageout")


#: The files that take longest come first: the last files that are given out decide when a parallel run ends.
_LONGEST_FIRST = (
    "test_agent_pool",
    "test_crashes",
    "test_cli_pool",
    "test_simulation",
    "test_matrix",
    "test_job_kinds",
    "test_main_job",
    "test_dags_pool",
    "test_outage",
    "test_handover_pool",
    "test_hostile_user_pool",
    "test_hostile_access_points",
    "test_web_services_pool",
    "test_daemons_pool",
    "test_storm",
    "test_custodian",
    "test_build",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files in front, and mix files that wait for pools with those that compute."""
    files = dict.fromkeys(item.path for item in items)
    turns: dict[Path, tuple[int, float]] = {}
    for waits in (True, False):
        group = [path for path in files if (path.parent.name == "pool") is waits]
        for number, path in enumerate(group):
            known = path.stem in _LONGEST_FIRST
            turns[path] = _LONGEST_FIRST.index(path.stem) if known else len(_LONGEST_FIRST), number / len(group)
    items.sort(key=lambda item: turns[item.path])


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> Iterator[None]:
    """Daemons that run inside a test open the log, for the whole process."""
    logger = logging.getLogger("stageout")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers, logger.propagate = [], True
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def _line_of(entry: TracebackEntry) -> int:
    return (entry._rawentry.tb_lineno or entry.frame.code.firstlineno + 1) - 1


# Python 3.11 knows no line for an exception that the handler of a signal (a time limit) raises at the end of a `with`.
# pytest would end with an error of its own instead of reporting the test.
TracebackEntry.lineno = property(_line_of)  # type: ignore[method-assign, assignment]
