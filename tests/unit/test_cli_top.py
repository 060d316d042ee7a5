"""``stageout top``: its figures, its questions, and what it does without a terminal."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stageout.cli import top
from stageout.cli.exits import Unavailable
from stageout.cli.jobs import Job
from stageout.cli.main import build_parser
from stageout.cli.overview import Rates, as_json, groups_of, lines
from stageout.cli.rows import Row, merge
from stageout.core.classads import ClassAd
from stageout.wire.custody import Report, ServerReport
from tests.unit.test_cli_jobs import ad
from tests.unit.test_cli_status import box

MB = 10**6


def row(number: int, state: str, left_mb: int, cluster: int = 7, reason: str = "") -> Row:
    stats = ClassAd({"STAGEOUTFilesCountLastRun": 2, "STAGEOUTSizeBytesLastRun": 10 * MB})
    found = ad(
        ClusterId=cluster, ProcId=number, GlobalJobId=f"ap#{cluster}.{number}#1", StageOutState=state, StageOutRun=1,
        TransferOutputStats=stats, StageOutBytesLeft=left_mb * MB, StageOutFilesLeft=1 if left_mb else 0,
        StageOutReason=reason,
    )  # fmt: skip
    return merge([Job.from_ad(found)], [])[0]


SERVERS = {"7.0": "a:443", "7.1": "a:443", "7.2": "b:443", "8.0": "a:443"}


def test_jobs_are_counted_by_cluster_and_server() -> None:
    rows = [row(0, "Moving", 8), row(1, "RetryWait", 10), row(2, "Delivered", 0), row(0, "Confirmed", 10, 8)]
    first, second, third = groups_of(rows, SERVERS)
    assert (first.key[0], first.key[2], dict(first.jobs)) == (7, "a:443", {"moving": 1, "retry": 1})
    assert (first.bytes_left, first.bytes_total, first.files_left) == (18 * MB, 20 * MB, 2)
    assert (second.key[0], dict(second.jobs)) == (8, {"waiting": 1})
    assert (third.key[2], dict(third.jobs)) == ("b:443", {"delivered": 1})
    assert as_json(first)["waiting"] == 0


def test_rates_are_bytes_that_arrived_and_unknown_at_first() -> None:
    rates = Rates()

    def rate(now_s: float, left_mb: int) -> float | None:
        rows = [row(0, "Moving", left_mb)]
        (group,) = groups_of(rows, SERVERS)
        rates.take(now_s, rows, SERVERS, [group])
        return group.rate

    assert rate(0, 10) is None
    assert rate(5, 10) is None
    assert rate(10, 5) == 5 * MB / 10
    assert rate(40, 5) == 5 * MB / 40
    assert rate(90, 5) is None


def test_slow_daemons_do_not_raise_the_rate() -> None:
    rates = Rates()
    for now_s, left_mb in ((0, 10), (200, 5)):
        rows = [row(0, "Moving", left_mb)]
        (group,) = groups_of(rows, SERVERS)
        rates.take(now_s, rows, SERVERS, [group])
    assert group.rate == 5 * MB / 200


def test_what_is_cancelled_replaced_or_unreported_does_not_wait() -> None:
    for state, kind in (("Cancelled", "ended"), ("Superseded", "ended"), ("None", "unreported")):
        (group,) = groups_of([row(0, state, 10)], SERVERS)
        assert dict(group.jobs) == {kind: 1}
        assert as_json(group)[kind] == 1


def test_the_table_shows_sums_and_frequent_reasons() -> None:
    rows = [*(row(number, "RetryWait", 10, 8, "507: no space") for number in range(3)), row(0, "Failed", 10, 7, "403")]
    shown = lines(groups_of(rows, {}), rows, ["a gap"])
    assert shown[:2] == ["4 jobs in 2 clusters; 4 files, 40.0 MB still to deliver", "Note: a gap"]
    assert shown[-2:] == ["3 jobs: 507: no space", "1 job: 403"]
    assert lines([], [], []) == ["0 jobs in 0 clusters; 0 files, 0 B still to deliver"]


class Site:
    """A schedd and a collector that count their questions."""

    def __init__(self, *ads: ClassAd) -> None:
        self.ads, self.is_away = ads, False
        self.asked: list[tuple[str, Any]] = []
        self.told: tuple[Report, ...] = ()
        self.agent_at = int(time.time())

    def jobs_with_outputs(self, owner: str | None) -> list[tuple[Job, ClassAd]]:
        self.asked.append(("schedd", owner))
        return [(Job.from_ad(one), one) for one in self.ads]

    def name(self) -> str:
        return "ap"

    def reports(self, managers: Any) -> list[Report]:
        self.asked.append(("collector", managers))
        if self.is_away:
            raise Unavailable("no collector")
        return list(self.told)

    def heard(self, managers: set[str]) -> set[str]:
        self.asked.append(("collector", managers))
        return {report.manager for report in self.told}

    def agent_heard_at(self, schedd: str) -> int:
        self.asked.append(("collector", schedd))
        return self.agent_at

    def look(self) -> top.Look:
        site: Any = self
        return top.look(site, site, "alice")


def test_daemons_get_few_questions() -> None:
    site = Site(ad(StageOutManager="m1,m2", OutputDestination="davs://a/d", TransferOutput="x"))
    assert site.look().servers == {"12.0": "a:443"}
    both = {"m1", "m2"}
    assert site.asked == [("schedd", "alice"), ("collector", both), ("collector", both), ("collector", "ap")]
    site = Site()
    assert (site.look().rows, site.asked) == ([], [("schedd", "alice")])


def test_an_absent_agent_silent_nodes_and_servers_that_do_not_answer_are_named() -> None:
    """As in ``stageout status``."""
    site = Site(ad(StageOutManager="m1"), ad(ProcId=1, GlobalJobId="ap#12.1#1", StageOutManager="m2"))
    site.agent_at -= 720
    away = ServerReport("https://dest", "open", "connection refused", 3, int(time.time()) - 200, 0)
    site.told = (Report("m1", "", 5, int(time.time()), {}, 0, (box(),), (away,)),)
    agent, server, node = site.look().notes
    assert agent.startswith("the schedd agent of ap does not answer (last heard of 12m")
    assert server.startswith("https://dest cannot be reached from m1 for 3m2") and "connection refused" in server
    assert node.startswith("nothing was heard of m2 for")


def test_without_the_collector_the_queue_counts() -> None:
    site = Site(ad(StageOutManager="m1"))
    site.is_away = True
    seen = site.look()
    assert (len(seen.rows), "from the job queue only" in seen.notes[0]) == (1, True)


def test_several_servers_are_said_to_be_several() -> None:
    remaps = "b = http://b/x"
    ads = ClassAd({"OutputDestination": "davs://a/d", "TransferOutput": "a,b", "TransferOutputRemaps": remaps})
    assert top.server_text(ads) == "several"
    assert top.server_text(ClassAd()) == ""


def test_ctrl_c_is_the_ordinary_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([top.Look([row(0, "Moving", 5)], SERVERS, []), Unavailable("away")])

    def ask() -> top.Look:
        seen = next(looks, None)
        if seen is None:
            raise KeyboardInterrupt
        if isinstance(seen, Unavailable):
            raise seen
        return seen

    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    assert top._live(ask, 2) == 0
    shown = capsys.readouterr().out
    assert "1 job in 1 cluster" in shown
    assert "F\x1b[Jstageout: away\n" in shown


def test_slow_daemons_are_asked_less_often() -> None:
    assert (top.rest_s(3, 0.1), top.rest_s(3, 2)) == (3, 20)


@pytest.mark.parametrize("delay", ["1", "61", "nan", "x"])
def test_the_delay_has_bounds(delay: str) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser("top").parse_args(["top", "-d", delay])
    assert ended.value.code == 64
