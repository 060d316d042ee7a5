"""Stored profiles of servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stageout.core.profiles import Best, Profile, Run, file_of, good_for_uploads, load, save
from stageout.sampling.carrier import Carrier
from stageout.sampling.plugins import Plugin
from stageout.sampling.profiler import Limits, Profiler
from stageout.sampling.report import _series

RUN = Run("upload", 1000, 2, 3, 0, 3000, 1.5, 2000.0, 0.2, 10_000_000)


def _profile(at: int) -> Profile:
    return Profile("dest.example.org:443", "https", at, {"upload": Best(2, 3, 2000.0)}, (RUN,))


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    profile = _profile(1_800_000_000)
    path = save(tmp_path / "new" / "place", profile)
    assert load(tmp_path / "new" / "place", "Dest.Example.org:443") == profile
    assert path.stat().st_mode & 0o777 == 0o644
    assert json.loads(path.read_text())["schema"] == 1


def test_a_good_start(tmp_path: Path) -> None:
    import time

    assert good_for_uploads(tmp_path, "dest.example.org:443") is None
    save(tmp_path, _profile(int(time.time()) - 60))
    good = good_for_uploads(tmp_path, "dest.example.org:443")
    assert good is not None
    assert good.concurrency == 3
    save(tmp_path, _profile(int(time.time()) - 40 * 86400))
    assert good_for_uploads(tmp_path, "dest.example.org:443") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"schema": 2}',
        '{"schema": 1, "best": 3, "runs": []}',
        '{"schema": 1, "best": {}, "runs": [{}]}',
    ],
)
def test_what_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    file_of(tmp_path, "h").write_text(text)
    assert load(tmp_path, "h") is None
    assert good_for_uploads(tmp_path, "h") is None


def test_every_field_is_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "TUNING.md").read_text()
    content = _profile(0).as_json()
    names = [*content, *content["best"]["upload"], *content["runs"][0]]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_many_small_files_tell_nothing_of_files_at_once() -> None:
    """What was found for four at once is not what 32 small files reached."""
    common = ("upload", 1 << 20)
    at_once = Run(*common, 1, 4, 0, 4 << 20, 1.0, 4e6, 0.1, 1)
    one_by_one = Run(*common, 1, 4, 0, 4 * 32 << 20, 8.0, 1e6, 0.1, 1)
    assert at_once.all_at_once
    assert not one_by_one.all_at_once
    assert _series([at_once, one_by_one], "concurrency") == {"4 at once": [(1, 4.0)]}


def test_what_reserving_space_costs_is_measured_in_several_pairs(tmp_path: Path) -> None:
    carrier = Carrier(Plugin(Path("/no/plugin"), ("file",)), f"file://{tmp_path}/", True, tmp_path)
    plan = Profiler(carrier, None, False, Limits())._plan(carrier, 64 << 20)
    reserved = [setting.reserve for setting in plan if setting.reserve is not None]
    assert reserved == [False, True] * 5
    others = [setting for setting in plan if setting.reserve is None]
    assert len(others) == len(set(others))
