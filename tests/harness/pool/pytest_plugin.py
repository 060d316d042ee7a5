"""pytest fixtures for tests that need a real pool.

A test marked ``pool`` may use

* ``pool``: one access point and two execute points with the product, shared by all tests of the session;
* ``pool_factory``: makes pools with other settings, closed after the test.

``--pool-version`` (repeatable; each test of ``pool`` then runs on each) or ``STAGEOUT_POOL_VERSION`` chooses the
release. Where no pool can be made such tests are skipped with the reason, unless ``CI`` is set: there it is a failure.
The logs of every pool that a failed test used go to ``test-logs/``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.harness.pool.errors import PoolUnavailable
from tests.harness.pool.pool import Pool

PoolFactory = Callable[..., Pool]
_FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "pool: needs a real HTCondor pool (root, or HTCondor installed)")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of releases."""
    text = "HTCondor release for the tests that need a pool; may be repeated"
    parser.getgroup("stageout").addoption("--pool-version", action="append", default=[], metavar="RELEASE", help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of the session's pool once per chosen release."""
    if "session_pool" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--pool-version") or [None]
        metafunc.parametrize("session_pool", versions, indirect=True, scope="session", ids=lambda v: v or "default")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember a failure, for the fixtures' ends."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="session")
def session_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Give the session's pool; tests use ``pool``, which collects the logs too."""
    pool = _started(Pool(version=request.param, execute_points=2))
    yield pool
    pool.close()


@pytest.fixture
def pool(request: pytest.FixtureRequest, session_pool: Pool) -> Iterator[Pool]:
    """Give the session's pool: two execute points, the product, agent and manager."""
    yield session_pool
    keep_logs(request, [session_pool])


@pytest.fixture
def pool_factory(request: pytest.FixtureRequest) -> Iterator[PoolFactory]:
    """Give a function like :class:`Pool` that starts what it makes."""
    made: list[Pool] = []

    def make(**settings: Any) -> Pool:
        made.append(Pool(**settings))
        return _started(made[-1])

    yield make
    keep_logs(request, made)
    for pool in made:
        pool.close()


def _started(pool: Pool) -> Pool:
    """Start a pool; a machine that cannot have one means a skip for people and a failure for CI."""
    try:
        return pool.start()
    except PoolUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason).splitlines()[0])


def keep_logs(request: pytest.FixtureRequest, pools: list[Pool]) -> None:
    """Copy the logs of pools to ``test-logs/`` when the test has failed."""
    if not request.node.stash.get(_FAILED, False):
        return
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", request.node.nodeid)[-120:]
    for number, pool in enumerate(pools):
        dest = Path(request.config.rootpath) / "test-logs" / name / str(number)
        if hasattr(pool, "dir"):
            pool.collect_logs(dest)
            request.node.add_report_section("teardown", "pool", f"logs of the pool: {dest}")
