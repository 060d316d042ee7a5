"""A short storm of eight routers; ``make overlay-storm`` makes longer ones, on disks that are really full."""

from __future__ import annotations

from pathlib import Path

from tests.overlay.storm import Plan, Storm
from tests.overlay.storm_writers import MIB


def test_whoever_dies_and_whatever_flips_all_files_are_right(tmp_path: Path) -> None:
    storm = Storm(tmp_path, 7, Plan(expires_s=3600, writers=2, waiting=0, flip_every_bytes=4 * MIB, rests=False))
    assert storm.rage(0.0) == []
    assert storm.counts["kills"] >= 3
    assert storm.counts["flips in a spool"] == storm.counts["no room"] == 1
    assert storm.counts["files"] > 0
