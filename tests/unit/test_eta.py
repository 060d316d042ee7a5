"""Expected ends of deliveries: bounds that hold for all rates and backlogs, and what a manager's report leads to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageout.cli.render import progress_lines
from stageout.cli.rows import destinations, merge
from stageout.core.eta import FILE_BYTES, Eta, at_least, estimate, latest, words
from stageout.wire.custody import FileReport, FlowReport, Report, Run, SandboxReport, ServerReport
from stageout.wire.expected import for_runs, for_servers, server_of
from tests.unit.test_cli_jobs import job

NOW = 1_800_000_000
MB = 1_000_000
SERVER = "https://dest"

amounts = st.floats(0, 1e15)
rates = st.floats(1e-3, 1e12)
spreads = st.floats(0, 5)
times = st.floats(-1e6, 1e6)


@given(amounts, amounts, rates, spreads, times, times, st.booleans())
def test_limits_are_in_order_and_never_in_the_past(
    low: float, more: float, rate: float, spread: float, starts_in_s: float, passed_s: float, is_blocked: bool
) -> None:
    found = estimate(
        low, low + more, rate, spread, starts_in_s=starts_in_s, passed_s=passed_s, is_blocked=is_blocked
    )  # fmt: skip
    assert found is not None and found.low_s >= 0
    assert (found.high_s is None) == is_blocked
    assert found.high_s is None or found.low_s <= found.high_s < float("inf")


@given(amounts, rates, st.floats(0, 3), st.floats(0, 2), st.floats(0, 1e9))
def test_more_spread_and_more_work_widen_the_estimate(
    work: float, rate: float, spread: float, more_spread: float, more_work: float
) -> None:
    first, wide = estimate(work, work, rate, spread), estimate(work, work, rate, spread + more_spread)
    later = estimate(work, work + more_work, rate, spread)
    assert first and wide and later and None not in (first.high_s, wide.high_s, later.high_s)
    assert wide.low_s <= first.low_s and (wide.high_s or 0) >= (first.high_s or 0)
    assert later.low_s == first.low_s and (later.high_s or 0) >= (first.high_s or 0)


@given(amounts, rates, spreads)
def test_the_usual_rate_lies_between_the_limits(work: float, rate: float, spread: float) -> None:
    found = estimate(work, work, rate, spread)
    assert found is not None and found.high_s is not None
    assert found.low_s <= min(work / rate, 1e8) <= found.high_s


def test_nothing_is_estimated_without_a_rate() -> None:
    assert estimate(1, 1, 0, 1) is None
    assert latest([]) is None and latest([Eta(1, 2), None]) is None
    assert latest([Eta(1, 9), Eta(3, 4)]) == Eta(3, 9)
    assert latest([Eta(1, None), Eta(3, 4)]) == Eta(3, None)


def test_a_part_that_is_not_known_leaves_no_upper_limit() -> None:
    assert at_least([]) is None and at_least([None]) is None
    assert at_least([Eta(1, 9), Eta(3, 4)]) == Eta(3, 9)
    assert at_least([Eta(1, 9), None]) == at_least([Eta(1, 9), Eta(0, None)]) == Eta(1, None)


def test_a_transfer_that_is_overdue_keeps_an_upper_limit() -> None:
    found = estimate(100, 100, 1, 0, passed_s=400)
    assert found == Eta(0, 100)


def box(number: int = 1, size_bytes: int = 9 * MB, state: str = "Confirmed", **changes: Any) -> SandboxReport:
    began_at = changes.pop("began_at", 0)
    url = changes.pop("url", f"{SERVER}/{number}")
    values: dict[str, Any] = {
        "job": f"ap#{number}.0#1", "number": 1, "owner": "alice@x", "state": state, "change": 1, "reason": "",
        "error_code": 0, "tickets": ("t",), "files_total": 1, "files_left": 1, "bytes_total": size_bytes,
        "bytes_left": size_bytes, "attempts": 0, "attempts_limit": 20, "next_attempt_at": 0, "accepted_at": NOW - 60,
        "files": (FileReport("f", url, size_bytes, state, began_at=began_at),), **changes,
    }  # fmt: skip
    return SandboxReport(**values)


def flow(rate: int = MB, **changes: Any) -> FlowReport:
    return FlowReport(**{"server": SERVER, "work_bytes_per_s": rate, "spread": 0.0, **changes})


def report(*boxes: SandboxReport, flows: tuple[FlowReport, ...] = (flow(),), **changes: Any) -> Report:
    return Report("ep", "", 1, NOW, {}, 0, boxes, flows=flows, **changes)


def middle(found: Report, one: SandboxReport, now: float = NOW) -> float:
    """Seconds in the middle of the estimate for a run."""
    low_s, high_s = for_runs(found, now, {one.run})[one.run]
    assert high_s is not None
    return (low_s * high_s) ** 0.5


def test_a_run_waits_for_its_owners_smaller_output_and_for_others_in_their_turns() -> None:
    small, own, large = box(1, 4 * MB), box(2, 9 * MB), box(3, 99 * MB)
    other, much = box(4, 3 * MB, owner="bob@x"), box(5, 10_000 * MB, owner="carol@x")
    assert middle(report(own), own) == pytest.approx(10)
    assert middle(report(small, own, large), own) == pytest.approx(15)
    assert middle(report(own, other), own) == pytest.approx(14)
    assert middle(report(own, much), own) == pytest.approx(20), "an owner with much more takes as many turns"


def test_running_transfers_share_the_rate_and_their_time_counts() -> None:
    own, other = box(1, 99 * MB, "Moving", began_at=NOW - 30), box(2, 49 * MB, "Moving", began_at=NOW - 5)
    assert middle(report(own), own) == pytest.approx(70, rel=0.02)
    assert middle(report(own, other), own) == pytest.approx(120, rel=0.02)
    waiting = box(3, 9 * MB)
    low_s, high_s = for_runs(report(waiting, other), NOW, {waiting.run})[waiting.run]
    assert low_s < 10 < 60 < (high_s or 0), "nobody knows how much of the other has arrived"


def test_the_age_of_a_report_counts() -> None:
    own = box(1, 99 * MB)
    assert middle(report(own), own, NOW + 40) == pytest.approx(60, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{"state": "Failed"}, {"state": "Delivered"}, {"paused": 1}, {"files_left": 0}, {"state": "HandedOver"}]
)
def test_output_that_is_not_on_its_way_has_no_estimate(changes: dict[str, Any]) -> None:
    own = box(**changes)
    assert for_runs(report(own), NOW, {own.run}) == {}


def test_without_a_rate_or_a_known_server_there_is_not_enough_data() -> None:
    own = box()
    assert for_runs(report(own, flows=(flow(rate=0),)), NOW, {own.run}) == {}
    assert for_runs(report(own, flows=()), NOW, {own.run}) == {}
    hidden = replace(own, files=())
    assert for_runs(report(hidden), NOW, {own.run}), "there is one server only"
    two = (flow(), flow(server="https://other"))
    assert for_runs(report(hidden, flows=two), NOW, {own.run}) == {}
    assert for_runs(report(own, flows=two), NOW, {Run("ap#9.0#1", 1, "alice")}) == {}


def test_output_for_two_servers_needs_the_slower_one() -> None:
    urls = (f"{SERVER}/a", "dav+https://Slow/b")
    files = tuple(FileReport("f", url, 9 * MB, "Confirmed") for url in urls)
    own = box(size_bytes=18 * MB, files=files, files_left=2, files_total=2)
    flows = (flow(), flow(rate=MB // 10, server="https://slow"))
    assert middle(report(own, flows=flows), own) == pytest.approx(100)
    assert [server_of(url) for url in urls] == [SERVER, "https://slow"]


def test_what_must_happen_first_leaves_the_upper_limit_open() -> None:
    away = ServerReport(SERVER, "open", "refused", 3, NOW - 60, NOW + 30)
    own = box()
    (found,) = for_runs(report(own, servers=(away,)), NOW, {own.run}).values()
    assert 30 < found.low_s <= 40 and found.high_s is None
    later = box(state="RetryWait", next_attempt_at=NOW + 200)
    (found,) = for_runs(report(later), NOW, {later.run}).values()
    assert 200 < found.low_s <= 210 and found.high_s is None
    (found,) = for_runs(report(own, unleased=("ap",)), NOW, {own.run}).values()
    assert found.high_s is None


def test_sizes_that_cannot_be_are_read_as_nothing() -> None:
    one = box()
    files = tuple(replace(one.files[0], size_bytes=size_bytes) for size_bytes in (-FILE_BYTES, -(10**15), 5))
    assert for_runs(report(replace(one, files=files[:1])), NOW, {one.run})
    assert for_runs(report(replace(one, files=files)), NOW, {one.run})


def test_a_server_has_the_time_of_its_whole_backlog() -> None:
    busy = flow(files_waiting=1, bytes_waiting=49 * MB, files_moving=1, bytes_moving=49 * MB)
    low_s, high_s = for_servers(report(flows=(busy,)), NOW)[SERVER]
    assert 40 < low_s < 50 and high_s is not None and 100 < high_s < 120
    assert for_servers(report(flows=(flow(),)), NOW) == {}
    assert for_servers(report(flows=(replace(busy, work_bytes_per_s=0),)), NOW) == {}


def test_many_sandboxes_are_no_trouble() -> None:
    boxes = [box(number, number * MB, owner=f"o{number % 50}@x") for number in range(1, 5001)]
    found = for_runs(report(*boxes), NOW, {one.run for one in boxes})
    assert len(found) == len(boxes)


def test_a_row_has_the_estimate_of_its_run() -> None:
    own = box(12, job="ap#12.0#1795251831")
    (row,) = merge([job(StageOutState="Confirmed")], [report(own)], NOW)
    assert row.eta_low_s is not None and row.eta_high_s is not None and row.eta_low_s <= 10 <= row.eta_high_s
    (row,) = merge([job(StageOutState="Confirmed")], [report(own)])
    assert (row.eta_low_s, row.eta_high_s) == (None, None)
    (row,) = merge([job(StageOutState="Failed", StageOutRun=1)], [report(own)], NOW)
    assert (row.eta_low_s, row.eta_high_s) == (None, None)


def test_a_bar_shows_when_output_is_expected() -> None:
    (row,) = merge([job(StageOutState="Confirmed")], [report(box(12, job="ap#12.0#1795251831"))], NOW)
    assert "files  expected in 9-12 s" in "\n".join(progress_lines([row], NOW, 120))
    assert "expected" not in "\n".join(progress_lines([replace(row, eta_low_s=None)], NOW, 120))


def test_destinations_have_the_figures_of_the_flow() -> None:
    busy = flow(files_waiting=2, bytes_waiting=8 * MB, tuning="kept", limit=4, streams=3, rate_bytes_per_s=900)
    (found,) = destinations([report(flows=(busy,))], NOW)
    assert (found.manager, found.server, found.tuning, found.limit, found.rate_bytes_per_s) == (
        "ep", SERVER, "kept", 4, 900,
    )  # fmt: skip
    assert found.eta_low_s is not None and found.eta_low_s <= (8 * MB + 2 * FILE_BYTES) / MB <= (found.eta_high_s or 0)


@pytest.mark.parametrize(
    ("low_s", "high_s", "text"),
    [(None, None, "-"), (0, 0, "0-1 s"), (3, 3, "3 s"), (12, 40, "12-40 s"), (240, 540, "4-9 min"), (5, 300, "0-5 min"),
     (7000, 20_000, "1-6 h"), (50_000, 900_000, "0-11 d"), (300, None, "> 5 min"), (30, None, "> 1 min"),
     (0, None, "> 1 min"), (10**8, 10**8, "-"), (10**8, None, "-"), (7200, 10**8, "> 2 h")],
)  # fmt: skip
def test_estimates_as_people_see_them(low_s: int | None, high_s: int | None, text: str) -> None:
    assert words(low_s, high_s) == text
