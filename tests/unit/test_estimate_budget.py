"""An estimate moves no more than its part of the bytes, whatever the link does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageout.condor.plugins import Plugin
from stageout.core.classads import ClassAd
from stageout.core.errors import StageoutError
from stageout.sampling.carrier import Carrier, Setting
from stageout.sampling.estimate import SHARE, Leg, Means, _doubt, estimate
from stageout.sampling.processes import Usage
from stageout.sampling.request import read_estimation
from stageout.tuning.choice import Choice, choose, spread_of

PLUGIN = Plugin(Path("/no/plugin"), ("dav",), multi_stream_downloads=("dav",))


def _link(each: int, full: int, noise: float, chance: random.Random, moved: list[int]) -> Any:
    """The stand-in for the plugin's process: a link with a sharp bend, with samples that are wrong."""

    def results(carrier: Carrier, setting: Setting) -> Any:
        all_bytes = setting.file_bytes * setting.files
        moved.append(all_bytes)
        rate = min(each * setting.streams * setting.concurrency, full) * chance.uniform(1 - noise, 1 + noise)
        seconds = 0.01 + all_bytes / rate
        carrier.spent_s += seconds
        developer = ClassAd({"StageOutSeconds": seconds, "StageOutBytesPerSecond": int(rate) // setting.files})
        ads = [ClassAd({"TransferTotalBytes": setting.file_bytes, "DeveloperData": developer})] * setting.files
        return ads, seconds, Usage(), Usage(), Usage()

    return results


def _ad(size_bytes: int, *, source: str = "dav://far/x", target: str = "file:///dev/null") -> ClassAd:
    return ClassAd({"dap_type": "Estimation", "src_url": source, "dest_url": target, "filesize": size_bytes})


@settings(max_examples=12, deadline=None)
@given(
    size_bytes=st.one_of(st.integers(20, 10_000_000), st.integers(10_000_000, 10**12)),
    each=st.integers(1, 10**8),
    factor=st.integers(1, 40),
    noise=st.floats(0, 0.5),
    up=st.sampled_from((False, True, None)),
)
def test_samples_never_pass_their_part_of_the_bytes(
    size_bytes: int, each: int, factor: int, noise: float, up: bool | None
) -> None:
    moved: list[int] = []
    source, target = ("file:///dev/null" if up else "dav://far/x"), ("file:///dev/null" if up is False else "dav://to/")
    results = _link(each, each * factor, noise, random.Random(size_bytes), moved)
    with mock.patch.object(Carrier, "_results_of", results):
        answer = estimate(read_estimation(_ad(size_bytes, source=source, target=target)), Means(lambda method: PLUGIN))
    assert 0 < sum(moved) == answer["sampled_bytes"] <= max(2, SHARE * size_bytes)
    assert answer["optimal_streams"] >= 1


def test_a_small_file_gets_one_sample_and_one_stream() -> None:
    """Below 3 MB the part is too small for a second number of streams."""
    with mock.patch.object(Carrier, "_results_of", _link(10**6, 10**7, 0.0, random.Random(1), [])):
        answer = estimate(read_estimation(_ad(2_000_000)), Means(lambda method: PLUGIN))
    assert answer["optimal_streams"] == 1
    assert {sample["streams"] for sample in answer["samples"]} == {1}
    assert answer["enough_data"] is False
    assert answer["not_enough_data"] == "only 1 of at least 3 numbers of streams could be sampled"


@pytest.mark.parametrize(
    ("samples", "spread", "doubt"),
    [
        ({1: 10.0, 2: 19.0, 4: 30.0}, 0.1, ""),
        ({1: 10.0, 2: 11.0, 4: 11.5}, 0.1, "the gain of 15% over 1 is within the error of the samples (28%)"),
        ({1: 10.0, 2: 11.0, 4: 11.5}, 0.0, ""),
        ({1: 10.0, 2: 11.0}, 0.0, "only 2 of at least 3 numbers of streams could be sampled"),
    ],
)
def test_a_gain_within_the_error_of_the_samples_is_none(samples: dict[int, float], spread: float, doubt: str) -> None:
    leg = Leg("dav://h/x", True, samples, dict.fromkeys(samples, 1.0), choice=Choice(max(samples), 30.0, "samples"))
    with mock.patch.object(Leg, "spread", spread**2):
        assert _doubt(leg) == doubt


def test_the_carrier_refuses_what_would_pass_the_limit() -> None:
    carrier = Carrier(PLUGIN, "dav://far/x", False, Path("/tmp"), most_bytes=1000)
    with mock.patch.object(Carrier, "_results_of", _link(10**6, 10**7, 0.0, random.Random(1), [])):
        carrier.run(Setting(600))
        with pytest.raises(StageoutError, match="more than the 400 B left"):
            carrier.run(Setting(401))
        assert carrier.run(Setting(400)).moved_bytes == 400


def test_of_what_noise_cannot_tell_apart_the_fewest_are_taken() -> None:
    samples = {1: 9.55, 2: 10.0, 4: 10.0}
    weights = dict.fromkeys(samples, 1.0)
    assert choose(samples, weights=weights).streams == 2
    assert choose(samples, weights=weights, spread=0.06**2).streams == 1
    assert choose({1: 5.0, 2: 10.0, 4: 10.0}, weights=weights, spread=0.06**2).streams == 2


def test_the_spread_of_samples() -> None:
    assert spread_of([(1, 10.0, 1.0), (2, 20.0, 1.0)]) == 0
    assert spread_of([(1, 9.0, 2.0), (1, 11.0, 2.0), (2, 20.0, 1.0)]) == pytest.approx(0.04)
