"""A pilot that dies in the middle of a hand-over: it had said before what custodians may have, and when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon_site import FakeCollector, accepted, served
from manager_site import Site, made, run
from test_agent_daemon import JOB, MANAGER_KEY
from test_agent_daemon import Site as AccessPoint
from test_agent_decisions import JOB_KEY, seen
from test_handover import (
    _GIVE,
    ONE,
    ROUTER,
    SEED,
    TWO,
    Asked,
    Clock,
    asked,
    handed_over,
    site,
    waiting_for_a_slow_server,
)

from sandbox_manager.custody import queries
from sandbox_manager.delivery.handover import DrainTarget
from sandbox_manager.report import drain
from sandbox_manager.report.drain import Drain
from sandbox_manager.report.reporter import Reporter
from schedd_agent.liveness import LivenessTracker
from schedd_agent.model import ReportedSandbox
from stageout.core.classads import unparse_ad
from stageout.core.config import mapping_settings
from stageout.core.errors import ErrorClass
from stageout.core.states import State
from stageout.model.file import StoredFile
from stageout.model.job import Status
from stageout.movers.results import Answer, Ending, Failure, InCustody, SentFile, read_answers
from stageout.wire.custody import SandboxReport, sandbox_of
from stageout.wire.deposits import Receipt, read_receipt
from tests.polling import until

__all__ = ["asked", "site"]
HELD_UP = "        time.sleep(1000)\n        number = numbered"


# ---- the pilot -------------------------------------------------------------------------------------------------------


def test_access_points_are_told_before_anything_is_given_away(site: Site) -> None:
    told: list[tuple[int, int, float]] = []

    async def story() -> None:
        async with site.manager() as node:
            ledger = node.pipeline.store.ledger

            async def tell() -> None:
                begun = await ledger.read(queries.begun_hand_over)
                given = [call for call in site.calls() if "STAGEOUT_OVERLAY_SEED" in call["env"]]
                told.append((len(begun), len(given), node.pipeline.scheduler.leases.ends_in_s))

            node.pipeline.runner.announcer.add(tell)
            await waiting_for_a_slow_server(site, node, "1.0", {f"overlay://h/ok/{name}": b"1" * 5000 for name in "ab"})
            assert told == [] and node.pipeline.scheduler.leases.ends_in_s == 0
            await Drain(node.pipeline, node.clock, 600, ROUTER).run()

    run(story())
    ((begun, given, ends_in_s), *_) = told
    assert (begun, given) == (2, 0)
    assert 500 < ends_in_s < 700


def test_the_report_says_what_may_be_away_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is out before the plugin runs, and says of a sandbox that is at work what custodians may have of it."""
    monkeypatch.setattr(drain, "_OWN_SHARE", 0.0)  # the hand-over begins at once, and has all of the grace
    with made({"STAGEOUT_PILOT": "true", "STAGEOUT_PILOT_GRACE": "130", "STAGEOUT_PILOT_ROUTER": ROUTER}) as site:
        plugin = site.write_plugin("copy_plugin", "copy,overlay")
        text = plugin.read_text()
        line = next(line for line in text.splitlines() if line.startswith("    target = "))
        give = _GIVE.replace("        number = numbered", HELD_UP)
        site.write_script("copy_plugin", text.replace(line, line + give))

        async def story() -> None:
            async with served(site) as node:
                site.flag("down")
                await accepted(node, "overlay://h/ok/a", "overlay://h/ok/b", "copy://h/ok/c")
                await until(lambda: node.collector.last() == {"1.0": "RetryWait"}, "the first attempt")
                assert node.collector.reports[-1].ends_in_s == 0
                node.daemon.stop(fast=False)
                await until(lambda: any("STAGEOUT_OVERLAY_SEED" in call["env"] for call in site.calls()), "it")
                report = node.collector.reports[-1]
                (box,) = report.sandboxes
                (receipt,) = map(read_receipt, box.custody)
                assert (box.state, receipt.first, receipt.last, receipt.custodian) == ("Moving", 1, 2, ROUTER)
                assert box.files_only_here == 1, "c cannot be handed over"
                assert 80 < report.ends_in_s <= 150

        run(story())


class Busy(DrainTarget):
    """One that goes on while somebody writes its report. :ivar rows: what it begins then."""

    rows: Sequence[StoredFile] = ()

    def begun(self, sandbox: int) -> Mapping[int, Receipt]:
        found = super().begun(sandbox)
        self.begin(self.rows, 0)
        return found

    def only_here(self, files: Iterable[tuple[int, int]], begun: Collection[int]) -> int:
        self.begin(self.rows, 0)
        return super().only_here(files, begun)


@pytest.mark.parametrize("first", [0, 1])
def test_a_report_that_is_written_while_files_are_begun_leaves_none_out(first: int, site: Site) -> None:
    """One that is in no receipt and not told of as only here would count as delivered when the others are."""

    async def story() -> None:
        async with site.manager() as node:
            await waiting_for_a_slow_server(
                site, node, "1.0", {f"overlay://h/ok/{name}": b"1" * 5000 for name in "abc"}
            )
            box = node.box(node.facts("1.0"))
            assert box is not None
            rows = await node.pipeline.store.ledger.read(lambda db: list(queries.all_files(db, box.id)))
            node.pipeline.runner.tell_of(target := Busy(ROUTER, ""))
            target.begin(rows[:first], 0)
            target.rows = rows[:2]
            settings = mapping_settings(site.knobs)
            reporter = Reporter(node.pipeline, node.spool, FakeCollector(), node.clock, settings, -1, MANAGER_KEY)
            (written,) = await reporter._sandboxes([box])
            told = sandbox_of(json.loads(written.text))
            assert [receipt.last for receipt in map(read_receipt, told.custody)] == [1] * first
            assert told.files_only_here == (2 if first else 0)

    run(story())


def test_no_pause_follows_the_wait_for_a_plugin(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that had waited two minutes for a stopped plugin was the last for twenty minutes."""

    async def story() -> None:
        async with site.manager() as node:
            clock = Clock()

            async def plugins_ended() -> None:
                clock.now_s += 120.0

            monkeypatch.setattr(node.pipeline.runner, "plugins_ended", plugins_ended)
            settings = mapping_settings(site.knobs)
            collector = FakeCollector()
            collector.refuses = True
            reporter = Reporter(node.pipeline, node.spool, collector, clock, settings, -1, MANAGER_KEY)
            await reporter.publish()
            assert reporter._built_in_s == 0.0

    run(story())


@pytest.mark.parametrize(("lease_s", "most_s"), [(7200.0, 300.0), (600.0, 150.0)])
def test_a_report_that_waits_for_a_slow_disk_puts_the_next_one_off_by_one_interval(
    lease_s: float, most_s: float, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that is silent for longer is forgotten by the collector, and loses its leases."""

    async def story() -> None:
        async with site.manager() as node:
            clock = Clock()
            read = node.ledger.read

            async def read_slowly(question: Any) -> Any:
                clock.now_s += 120.0
                return await read(question)

            monkeypatch.setattr(node.ledger, "read", read_slowly)
            node.pipeline.scheduler.leases.mark_read("ap", 0, lease_s)
            settings = mapping_settings({**site.knobs, "STAGEOUT_REPORT_INTERVAL": "300"})
            collector = FakeCollector()
            collector.refuses = True
            reporter = Reporter(node.pipeline, node.spool, collector, clock, settings, -1, MANAGER_KEY)
            await reporter.publish()
            assert reporter._built_in_s == 120.0
            assert reporter._pause_s() == most_s

    run(story())


def test_the_slots_get_the_manager_s_heartbeat_while_reports_pause(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes without one, and a node whose spool is full takes jobs again."""
    monkeypatch.setattr("sandbox_manager.report.reporter._STATE_INTERVAL_S", 0.01)
    beats: list[float] = []

    async def story() -> None:
        async with site.manager() as node:
            settings = mapping_settings(site.knobs)
            collector = FakeCollector()
            collector.refuses = True
            reporter = Reporter(node.pipeline, node.spool, collector, Clock(), settings, -1, MANAGER_KEY)
            monkeypatch.setattr(reporter, "_pause_s", lambda: 300.0)
            monkeypatch.setattr(reporter, "write_state", lambda ad: beats.append(0.0 if ad is None else 1.0))
            reports = asyncio.ensure_future(reporter.run())
            await until(lambda: len(beats) > 5, "the figures")
            node.pipeline.store.changed.set()
            seen = len(beats)
            await until(lambda: len(beats) > seen + 5, "the figures after a change")
            reports.cancel()
            assert sum(beats) == 1, "the pause holds whatever changes"

    run(story())


# ---- the access point ------------------------------------------------------------------------------------------------


def moving(place: str = ROUTER, state: State = State.MOVING, change: int = 1, **more: int) -> ReportedSandbox:
    item = seen(state, custody=(f"{place} {SEED} 1-2 5000",), files_left=2, **more)
    return ReportedSandbox(item.manager_name, item.key, SandboxReport(**{**vars(item.sandbox), "change": change}))


class Watched(Asked):
    """An access point that can also see that the pilot has ended. :ivar gone: it has."""

    gone = False

    def look(self, *found: ReportedSandbox) -> SandboxReport:
        for _ in range(3):
            self.clock.now_s += 11
            self.one.with_answers({JOB_KEY: found} if found else {}, lambda manager: self.gone)
            if self.one._asking:
                self.one._asking.result()
        return self.one.with_answers({}, lambda manager: self.gone)[JOB_KEY][0].sandbox

    def look_once(self, item: ReportedSandbox) -> str:
        """State of what is reported, as the decisions see it."""
        return self.one.with_answers({JOB_KEY: [item]}, lambda manager: self.gone)[JOB_KEY][0].sandbox.state


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_while_the_pilot_is_at_work_nobody_is_asked(watched: Watched) -> None:
    watched.says = {ONE: ("unknown", ""), TWO: ("unknown", "")}
    assert watched.look(moving()) == moving().sandbox
    assert watched.look() == moving().sandbox, "its report may be gone from the collector for a moment"
    assert not watched.cancelled
    assert watched.look(handed_over()).state == "Moving", "the same change is the same news"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("one", "two", "only_here", "state", "withdrawn"),
    [
        ("done", "done", 0, "Delivered", False),
        ("done", "custody", 0, "HandedOver", False),
        ("done", "unknown", 0, "Lost", True),
        ("unknown", "unknown", 0, "Lost", True),
        ("custody", "unknown", 0, "HandedOver", True),
        ("done", "done", 1, "Lost", True),
        ("custody", "done", 1, "HandedOver", True),
        ("failed", "done", 0, "Failed", False),
    ],
)
def test_what_a_pilot_may_have_handed_over_is_asked_for_when_it_has_ended(
    one: str, two: str, only_here: int, state: str, withdrawn: bool, restarted: bool, watched: Watched
) -> None:
    """All of it arrives, or the rest is withdrawn before the job runs again."""
    watched.says = {ONE: (one, ""), TWO: (two, "")}
    item = moving(files_only_here=only_here)
    watched.look(item)
    if restarted:
        watched.one.close()
        watched.start()
    watched.gone = True
    box = watched.look() if restarted else watched.look(item)
    assert box.state == state, box.reason
    assert bool(watched.cancelled) is withdrawn
    if state == "HandedOver" and withdrawn:
        watched.says = {ONE: ("cancelled", ""), TWO: ("unknown", "")}
        assert watched.look().state == "Lost"


def test_a_pilot_that_comes_to_an_end_itself_is_believed(watched: Watched) -> None:
    watched.look(moving())
    done = ReportedSandbox("m1", "", SandboxReport(**{**vars(seen(State.RELEASED).sandbox), "change": 2}))
    assert watched.look_once(done) == "Released"
    watched.gone = True
    assert watched.look_once(done) == "Released"
    assert watched.one.with_answers({}) == {}


@pytest.mark.parametrize("state", [State.RETRY_WAIT, State.LOST, State.SUPERSEDED])
def test_what_was_begun_before_a_restart_is_withdrawn_when_the_pilot_ends_without_it(
    state: State, watched: Watched
) -> None:
    """A manager that was started again says nothing of it until it drains; a router may deliver it for a day."""
    watched.says = {ONE: ("unknown", ""), TWO: ("custody", "")}
    watched.look(moving(files_only_here=1))
    again = ReportedSandbox("m1", "", SandboxReport(**{**vars(seen(state, files_left=2).sandbox), "change": 2}))
    assert watched.look_once(again) == ("RetryWait" if state is State.RETRY_WAIT else "HandedOver")
    watched.gone = True
    assert watched.look().state == "HandedOver"
    assert TWO in watched.cancelled
    watched.says = {ONE: ("unknown", ""), TWO: ("cancelled", "")}
    assert watched.look().state == ("Lost" if state is State.RETRY_WAIT else state)


def test_what_nobody_would_be_asked_for_is_not_kept(watched: Watched) -> None:
    """Its job runs again when its manager is silent for too long, as without a router."""
    found = watched.one.with_answers({JOB_KEY: [moving("other.example.org:1")]})
    assert found[JOB_KEY][0].sandbox.state == "Moving"
    assert watched.one.with_answers({}) == {}


def test_an_end_that_was_announced_is_over_when_that_time_has_passed() -> None:
    view = LivenessTracker(60.0)

    def look(at_s: float, number: int, ends_in_s: int) -> bool:
        view.record_snapshot(at_s, 1e6 + at_s, [], ["m1"])
        view.record_announced_end("m1", number, ends_in_s)
        return view.has_ended("m1")

    assert [look(0, 1, 0), look(10, 2, 30), look(20, 2, 30), look(40, 2, 30)] == [False, False, False, True]
    assert not look(50, 3, 0), "it was started again"
    assert [look(60, 4, 30), look(200, 4, 30), look(210, 4, 30)] == [False, False, False], "nobody looked meanwhile"
    assert look(230, 4, 30)


@pytest.fixture
def access_point(tmp_path: Path) -> AccessPoint:
    return AccessPoint(tmp_path)


@pytest.mark.parametrize("state", [State.MOVING, State.RETRY_WAIT, State.FAILED])
def test_a_job_runs_again_as_soon_as_its_pilot_has_ended_without_a_word(
    state: State, access_point: AccessPoint
) -> None:
    """Its last report stays in the collector for two hours, and then the lease would begin."""
    key = MANAGER_KEY
    access_point.complete(key=key.public)
    access_point.report(State.MOVING, key=key, ends_in_s=100)
    access_point.passes(2)
    access_point.report(state, key=key, ends_in_s=100)
    access_point.passes(10)
    if state is not State.FAILED:
        assert access_point.job.status == Status.COMPLETED
    access_point.passes(15)
    assert access_point.queue.found[JOB].status == (Status.HELD if state is State.FAILED else Status.IDLE)


def test_a_new_run_is_not_held_up_by_a_pilot_that_has_ended(access_point: AccessPoint) -> None:
    key = MANAGER_KEY
    access_point.complete(key=key.public)
    access_point.report(State.MOVING, key=key, ends_in_s=100)
    access_point.passes(30)
    assert access_point.job.status == Status.IDLE
    access_point.complete(run=2, key=key.public)
    access_point.passes(2)
    orders = access_point.orders_for(key.public)
    assert [(one.action.value, one.run_number) for one in orders if one.run_number == 2] == [("confirm", 2)]


def test_what_was_delivered_by_then_stays_delivered(access_point: AccessPoint) -> None:
    key = MANAGER_KEY
    access_point.complete(key=key.public)
    access_point.report(State.MOVING, key=key, ends_in_s=10)
    access_point.report(State.DELIVERED, key=key, ends_in_s=10)
    access_point.passes(10)
    assert access_point.queue.left[JOB].status == Status.COMPLETED


# ---- what a plugin says of custodians --------------------------------------------------------------------------------

GIVEN = read_receipt(f"{ROUTER},other.example.org:9621 {SEED} 7-7 0")


def said(receipt: str, deposit: Receipt | None = GIVEN) -> Answer:
    facts = {"TransferFileName": "f", "TransferSuccess": True, "TransferFileBytes": 5}
    ad = unparse_ad({**facts, "DeveloperData": {"StageOutCustody": receipt}})
    (answer,) = read_answers([SentFile(Path("f"), "overlay://h/f", "f", 5, deposit)], ad, Ending(0))
    return answer


@pytest.mark.parametrize("places", [ROUTER, "other.example.org:9621", f"other.example.org:9621,{ROUTER}"])
def test_a_file_is_in_custody_of_routers_that_it_was_to_go_to(places: str) -> None:
    assert said(f"{places} {SEED} 7-7 99") == InCustody(f"{places} {SEED} 7-7 99")


@pytest.mark.parametrize(
    "receipt",
    [
        f"{ROUTER} {SEED} 8-8 99",
        f"{ROUTER} {SEED} 7-8 99",
        f"{ROUTER} {SEED[::-1]} 7-7 99",
        f"third.example.org:9621 {SEED} 7-7 99",
        f"{ROUTER},third.example.org:9621 {SEED} 7-7 99",
    ],
)
def test_a_receipt_of_something_else_counts_for_nothing(receipt: str) -> None:
    """Another file, or a custodian whom nobody asks, would make this one count as handed over."""
    for deposit, words in ((GIVEN, "is of something else"), (None, "as nobody had asked")):
        answer = said(receipt, deposit)
        assert isinstance(answer, Failure)
        assert answer.kind is ErrorClass.NOT_VERIFIED and words in answer.message


def test_the_owner_hears_of_a_receipt_that_is_of_something_else(site: Site) -> None:
    text = site.plugin.read_text()
    own = '(os.environ["STAGEOUT_OVERLAY_NUMBERS"])[requests.index((url, name))]'
    assert own in text
    site.write_script("copy_plugin", text.replace(own, '(os.environ["STAGEOUT_OVERLAY_NUMBERS"])[0]'))

    async def story() -> None:
        async with site.manager() as node:
            await waiting_for_a_slow_server(site, node, "1.0", {f"overlay://h/ok/{name}": b"1" * 5000 for name in "ab"})
            await Drain(node.pipeline, node.clock, 600, ROUTER).run()
            box = node.box(node.facts("1.0"))
            assert box is not None
            assert box.state is State.LOST and "is of something else than it was given" in box.reason

    run(story())
