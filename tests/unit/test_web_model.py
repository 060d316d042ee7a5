"""The page's knowledge of the pool: reading of reports, counts, rates, history."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stageout.core.signing import SigningKey
from stageout.wire.custody import FlowReport, ServerReport
from stageout.wire.matters import Kind
from stageout_web import reader
from stageout_web.model import GROUP_OF, server_of, summary_of
from stageout_web.reader import FIRST_PARTS
from stageout_web.ring import COARSE_STEP_S, Ring
from stageout_web.views.jobs import _state, listing
from stageout_web.views.page import PageContext
from tests.unit.web_site import NOW, SCHEDD, Site, ad_of, agent_ad, job_name, notice_of, sandbox

from stageout.core.states import State  # isort: skip


Make = Callable[..., Site]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Function that makes a site of these ads."""
    with contextlib.ExitStack() as stack:

        def made(*ads: object) -> Site:
            site = Site(tmp_path, *ads)  # type: ignore[arg-type]
            stack.callback(site.ring.close)
            return site

        yield made


def run(site: Site, ticks: int = 1) -> None:
    for _ in range(ticks):
        asyncio.run(site.tick())


def test_every_state_has_a_group() -> None:
    assert set(GROUP_OF) == {state.value for state in State}


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("https://store.example.org:8443/a/b", "store.example.org:8443"), ("http://me:pass@host/x", "host"),
        ("s3://bucket", "bucket"), ("https://host?token=1", "host"), ("", ""),
    ],
)  # fmt: skip
def test_the_server_of_a_url_has_no_secrets(url: str, server: str) -> None:
    assert server_of(url) == server


def test_the_first_reading_finds_all_and_later_ones_only_what_is_new(make: Make) -> None:
    site = make(*(ad_of(node, sandbox(node), heard_at=NOW - node) for node in range(40)))
    run(site, 2)
    assert len(site.state.pool.nodes) == 40
    site.collector.sent = 0
    site.collector.put(ad_of(7, sandbox(7, "Moving"), number=2, heard_at=NOW + 5))
    run(site, 2)
    assert site.state.total.moving == 1
    assert site.collector.sent < 10, "an ad that was read comes again only within its second"


def late_by(site: Site, condition: str, *late: dict[str, object]) -> list[dict[str, object]]:
    """Let the collector receive an ad after each query with a condition. Return those that are still to come."""
    ask, waiting = site.collector.query, list(late)

    async def query(constraint: str, attributes: object, ad_type: str = "Any") -> object:
        found = await ask(constraint, (), ad_type)
        if waiting and condition in constraint:
            site.collector.put(waiting.pop())
        return found

    site.collector.query = query  # type: ignore[assignment,method-assign]
    return waiting


def test_a_report_that_comes_during_the_first_reading_is_not_missed(make: Make) -> None:
    site = make(*(ad_of(node, sandbox(node), heard_at=NOW - node) for node in range(100)))
    late_by(site, f"% {FIRST_PARTS} == 1 ", ad_of(3, sandbox(3, "Failed", code=72), number=2, heard_at=NOW + 64))
    run(site, 2)
    assert site.state.total.trouble == 1


def test_in_a_busy_pool_nodes_take_turns_and_no_report_is_missed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_READING_ADS", 50)
    site = make(*(ad_of(node, sandbox(node), heard_at=NOW) for node in range(200)))
    run(site)
    for round_ in range(2, 14):
        now = NOW + 5 * round_
        site.collector.put(*(ad_of(n, sandbox(n, "Moving"), number=round_, heard_at=now) for n in range(200)))
        site.collector.sent = 0
        run(site)
        assert site.collector.sent <= 60, "a reading is small"
    assert site.state.total.moving == 200
    assert min(node.number for node in site.state.pool.nodes.values()) >= 13 - 2 * 4
    new = ad_of(900, sandbox(900, "Failed", code=72), heard_at=NOW + 70)
    site.collector.put(new)
    run(site, 8)
    assert site.state.total.trouble == 1
    assert {node.number for node in site.state.pool.nodes.values()} == {13, 1}
    site.collector.asked.clear()
    run(site, 8)
    assert not re.search("StageOutManager [<>]", site.collector.asked[-1]), "a quiet pool is read at once"


def test_a_report_with_a_wrong_signature_is_not_shown(make: Make) -> None:
    forged = {**ad_of(1, sandbox(1)), "StageOutSignature": ad_of(2)["StageOutSignature"]}
    site = make(forged, ad_of(2, sandbox(2)))
    run(site)
    assert [node.host for node in site.state.pool.nodes.values()] == ["ep2.example.org"]


def test_a_report_without_a_signature_is_not_shown(make: Make) -> None:
    site = make(ad_of(1, sandbox(1), key=None), ad_of(2, sandbox(2)))
    run(site)
    assert [node.host for node in site.state.pool.nodes.values()] == ["ep2.example.org"]


def test_a_silent_collector_makes_no_silent_nodes_and_agents(make: Make) -> None:
    site = make(*(ad_of(node, sandbox(node)) for node in range(1, 6)))
    run(site)
    site.collector.problem = "no route"
    run(site, 160)
    assert site.state.matters == []
    site.collector.problem = ""
    site.collector.put(ad_of(1, sandbox(1), number=2, heard_at=NOW + 810))
    run(site)
    assert site.state.matters == [], "the others may not have sent a report to the new collector yet"
    site.collector.agents = [agent_ad(SCHEDD, NOW + 1600)]
    run(site, 160)
    assert len([matter for matter in site.state.matters if matter.kind is Kind.SILENT_NODE]) == 5


def test_a_slow_interval_makes_no_silent_nodes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node reports every 300 s. The page reads every 60 s, and the nodes take turns."""
    monkeypatch.setattr(reader, "_READING_ADS", 1)
    site = make(*(ad_of(node, sandbox(node)) for node in range(30)))
    site.state.set_interval(60)
    for minute in range(60):
        now_at = int(site.clock.wall_s()) + 60
        if minute % 5 == 0:
            site.collector.put(*(ad_of(n, sandbox(n), number=minute + 1, heard_at=now_at) for n in range(30)))
        site.collector.agents = [agent_ad(SCHEDD, now_at)]
        asyncio.run(site.tick(60))
        assert site.state.matters == []


def test_the_newest_notice_of_an_agent_counts(make: Make) -> None:
    site = make(ad_of(1, sandbox(1)))
    site.collector.agents = [agent_ad(SCHEDD, at) for at in (NOW, NOW - 400)]
    run(site)
    assert site.state.matters == []


def test_two_keys_of_one_name_are_two_nodes(make: Make) -> None:
    site = make(ad_of(1, sandbox(1)))
    run(site)
    site.collector.put(ad_of(1, sandbox(2), heard_at=NOW + 1, key=SigningKey(b"o" * 32)))
    run(site)
    assert len(site.state.pool.nodes) == 2


def test_reports_in_slot_ads_count_too(make: Make) -> None:
    site = make()
    ad = {
        **ad_of(1, sandbox(1)),
        "MyType": "Machine",
        "Name": "slot1@ep1",
        "StageOutDataSlots": 5,
        "StageOutAccept": False,
    }
    site.collector.slots = [ad]
    run(site)
    assert site.state.total.waiting == 1
    figures = site.state.pool.figures["manager@ep1.example.org"]
    assert (figures.data_slots, figures.accepts) == (5, False)


def test_deliveries_are_counted_once_and_survive_a_restart(make: Make) -> None:
    site = make(ad_of(1, sandbox(1, "Moving"), sandbox(2, "Moving"), sandbox(3, "Confirmed")))
    run(site)
    assert site.state.delivered == (0, 0)
    done = sandbox(1, "Delivered", files_left=0, bytes_left=0)
    half = sandbox(2, "Moving", bytes_left=400)
    site.collector.put(ad_of(1, done, half, sandbox(3, "Confirmed"), number=2, heard_at=NOW + 5))
    run(site)
    assert site.state.delivered == (1, 1000)
    assert site.state.rates.of("store.example.org") == pytest.approx(1600 / 60)
    # The manager forgets both: one was counted, the other was sent meanwhile, and the third was given up.
    site.collector.put(ad_of(1, number=3, heard_at=NOW + 10))
    run(site)
    assert site.state.delivered == (2, 2000)
    run(site, 14)
    assert site.state.rates.total == 0
    site.ring.close()
    again = make()
    run(again)
    assert again.state.delivered == (2, 2000)


def test_a_silent_node_with_output_stays_and_an_idle_one_goes(make: Make) -> None:
    site = make(ad_of(1, sandbox(1)), ad_of(2))
    run(site)
    site.collector.ads.clear()
    asyncio.run(site.tick(1000))
    assert [node.host for node in site.state.pool.nodes.values()] == ["ep1.example.org"]
    assert [(one.kind, one.age_s(site.state.pool.now_at)) for one in site.state.matters if "ep1" in one.title] == [
        (Kind.SILENT_NODE, 1000)
    ]
    asyncio.run(site.tick(7000))
    assert not site.state.pool.nodes


def test_matters_say_what_to_do(make: Make) -> None:
    away = ServerReport("gone.example.org", "open", "refused", 3, NOW - 600, NOW + 30)
    flow = FlowReport("gone.example.org", files_waiting=1)
    old = sandbox(5, "Accepted", accepted_at=NOW - 4000)
    failed = [sandbox(number, "Failed", code=72) for number in (1, 2)]
    site = make(ad_of(1, *failed, sandbox(3, "Lost"), old, servers=(away,), more={"flows": (flow,)}))
    run(site)
    titles = [matter.title for matter in site.state.matters]
    assert "2 outputs for store.example.org failed. Your quota at the destination is used up." in titles
    assert any(title.startswith("gone.example.org cannot be reached from 1 node") for title in titles)
    assert f"1 output of {SCHEDD} without confirmation for more than an hour." in titles
    assert all(matter.action for matter in site.state.matters)
    site.collector.agents = []
    asyncio.run(site.tick(60))
    assert any(f"agent of {SCHEDD} sends no notices" in matter.title for matter in site.state.matters)


def test_a_daemon_that_does_not_answer_is_a_problem_and_the_figures_stay(make: Make) -> None:
    site = make(ad_of(1, sandbox(1)))
    run(site)
    site.collector.problem, site.queue.problem = "no route", "away"
    run(site)
    assert site.state.problems == {"collector": "no route", "schedd": "away"}
    assert site.state.total.waiting == 1
    site.collector.problem = site.queue.problem = ""
    run(site)
    assert not site.state.problems


def test_the_files_of_a_sandbox_come_out_of_the_packed_report(make: Make) -> None:
    site = make(ad_of(1, sandbox(1, "Failed", code=72)))
    run(site)
    [(node, box)] = site.state.pool.find(job_name(1))
    [said] = node.report().sandboxes
    assert (said.job, said.number) == (box.job, box.number)
    assert said.files[0].error_code == 72


def test_memory_of_a_sandbox(make: Make) -> None:
    """100,000 sandboxes on 10,000 nodes may take 150 MB of the 250 MB that the whole daemon may have."""
    ads = [ad_of(node, *(sandbox(10 * node + one) for one in range(10))) for node in range(100)]
    site = make()
    run(site)
    gc.collect()
    tracemalloc.start()
    site.collector.put(*ads)
    del ads
    site.collector.put(*(replace_heard(ad) for ad in list(site.collector.ads.values())))
    before, _ = tracemalloc.get_traced_memory()
    run(site)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(site.state.pool.nodes) == 100
    assert (after - before) / 1000 < 1500


def replace_heard(ad: object) -> dict[str, object]:
    assert isinstance(ad, dict)
    return {**ad, "LastHeardFrom": NOW + 1}


def test_equal_texts_are_kept_once() -> None:
    one, two = summary_of(sandbox(1)), summary_of(replace(sandbox(2), owner="".join(["alice@", "example.org"])))
    assert one.owner is two.owner
    assert one.server is two.server
    assert one.bytes_left is one.bytes_total


# ---- history ---------------------------------------------------------------------------------------------------------


def test_the_ring_keeps_an_hour_in_detail_and_a_month_in_steps(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring.sqlite")
    begin = NOW // COARSE_STEP_S * COARSE_STEP_S
    for at in range(begin, begin + 3 * 3600, 5):
        ring.add(at, {"waiting": at - begin})
    end = begin + 3 * 3600 - 5
    fine = ring.series(["waiting", "nothing"], end, 3600)
    assert len(fine[0]) == 721
    assert fine[0][-1] == end
    assert fine[1][-1] == end - begin
    assert set(fine[2]) == {None}
    coarse = ring.series(["waiting"], end, 86400)
    assert len(coarse[0]) == 35
    assert coarse[1][0] == pytest.approx(147.5)
    ring.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "ring.sqlite")) as db:
        [rows] = db.execute("SELECT count(*) FROM fine").fetchone()
    assert rows <= 720 + COARSE_STEP_S // 5


def test_a_damaged_ring_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ring.sqlite"
    path.write_bytes(b"no database at all" * 100)
    ring = Ring(path)
    ring.add(NOW, {"waiting": 1})
    assert ring.series(["waiting"], NOW, 60) == [[NOW], [1]]
    ring.close()


@pytest.mark.parametrize("problem", ["database is locked", "database or disk is full"])
def test_a_ring_that_cannot_be_opened_now_keeps_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    path = tmp_path / "ring.sqlite"
    with contextlib.closing(Ring(path)) as ring:
        ring.add_deliveries("2027-01-15", 5, 50)

    def fails(path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError(problem)

    with monkeypatch.context() as patched:
        patched.setattr("stageout_web.ring._opened", fails)
        ring = Ring(path)
        with pytest.raises(sqlite3.OperationalError, match=problem):
            ring.deliveries("2027-01-15")
    assert ring.deliveries("2027-01-15") == (5, 50)
    ring.close()


def test_a_ring_of_an_unknown_schema_is_replaced(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "ring.sqlite")) as db:
        db.execute("CREATE TABLE coarse (other TEXT)")
    with contextlib.closing(Ring(tmp_path / "ring.sqlite")) as ring:
        ring.add(NOW, {"waiting": 1})
        assert ring.series(["waiting"], NOW, 60) == [[NOW], [1]]


def test_a_full_disk_is_a_problem_and_the_page_goes_on(make: Make) -> None:
    site = make(ad_of(1, sandbox(1, "Moving")))
    run(site)
    site.ring._db.execute("PRAGMA query_only = ON")
    site.collector.put(ad_of(1, sandbox(1, "Delivered", bytes_left=0), number=2, heard_at=NOW + 5))
    run(site)
    assert "readonly" in site.state.problems["history"]
    assert site.state.delivered == (1, 1000), "figures stay in memory"
    run(site)
    assert not site.state.problems
    assert site.ring.deliveries(site.state._day) == (1, 1000), "the next reading saves them"


def test_the_largest_numbers_of_a_report_are_added(make: Make) -> None:
    boxes = [sandbox(number, "Moving", bytes_total=2**63 - 1, bytes_left=2**62) for number in (1, 2)]
    site = make(ad_of(1, boxes[0]), ad_of(2, boxes[1]))
    run(site)
    for node, box in enumerate(boxes, 1):
        done = replace(box, state="Delivered", bytes_left=0)
        site.collector.put(ad_of(node, done, number=2, heard_at=NOW + 5))
    run(site, 2)
    assert site.state.delivered[0] == 2
    assert not site.state.problems


def test_pilots_that_have_gone_leave_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_CHECKSUMS_SPARE", 10)
    site = make()
    run(site)
    for round_ in range(1, 6):
        site.collector.ads.clear()
        site.collector.put(*(ad_of(100 * round_ + node, heard_at=NOW + 1000 * round_) for node in range(20)))
        asyncio.run(site.tick(1000))
    assert len(site.state.pool.nodes) == 20
    assert len(site.state._reader._checksums) <= 60


def test_output_whose_job_has_left_the_queue_is_a_matter_and_has_a_mark(make: Make) -> None:
    site = make(
        ad_of(1, *(sandbox(number, state) for number, state in ((1, "Failed"), (2, "RetryWait"), (3, "Moving"))))
    )
    left = [[job_name(1), "alice@example.org"], [job_name(2), "alice@example.org"], [job_name(3), "bob@x"], [5], "odd"]
    site.collector.agents = [notice_of(SCHEDD, left={"Failed": 1, "RetryWait": 1, "Odd": 9}, left_jobs=left)]
    run(site)
    title = f"2 outputs of jobs that have left the queue of {SCHEDD}: 1 failed, 1 waiting to retry."
    (matter,) = (one for one in site.state.matters if one.title == title)
    assert (matter.outputs, "stageout status --all" in matter.action) == (2, True)
    found = listing(PageContext(), site.state, matter.query)
    assert (len(found), sorted(box.state for _, box in found.rows())) == (2, ["Failed", "RetryWait"])
    assert len(listing(PageContext(), site.state, {})) == 3
    pairs = sorted(site.state.pool.sandboxes(), key=lambda pair: pair[1].job)
    assert ["job has left the queue" in str(_state(site.state.pool, *pair)) for pair in pairs] == [True, True, False]
    site.collector.agents = [notice_of(SCHEDD)]
    asyncio.run(site.tick(60))
    assert [one for one in site.state.matters if one.kind is Kind.LEFT] == []
    assert not any(site.state.pool.has_left(box) for _, box in site.state.pool.sandboxes())
