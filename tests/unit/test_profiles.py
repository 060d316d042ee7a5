"""Stored profiles of servers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from stageout.condor.plugins import Plugin
from stageout.core.profiles import Best, Measurement, Profile, file_of, good_for_uploads, load, save
from stageout.sampling.carrier import Carrier
from stageout.sampling.profiler import Limits, Profiler, _best
from stageout.sampling.report import _series, conclusions

RUN = Measurement("upload", 1000, 2, 3, 0, 3000, 1.5, 2000.0, 0.2, 10_000_000)


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
    page = (Path(__file__).resolve().parents[2] / "docs/user/estimate.md").read_text()
    content = _profile(0).as_json()
    names = [*content, *content["best"]["upload"], *content["runs"][0]]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_many_small_files_tell_nothing_of_files_at_once() -> None:
    """The answer for four at once is not the rate that 32 small files reached."""
    common = ("upload", 1 << 20)
    at_once = Measurement(*common, 1, 4, 0, 4 << 20, 1.0, 4e6, 0.1, 1)
    one_by_one = Measurement(*common, 1, 4, 0, 4 * 32 << 20, 8.0, 1e6, 0.1, 1)
    assert at_once.all_at_once
    assert not one_by_one.all_at_once
    assert _series([at_once, one_by_one], "concurrency") == {"4 at once": [(1, 4.0)]}


def test_what_reserving_space_costs_is_measured_in_several_pairs(tmp_path: Path) -> None:
    carrier = Carrier(Plugin(Path("/no/plugin"), ("file",)), f"file://{tmp_path}/", True, tmp_path)
    plan = Profiler(carrier, None, False, Limits())._plan(carrier, 64 << 20)
    reserved = [setting.reserve for setting in plan if setting.reserve is not None]
    assert reserved == [False, True] * 5
    others = [setting for setting in plan if setting.reserve is None]
    assert others.count(others[0]) == 3, "for the noise"
    assert len(others) == len(set(others)) + 2


def _measured(
    rates: Sequence[float], reserved: bool | None = None, streams: int = 1, files: int = 1
) -> list[Measurement]:
    size = 1000 // files
    return [
        Measurement("upload", size, streams, files, 0, 1000, 1.0, rate, 0.1, 1, reserved=reserved) for rate in rates
    ]


def _said(*runs: list[Measurement]) -> list[str]:
    flat = tuple(run for some in runs for run in some)
    return conclusions(Profile("h", "https", 0, {"upload": _best(flat, "upload")}, flat))


def test_no_number_of_streams_is_named_without_enough_measurements() -> None:
    for runs in (
        [_measured([1e6])],
        [_measured([1e6] * 3), _measured([2e6], streams=2)],
        [_measured([1e6]), _measured([2e6], streams=2), _measured([4e6], streams=4)],
    ):
        (text,) = _said(*runs)
        assert text.startswith("upload: not enough data to choose")


def test_a_gain_within_the_noise_is_none() -> None:
    equal = _measured([9e6, 10e6, 11e6])
    more = [_measured([rate], streams=number) for number, rate in ((2, 11e6), (4, 11.5e6))]
    (text,) = _said(equal, *more)
    assert text.startswith("upload: more streams or files at once bring no clear gain (equal measurements differ by 20")
    more = [_measured([rate], streams=number) for number, rate in ((2, 19e6), (4, 38e6), (8, 39e6))]
    (text,) = _said(equal, *more)
    assert re.match(r"upload: [4-8] streams of one file, or 1 files at once, come within 20% of the best", text)


@pytest.mark.parametrize(
    ("kept", "free", "text"),
    [
        ([9.0] * 5, [10.0] * 5, "costs 10% of the rate (median)"),
        ([11.0] * 5, [10.0] * 5, "gains 10% of the rate (median)"),
        ([8.0, 9.0, 9.0, 9.0, 10.1], [10.0] * 5, "not enough data"),
        ([9.0] * 4, [10.0] * 4, "not enough data"),
    ],
)
def test_reserving_costs_something_only_if_the_intervals_do_not_overlap(
    kept: list[float], free: list[float], text: str
) -> None:
    *_, said = _said(_measured([1.0]), _measured(kept, True), _measured(free, False))
    assert said.startswith("reserving the space before writing") and text in said
