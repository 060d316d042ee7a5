"""Calls of plugins: room within the grant, what is measured, and who never waits for whom."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_manager.rules import TuningRules, read_tuning
from sandbox_manager.scheduling.calls import Calls, Target, concurrency_used
from sandbox_manager.scheduling.streams import make_streams
from stageout.core.config import ConfigError, mapping_settings
from stageout.core.profiles import Best, Profile, save
from stageout.core.streams import ActiveTransfer, FixedStreams, Knobs
from stageout.tuning.servers import AdaptiveStreams

MB = 1_000_000
KNOBS = Knobs(initial=4, maximum=16, parallelism=4, delay=4, increment=1, threshold=1.0)
WEB = Target("https://dest", several=True)
GRID = Target("gsiftp://dest", several=True, multi_stream=True)
STOCK = Target("https://dest", several=False)


class Hands:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.now


class Granted:
    """Grants in the hands of the test."""

    def __init__(self, streams: int | None) -> None:
        self.given = streams
        self.noted: list[tuple[int, int, float | None]] = []
        self.is_closed = False

    def streams(self, server: str) -> int | None:
        return self.given

    def reason(self, server: str) -> str:
        return "As the test wants."

    def note(self, server: str, wanted: int, in_use: int, rate_mb_s: float | None = None) -> None:
        self.noted.append((wanted, in_use, rate_mb_s))

    async def close(self) -> None:
        self.is_closed = True


def _calls(
    controller: str = "fixed",
    knobs: Knobs = KNOBS,
    grants: Granted | None = None,
    start: int = 0,
    profiles: Path = Path("/nonexistent"),
) -> tuple[Calls, Hands]:
    clock = Hands()
    rules = TuningRules(controller, knobs, profiles)
    return Calls(rules, clock, lambda server: start, partial(make_streams, grants=grants)), clock


def test_without_a_service_the_nodes_own_limits_count() -> None:
    calls, _ = _calls()
    transfer = calls.start(WEB, "alice", files=100)
    assert (transfer.concurrency, transfer.parallelism) == (15, 1)
    assert calls.room(WEB, "alice") == 0
    assert calls.room(WEB, "bob") == 1
    assert calls.report("https://dest").state == "fixed"
    calls.end(transfer)
    assert calls.room(WEB, "alice") == 15


def test_a_plugin_that_does_not_heed_the_environment_counts_as_one_file_and_one_stream() -> None:
    calls, _ = _calls()
    transfer = calls.start(STOCK, "alice", files=100)
    assert transfer.streams == 1


def test_streams_of_each_file_only_for_plugins_that_send_in_parts() -> None:
    calls, _ = _calls(grants=Granted(32))
    transfer = calls.start(GRID, "alice", files=100)
    assert (transfer.concurrency, transfer.parallelism) == (7, 4)
    assert calls.start(replace(GRID, multi_stream=False), "bob", files=9).parallelism == 1


def test_a_grant_below_one_file_moves_one_with_fewer_streams() -> None:
    calls, _ = _calls(grants=Granted(3))
    transfer = calls.start(GRID, "alice", files=5)
    assert transfer.streams == 3
    assert calls.room(GRID, "bob") == 0


def test_nothing_granted_means_nothing_starts() -> None:
    calls, _ = _calls(grants=Granted(0))
    assert calls.room(WEB, "alice") == 0
    assert calls.report("https://dest").state == "no-grant"


def test_another_owner_may_begin_beside_a_batch_that_takes_all_that_the_controller_wants() -> None:
    calls, _ = _calls("crowding")
    calls.start(WEB, "alice", files=100)
    assert calls.room(WEB, "alice") == 0
    beside = calls.start(WEB, "bob", files=100)
    assert beside.concurrency == 1
    assert calls.room(WEB, "bob") == 0


def test_calls_that_start_together_share_the_room() -> None:
    calls, _ = _calls("crowding")
    first = calls.start(WEB, "alice", files=100, later=1)
    assert calls.room(WEB, "bob", planned=1) >= 1
    second = calls.start(WEB, "bob", files=100)
    assert first.concurrency + second.concurrency == 4


def test_calls_that_are_planned_take_room() -> None:
    calls, _ = _calls(grants=Granted(2))
    assert calls.room(WEB, "alice", planned=1) == 1
    assert calls.room(WEB, "alice", planned=2) == 0


def test_one_more_beside_files_that_take_very_long() -> None:
    calls, clock = _calls("crowding", start=1)
    calls.start(WEB, "alice", files=1)
    assert calls.room(WEB, "alice") == 0
    clock.now += 61
    assert calls.room(WEB, "alice") == 1
    calls.start(WEB, "alice", files=1)
    assert calls.room(WEB, "alice") == 0


def _round(calls: Calls, clock: Hands, took_s: float, size_bytes: int = 10 * MB) -> ActiveTransfer:
    """One call that fills what it is given: each of its files takes as long."""
    transfer = calls.start(WEB, "alice", files=KNOBS.maximum - 1)
    clock.now += took_s
    calls.end(transfer, [size_bytes] * transfer.concurrency)
    return transfer


def test_the_controller_steps_after_so_many_files_and_says_why() -> None:
    calls, clock = _calls("running")
    assert _round(calls, clock, 1.0).concurrency == 4
    [report] = calls.reports()
    assert (report.rate_mb_s, report.files_at_once) == (40.0, 4)
    assert "First measurement" in report.reason and report.state == "kept"
    _round(calls, clock, 0.5)
    [report] = calls.reports()
    assert (report.rate_mb_s, report.files_at_once) == (80.0, 5)
    assert (report.reason, report.state) == ("The rate rose from 40 to 80: 4 to 5.", "raised")
    _round(calls, clock, 2.0)
    assert (calls.level("https://dest"), calls.report("https://dest").state) == (4, "lowered")


def test_a_step_is_judged_by_what_began_after_it() -> None:
    calls, clock = _calls("running", replace(KNOBS, delay=3))
    old = calls.start(WEB, "bob", files=1)
    assert _round(calls, clock, 1.0).concurrency == 3
    assert calls.reports()[0].rate_mb_s == 40.0
    clock.now += 1000
    calls.end(old, [10 * MB] * 10)
    assert calls.reports()[0].rate_mb_s == 40.0


def test_places_that_stay_empty_are_no_measurement() -> None:
    calls, clock = _calls("running")
    for _ in range(4):
        transfer = calls.start(WEB, "alice", files=1)
        clock.now += 1.0
        calls.end(transfer, [10 * MB])
    [report] = calls.reports()
    assert (report.reason, report.state) == ("Only 1.0 of 4 places were used: no measurement.", "unmeasured")
    assert report.rate_mb_s == 0


def test_calls_that_failed_tell_nothing_about_the_rate() -> None:
    calls, clock = _calls("running")
    for _ in range(9):
        transfer = calls.start(WEB, "alice", files=9)
        clock.now += 1.0
        calls.end(transfer)
        calls.end(transfer, [10 * MB] * 9)
    assert calls.reports()[0].rate_mb_s == 0


def test_what_was_good_before_is_the_start() -> None:
    assert _calls("crowding", start=9)[0].level("https://dest") == 9
    assert _calls("crowding", start=99)[0].level("https://dest") == KNOBS.maximum
    assert _calls("crowding")[0].level("https://dest") == KNOBS.initial


def test_a_profile_of_the_server_is_the_start_where_nothing_else_is_known(tmp_path: Path) -> None:
    best = {"upload": Best(streams=2, concurrency=7, rate_bytes_per_s=1e6)}
    save(tmp_path, Profile("dest", "https", int(time.time()), best))
    assert _calls("crowding", profiles=tmp_path)[0].level("https://dest") == 7
    assert _calls("crowding", profiles=tmp_path, start=3)[0].level("https://dest") == 3
    assert _calls("crowding", profiles=tmp_path)[0].level("https://other") == KNOBS.initial


@pytest.mark.parametrize(("known", "used"), [(1, 1), (2, 2), (64, KNOBS.parallelism)])
def test_a_file_gets_no_more_streams_than_the_profile_of_the_server_says(tmp_path: Path, known: int, used: int) -> None:
    best = {"upload": Best(streams=known, concurrency=3, rate_bytes_per_s=1e6)}
    save(tmp_path, Profile("dest", "gsiftp", int(time.time()), best))
    calls, _ = _calls("crowding", profiles=tmp_path)
    assert KNOBS.parallelism > 2
    assert calls.start(GRID, "alice", files=9).parallelism == used
    assert calls.start(replace(GRID, server="gsiftp://other"), "alice", files=9).parallelism == KNOBS.parallelism


def test_no_more_is_asked_for_than_can_be_used() -> None:
    grants = Granted(8)
    calls, clock = _calls("crowding", grants=grants)
    calls.waiting(lambda: {"https://dest": 3})
    assert grants.noted[-1] == (3, 0, None)
    calls.waiting(lambda: {"https://dest": 500})
    assert grants.noted[-1] == (8, 0, None), "twice the present number, so that there is room for a step"
    _round(calls, clock, 1.0)
    assert grants.noted[-1] == (7, 0, 40.0)
    calls.waiting(dict)
    assert grants.noted[-1] == (0, 0, None)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 50), st.booleans(), st.booleans(), st.integers(0, 40)),
        max_size=40,
    ),
    st.sampled_from(["crowding", "running", "fixed"]),
)
def test_streams_never_pass_the_grant_of_their_start(
    starts: list[tuple[str, int, bool, bool, int]], controller: str
) -> None:
    """However calls start and end and grants change: nothing starts above the grant of that moment."""
    grants = Granted(0)
    calls, clock = _calls(controller, grants=grants)
    running: list[ActiveTransfer] = []
    for owner, files, multi_stream, end, streams in starts:
        grants.given = streams
        clock.now += 1
        if end and running:
            calls.end(running.pop(0), [MB] * files)
        target = replace(GRID, multi_stream=multi_stream)
        if calls.room(target, owner) > 0:
            running.append(calls.start(target, owner, files))
            assert sum(transfer.streams for transfer in running) <= streams
        elif not running:
            assert streams == 0, "something is granted, nothing runs, and nothing may start"


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50), st.integers(1, 20))
def test_places_used_are_between_one_and_the_places(sizes: list[int], concurrency: int) -> None:
    assert 0.999 <= concurrency_used(sizes, concurrency) <= min(concurrency, len(sizes)) + 1e-9


def test_the_tail_of_a_call_is_not_taken_for_a_slow_destination() -> None:
    assert concurrency_used([10 * MB] * 8, 4) == pytest.approx(4)
    assert concurrency_used([10 * MB] * 5, 4) == pytest.approx(2.5)


def test_an_unknown_controller_is_said() -> None:
    with pytest.raises(ConfigError, match="write one of crowding, running, fixed"):
        read_tuning(mapping_settings({"STAGEOUT_TUNING": "fast"}))
    assert read_tuning(mapping_settings({})).knobs.maximum == 16


def test_new_rules_begin_anew_only_where_they_differ() -> None:
    calls, clock = _calls("running")
    _round(calls, clock, 1.0)
    _round(calls, clock, 0.5)
    calls.new_rules(calls.rules)
    assert calls.level("https://dest") == 5
    calls.new_rules(replace(calls.rules, controller="fixed"))
    assert calls.level("https://dest") == 16


def test_new_rules_do_not_forget_what_runs() -> None:
    grants = Granted(8)
    calls, _ = _calls("crowding", grants=grants)
    calls.start(WEB, "alice", files=3)
    grants.noted.clear()
    calls.new_rules(replace(calls.rules, controller="fixed"))
    calls.waiting(dict)
    assert grants.noted == [(3, 3, None)] * 2
    assert (calls.level("https://dest"), calls.report("https://dest").tuning) == (8, "fixed")
    assert calls.room(WEB, "bob") == 5


def test_files_that_wait_are_not_counted_for_a_chooser_without_grants() -> None:
    calls, _ = _calls("crowding")
    calls.waiting(lambda: pytest.fail("counted"))


def test_streams_are_given_back_at_the_end() -> None:
    grants = Granted(8)
    asyncio.run(_calls("fixed", grants=grants)[0].close())
    asyncio.run(_calls("fixed")[0].close())
    assert grants.is_closed


@given(st.integers(1, 20), st.integers(1, 8))
def test_both_choosers_choose_the_same_with_fixed_numbers(maximum: int, parallelism: int) -> None:
    knobs = replace(KNOBS, maximum=maximum, parallelism=parallelism)
    adaptive = AdaptiveStreams("fixed", knobs, lambda server: 0)
    assert adaptive.choose("https://d", parallelism) == FixedStreams(knobs).choose("https://d", parallelism)
