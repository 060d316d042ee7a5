"""A short storm: every daemon may die at any moment, and all that was computed arrives, right and once.

A hostile user attacks the jobs of the others meanwhile.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.pool.conftest import open_directory
from tests.pool.hostile import NO_WALL
from tests.pool.storm import Storm

pytestmark = pytest.mark.pool


def test_random_deaths_under_load(site: Any) -> None:
    site.pool.ap.configure(NO_WALL)
    try:
        with open_directory("loot") as home, Destination(home) as loot:
            storm = Storm(site, jobs=24, duration_s=45, calm_s=3, seed=20, loot=loot)
            storm.rage()
            storm.wait_for_ends(timeout_s=300)
            print(storm.summary())
            assert not storm.wrong()
            assert sum(storm.deaths.values()) >= 5
    finally:
        site.pool.ap.configure("")
