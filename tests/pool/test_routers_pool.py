"""Routers below condor_master find each other through the collector."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageout.cli.main import main
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import Site
from tests.pool.routers import SECRET, start_router, stop_router

pytestmark = pytest.mark.pool


def test_routers_of_a_pool_become_neighbours(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [site.pool.eps[0], site.pool.ap]
    key = tmp_path / "key"
    key.write_text(f"site {SECRET}\n")
    try:
        first = start_router(nodes[0], "root")  # the token for the collector is root's there
        second = start_router(nodes[1], "condor")

        def linked() -> bool:
            assert main(["routes", second, first, "--key", str(key)]) == 0
            lines = [line.split() for line in capsys.readouterr().out.splitlines()]
            return [first, "yes", "direct"] in [words[:3] for words in lines]

        wait_until(linked, timeout_s=60, what="a measured link from the second to the first")
    finally:
        for node in nodes:
            stop_router(node)
