"""A short storm: every daemon may die at any moment, and all that was computed arrives, right and once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool.storm import Storm

pytestmark = pytest.mark.pool


def test_random_deaths_under_load(site: Any) -> None:
    storm = Storm(site, jobs=24, duration_s=45, calm_s=3, seed=20)
    storm.rage()
    storm.wait_for_ends(timeout_s=300)
    print(storm.summary())
    assert not storm.wrong()
    assert sum(storm.deaths.values()) >= 5
