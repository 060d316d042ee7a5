"""Clocks of nodes, collector and this machine that disagree: what is shown is told by the clock of who looks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stageout.cli import condor, render
from stageout.cli.clocks import collector_ahead_s, shifted
from stageout.cli.condor import Pool
from stageout.cli.request import agent_silence_s
from stageout.cli.rows import merge
from stageout.core.classads import ClassAd
from stageout.wire.clocks import ahead_of_collector_s
from stageout.wire.custody import AGENT_AD, Report, ServerReport, report_ad
from stageout.wire.deposits import Holding
from tests.unit.test_cli_jobs import job
from tests.unit.test_cli_status import NOW, box, report

TEN_MINUTES_S = 600
SKEWS_S = (0, TEN_MINUTES_S, -TEN_MINUTES_S, 86400 * 400)


class _Collector(Pool):
    """A collector whose clock is wrong by so much, with ads that came in by that clock."""

    def __init__(self, ahead_s: int, ads: Sequence[dict[str, Any]]) -> None:
        super().__init__("collector.example.org")
        self.now, self.found, self.questions = int(NOW) + ahead_s, ads, 0

    def ads(self, wanted: str, projection: Sequence[str] = ()) -> list[ClassAd]:
        self.questions += 1
        at = re.search(r"time\(\) >= (\d+)", wanted)
        if at:
            return [ClassAd()] if self.now >= int(at[1]) else []
        return [ClassAd(ad) for ad in self.found]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condor.time, "time", lambda: NOW)


@pytest.mark.parametrize("ahead_s", [0, 3, -3, 6, -6, 7, 599, 600, -600, -601, 86400 * 365, -86400 * 365, -int(NOW)])
def test_the_collectors_clock_is_found_out_by_questions(ahead_s: int) -> None:
    asked: list[int] = []

    def is_at_least(by_s: int) -> bool:
        asked.append(by_s)
        return ahead_s >= by_s

    assert collector_ahead_s(is_at_least) == (ahead_s if abs(ahead_s) > 5 else 0)
    assert len(asked) <= (2 if abs(ahead_s) <= 5 else 60)


def test_a_collector_that_says_nothing_of_its_clock_moves_no_times() -> None:
    assert collector_ahead_s(lambda by_s: False) == 0


@pytest.mark.parametrize("node_s", SKEWS_S)
@pytest.mark.parametrize("collector_s", SKEWS_S)
@pytest.mark.parametrize("is_slot", [False, True])
def test_what_is_shown_of_a_node_whose_clock_is_wrong_is_as_of_any_other(
    node_s: int, collector_s: int, is_slot: bool
) -> None:
    away = ServerReport("https://dest", "open", "refused", 3, int(NOW) - 200, int(NOW) + 20)
    held = (str(Holding("r1:1", 1, 5, int(NOW) - 50)),)
    right = replace(report(box(holdings=held)), servers=(away,), sent_at=int(NOW) - 9)
    ad = {**report_ad(shifted(right, node_s)), "LastHeardFrom": int(NOW) - (2 if is_slot else 9) + collector_s}
    if is_slot:
        ad.update(MyType="Machine", MyCurrentTime=int(NOW) - 2 + node_s)
    pool = _Collector(collector_s, [ad])
    assert pool.reports() == [right]
    assert render.server_notes(pool.reports(), NOW)[0].startswith(
        "https://dest cannot be reached from ep1 for 3m20s (open"
    )
    (row,) = merge([job()], pool.reports())
    shown = render.job_details(row, NOW)
    assert "  next      in 3m20s" in shown and "  as of     9s ago" in shown
    assert pool.questions < 70, "the collector's clock is asked for once"


def test_what_was_on_its_way_for_some_seconds_says_nothing_about_clocks() -> None:
    for came_s, ahead_s in ((29, 0), (31, -31)):
        ad = ClassAd({**report_ad(report()), "LastHeardFrom": report().sent_at + came_s})
        assert ahead_of_collector_s(ad) == ahead_s
    assert ahead_of_collector_s(ClassAd(report_ad(report()))) == 0


def test_of_no_time_none_is_made() -> None:
    idle = Report("ep1", "", 1, int(NOW), {}, 0, (box(next_attempt_at=0, files=()),), ())
    (moved,) = shifted(idle, -5).sandboxes
    assert (moved.next_attempt_at, moved.accepted_at) == (0, idle.sandboxes[0].accepted_at - 5)


@pytest.mark.parametrize("collector_s", SKEWS_S)
def test_for_how_long_an_agent_is_silent_is_told_by_one_clock(collector_s: int) -> None:
    """The access point's own clock, by which it says when it sent its notice, does not count."""
    queue: Any = type("Queue", (), {"name": lambda self: "ap"})()
    notice = {"MyType": AGENT_AD, "StageOutSentAt": 1, "LastHeardFrom": int(NOW) - 40 + collector_s}
    assert agent_silence_s(queue, _Collector(collector_s, [notice]), NOW) == 40
    assert agent_silence_s(queue, _Collector(collector_s, []), NOW) == float("inf")
