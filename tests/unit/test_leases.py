"""Which output a manager may send: leases from the access point, and runs that are told apart by tickets."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from manager_site import AGENT, Site, made, run

from sandbox_manager.custody.orders import Refused
from sandbox_manager.intake.acceptance import Reservation
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report import flows
from sandbox_manager.report.orders_in import OrderReader
from sandbox_manager.report.reporter import Reporter
from sandbox_manager.scheduling.leases import Leases
from stageout.core.config import mapping_settings
from stageout.core.signing import SigningKey
from stageout.core.states import State
from stageout.wire.custody import Action, OrderSheet, silence_of_lost_s
from tests.polling import until


class Clock:
    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_700_000_000 + self.now_s


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as one:
        yield one


def _ledger() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
    return db


def test_a_lease_counts_from_the_making_of_the_report_that_was_heard() -> None:
    clock = Clock()
    leases = Leases(clock)
    leases.reported(7)
    clock.now_s += 50
    leases.mark_read("ap", 7, 100.0)
    assert leases.holds("ap")
    clock.now_s += 49.9
    assert leases.holds("ap")
    clock.now_s += 0.2
    assert not leases.holds("ap")
    leases.reported(8)
    leases.mark_read("ap", 8, 100.0)
    leases.mark_read("ap", 7, 100.0)
    assert leases.holds("ap"), "an old word takes nothing away"


def _short(clock: Clock, own_s: int = 100) -> Leases:
    leases = Leases(clock)
    leases.own_s = own_s
    return leases


def test_a_node_that_never_comes_back_gives_itself_a_shorter_lease() -> None:
    clock = Clock()
    leases = _short(clock)
    assert leases.reported(7) == 100
    leases.mark_read("ap", 7, 5400.0)
    assert leases.interval_s(300.0) == 25.0
    clock.now_s += 99.9
    assert leases.holds("ap")
    clock.now_s += 0.2
    assert not leases.holds("ap")
    leases.mark_read("brief", 7, 40.0)
    assert not leases.holds("brief"), "the agent's lease is shorter still"


def test_a_shorter_lease_ends_a_longer_one_that_runs() -> None:
    """The agent that reads the report waits only as long as it promises."""
    clock = Clock()
    leases = Leases(clock)
    assert leases.reported(7) == 0
    leases.mark_read("ap", 7, 5400.0)
    leases.own_s = 100
    clock.now_s += 1000
    assert leases.holds("ap"), "nothing is promised yet"
    assert leases.reported(8) == 100
    leases.mark_read("ap", 7, 5400.0)
    clock.now_s += 99.9
    assert leases.holds("ap")
    clock.now_s += 0.2
    assert not leases.holds("ap")


def test_a_longer_lease_counts_from_the_report_that_takes_the_promise_back() -> None:
    clock = Clock()
    leases = _short(clock)
    leases.reported(7)
    leases.mark_read("ap", 7, 5400.0)
    leases.own_s = 0
    assert leases.reported(8) == 0
    leases.mark_read("ap", 7, 5400.0)
    clock.now_s += 100.1
    assert not leases.holds("ap"), "the agent has read only the promise"
    leases.mark_read("ap", 8, 5400.0)
    assert leases.holds("ap")


@pytest.mark.parametrize(("lease_s", "silence_s"), [(60, 240), (900, 1200), (7200, 9600), (190, 253.3)])
def test_a_manager_is_waited_for_longer_than_it_sends(lease_s: int, silence_s: float) -> None:
    """Plugins end, clocks differ, and the kernel repeats what the network did not take for up to 205 s."""
    assert silence_of_lost_s(lease_s) == pytest.approx(silence_s, abs=0.1)


def test_a_lease_ends_while_the_machine_is_suspended() -> None:
    """The job may have run again meanwhile."""
    asleep_s = [50_000.0]
    leases = Leases(Clock(), lambda: asleep_s[0])
    leases.reported(7)
    leases.mark_read("ap", 7, 100.0)
    assert leases.holds("ap")
    assert leases.unleased() == ()
    asleep_s[0] += 101
    assert not leases.holds("ap")
    leases.mark_read("ap", 7, 100.0)
    assert leases.unleased() == ("ap",), "a word from before that is old"


def test_the_report_says_whose_lease_is_missing() -> None:
    clock, db = Clock(), _ledger()
    first = Leases(clock)
    first.want(db, "ap", 100.0)
    first.want(db, "free", 0.0)
    leases = Leases(clock)
    leases.load(db)
    assert leases.unleased() == ("ap",)
    assert not leases.changed()
    leases.reported(1)
    leases.mark_read("ap", 1, 100.0)
    assert leases.changed() and not leases.changed()
    assert leases.unleased() == ()
    clock.now_s += 100
    assert leases.changed()
    assert leases.unleased() == ("ap",)


def test_a_new_manager_has_no_lease_before_its_first_report_was_heard() -> None:
    db = _ledger()
    Leases(Clock()).want(db, "ap", 100.0)
    fresh = Leases(Clock())
    fresh.load(db)
    assert not fresh.holds("ap")
    fresh.mark_read("ap", 7, 100.0)
    assert not fresh.holds("ap"), "that report was its predecessor's"
    fresh.reported(1007)
    fresh.mark_read("ap", 1007, 100.0)
    assert fresh.holds("ap")
    assert fresh.holds("other"), "whose agent wants no lease"
    assert fresh.interval_s(300.0) == 25.0


@pytest.mark.parametrize(("lease_s", "lifetime_s"), [(60.0, 7200), (86_400.5, 86_401), (1e300, 2_592_000)])
def test_the_last_report_stays_in_the_collector_as_long_as_the_longest_lease(
    lease_s: float, lifetime_s: int, site: Site
) -> None:
    """An access point that was away for less than its lease still reads what became of its output."""
    last: list[Mapping[str, Any]] = []

    async def advertise(ad: Mapping[str, Any]) -> None:
        last.append(ad)

    async def story() -> None:
        async with site.manager() as node:
            node.pipeline.scheduler.leases.mark_read("ap", 0, lease_s)
            node.pipeline.scheduler.leases.mark_read("other", 0, 10.0)
            collector: Any = SimpleNamespace(advertise=advertise)
            settings = mapping_settings(site.knobs)
            key = SigningKey(b"k" * 32)
            reporter = Reporter(node.pipeline, node.spool, collector, node.clock, settings, -1, key)
            reporter.leave()
            await reporter.publish()
        assert [ad["ClassAdLifetime"] for ad in last] == [lifetime_s]

    run(story())


class _Key(NamedTuple):
    destination: int


def test_output_for_a_destination_that_is_gone_is_in_no_flow() -> None:
    queues = {_Key(7): SimpleNamespace(files=1, size_bytes=5)}
    registry = SimpleNamespace(backlog=SimpleNamespace(queues=queues), destinations={})
    pipeline: Any = SimpleNamespace(store=SimpleNamespace(registry=registry))
    assert not flows._waiting(pipeline)


def test_nothing_is_sent_without_a_lease_and_all_goes_on_with_the_next(site: Site) -> None:
    async def work() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://host/ok/a": b"a" * 10})
            await node.pipeline.apply_orders(OrderSheet(AGENT, "manager@ep", 1, (), lease_s=100.0, heard=1))
            await node.pipeline.store.ledger.write(lambda db: node.pipeline.scheduler.leases.want(db, "ap", 100.0))
            node.pipeline.scheduler.leases.mark_read("ap", 1, 100.0)
            await node.confirm(receipt)
            node.pipeline.store.wake.set()
            await until(lambda: "ap" in node.pipeline.scheduler.leases._ended, "the planner to look")
            assert site.delivered() == []
            node.pipeline.scheduler.leases.reported(2)
            node.pipeline.scheduler.leases.mark_read("ap", 2, 100.0)
            node.pipeline.store.wake.set()
            await node.until_state(State.RELEASED)

    run(work())


def test_a_run_that_was_numbered_anew_is_known_by_its_tickets(site: Site) -> None:
    """An access point that restarts raises NumShadowStarts of a run that goes on."""

    async def work() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://host/ok/a": b"a" * 10})
            later = replace(node.facts(), run=replace(node.facts().run, number=3))
            await node.confirm(receipt, facts=later)
            await node.until_state(State.RELEASED)
            assert site.delivered() == ["a"]

    run(work())


def test_the_same_number_with_other_tickets_is_another_run(site: Site) -> None:
    """An access point out of a backup uses numbers again: what the first of the two runs left is not sent."""

    async def work() -> None:
        async with site.manager() as node:
            site.flag("down")
            receipt = await node.hand_off({"copy://host/ok/a": b"a" * 10})
            await node.confirm(receipt)
            await node.order(Action.CONFIRM, tickets=["0" * 32], files=1)
            await node.until_state(State.SUPERSEDED)
            assert site.delivered() == []

    run(work())


def test_what_comes_after_the_decision_about_its_run_is_not_taken(site: Site) -> None:
    """Its plugin gave up waiting; otherwise the files would be sent, or stay in the spool for ever."""

    async def work() -> None:
        async with site.manager(moving=False) as node:
            await node.hand_off({"copy://host/ok/a": b"a" * 10})
            await node.order(Action.CANCEL)
            node.offer = lambda *facts, **more: Reservation(0)
            with pytest.raises(Refused, match="Cancelled"):
                await node.hand_off({"copy://host/ok/b": b"b" * 10})

    run(work())


@pytest.mark.parametrize(
    ("accepted_s_ago", "lease_s", "has_ended", "pause_s"),
    [
        (None, 0.0, False, 30.0),
        (10.0, 0.0, False, 5.0),
        (700.0, 0.0, False, 30.0),
        (None, 120.0, False, 20.0),
        (None, 120.0, True, 5.0),
        (10.0, 120.0, False, 5.0),
    ],
    ids=[
        "nothing-waits",
        "new-output-waits",
        "its-access-point-is-away",
        "a-sixth-of-a-lease",
        "lease-missing",
        "both",
    ],
)
def test_orders_are_looked_for_often_while_something_waits_for_them(
    accepted_s_ago: float | None, lease_s: float, has_ended: bool, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = Clock(), list[float]()
    leases = Leases(clock)
    if lease_s:
        leases.reported(1)
        leases.mark_read("ap", 1, lease_s)
    if has_ended:
        clock.now_s += lease_s + 1
    accepted_at = clock.wall_s() - (accepted_s_ago or 0)
    waiting = {} if accepted_s_ago is None else {1: SimpleNamespace(state=State.ACCEPTED, accepted_at=accepted_at)}
    other = {2: SimpleNamespace(state=State.MOVING, accepted_at=clock.wall_s())}
    pipeline: Any = SimpleNamespace(
        manager=SimpleNamespace(name="m"),
        scheduler=SimpleNamespace(leases=leases),
        store=SimpleNamespace(registry=SimpleNamespace(by_id={**other, **waiting})),
    )
    frozen_s = clock.now_s

    async def messages(_: str) -> list[Mapping[str, object]]:
        looks.append(clock.now_s)
        return []

    collector: Any = SimpleNamespace(messages=messages)

    async def sleep(seconds: float) -> None:
        clock.now_s += seconds
        if clock.now_s > frozen_s + 200:
            raise asyncio.CancelledError

    async def apply(_: object) -> None:
        if lease_s and not has_ended:  # the agent gives the lease again
            leases.reported(2)
            leases.mark_read("ap", 2, lease_s)

    nobody: Any = None
    reader = OrderReader(pipeline, nobody, nobody, collector, clock, lambda: 5.0)
    monkeypatch.setattr(reader, "_apply", apply)
    monkeypatch.setattr("sandbox_manager.report.orders_in.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(reader.run())
    assert {later - earlier for earlier, later in zip(looks[1:], looks[2:])} == {pause_s}


def test_a_lease_comes_after_the_orders_of_its_sheet() -> None:
    """An order that is not carried out yet may take away what the lease would let the manager send."""
    leases, seen = Leases(Clock()), list[bool]()
    leases.reported(1)
    problems = [OSError("the disk is full")]

    async def apply(_: OrderSheet) -> None:
        seen.append(leases.holds("ap"))
        if problems:
            raise problems.pop()

    pipeline: Any = SimpleNamespace(
        _apply=apply, scheduler=SimpleNamespace(leases=leases), store=SimpleNamespace(wake=asyncio.Event())
    )
    leases.mark_read("ap", 0, 100.0)  # its agent wants leases
    sheet = OrderSheet("ap", "ep", 1, (), heard=1, lease_s=100.0)
    with pytest.raises(OSError):
        asyncio.run(Pipeline.apply_orders(pipeline, sheet))
    assert not leases.holds("ap")
    asyncio.run(Pipeline.apply_orders(pipeline, sheet))
    assert leases.holds("ap")
    assert seen == [False, False]
