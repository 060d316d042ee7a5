"""Pools to which jobs flock: what the agent sees of them, what it sends there, and what their silence means."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

import pytest

from schedd_agent.collector import CollectorSnapshot
from schedd_agent.flocking import FlockedPool, FlockingCollectorClient
from schedd_agent.liveness import LivenessTracker
from stageout.condor.bindings import CondorError
from stageout.core.config import flocked_to, mapping_settings
from stageout.wire.custody import AgentNotice, JobKey, OrderSheet, notice_ad, orders_ad, sheets_for
from tests.harness.pool.waiting import wait_until

JOB = JobKey("ap#1.0#1", "alice@test")
NOTICE = notice_ad(AgentNotice("ap", "ap", "", 1, 1))


def _report(manager: str) -> dict[str, Any]:
    return {"MyType": "StageOutManager", "Name": manager, "StageOutManager": manager, "StageOutPayload": "{}"}


def _orders(manager: str) -> dict[str, Any]:
    return orders_ad(OrderSheet("ap", manager, 1))


class Collector:
    """The collector of another pool."""

    def __init__(self, *managers: str) -> None:
        self.managers = managers
        self.taken: list[Mapping[str, Any]] = []
        self.refusal = ""
        self.is_down = False
        self.stands = threading.Event()
        self.stands.set()
        self.asked = 0

    async def query(self, constraint: str, attributes: Sequence[str], ad_type: str = "Any") -> list[Mapping[str, Any]]:
        self.asked += 1
        self.stands.wait(30.0)
        if self.is_down:
            raise CondorError("it is down")
        if ad_type == "Collector":
            return [{"MonitorSelfAge": 100}]
        return [_report(name) for name in self.managers] if ad_type == "License" else []

    async def publish(self, ad: Mapping[str, Any], command: str = "UPDATE_AD_GENERIC") -> None:
        if self.refusal:
            raise CondorError(self.refusal)
        self.taken.append(ad)

    async def close(self) -> None:
        pass

    def is_told(self, manager: str) -> bool:
        """Whether it has orders for a manager."""
        return any(sheets_for(manager, ad) for ad in self.taken if ad["MyType"] == "StageOutOrderBucket")


class Own:
    """The agent's own pool."""

    def __init__(self, *managers: str) -> None:
        self.managers = managers
        self.taken: list[Mapping[str, Any]] = []

    def query_reports(self) -> CollectorSnapshot:
        return CollectorSnapshot([_report(name) for name in self.managers], 100.0)

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        self.taken += ads


Make = Callable[..., FlockingCollectorClient]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make the directory of an agent: its own pool, those that there are, and whom of them it is to look at."""
    made = []

    def directory(
        own: Own, others: Mapping[str, Collector], named: Sequence[str] | None = None
    ) -> FlockingCollectorClient:
        pool = FlockingCollectorClient(
            own, lambda host: FlockedPool(host, "ap", 0.02, others.__getitem__), others if named is None else named
        )
        made.append(pool)
        return pool

    yield directory
    for one in made:
        one.close()


def _wait(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, timeout_s=30, what=what)


def test_reports_come_from_all_pools_and_orders_go_where_their_manager_is(make: Make) -> None:
    own, other, third = Own("m1"), Collector("m2"), Collector("m3")
    directory = make(own, {"other": other, "third": third})
    _wait(lambda: all(look.is_answering for look in directory.query_reports().others.values()), "looks at both")
    others = directory.query_reports().others
    assert {host: [ad["Name"] for ad in look.ads] for host, look in others.items()} == {
        "other": ["m2"], "third": ["m3"]
    }  # fmt: skip
    directory.publish([NOTICE, _orders("m1"), _orders("m2"), _orders("unseen")])
    _wait(lambda: other.is_told("m2") and other.is_told("unseen"), "the orders for the other pool")
    _wait(lambda: third.is_told("unseen"), "the orders for a manager that is seen nowhere")
    assert any(ad["MyType"] == "StageOutAgent" for ad in other.taken)
    assert any(ad["MyType"] == "StageOutAgent" for ad in third.taken)
    assert not other.is_told("m1") and not third.is_told("m2")
    assert [ad.get("StageOutManager") for ad in own.taken] == [None, "m1", "unseen"]


def test_a_collector_that_stands_still_delays_nobody(make: Make) -> None:
    own, stuck, well = Own("m1"), Collector("m2"), Collector("m3")
    stuck.stands.clear()
    directory = make(own, {"stuck": stuck, "well": well})
    _wait(lambda: stuck.asked and directory.query_reports().others["well"].is_answering, "the look at the other")
    directory.publish([NOTICE])
    _wait(lambda: well.taken, "the notice")
    assert own.taken == [NOTICE]
    look = directory.query_reports().others["stuck"]
    assert not look.is_answering and not look.ads
    stuck.stands.set()
    _wait(lambda: stuck.taken, "what was to be sent")


def test_a_refusal_is_said_once_and_the_letters_go_when_it_is_over(make: Make, caplog: Any) -> None:
    other = Collector("m2")
    other.refusal = "DENIED"
    directory = make(Own(), {"other": other})
    directory.publish([NOTICE])
    asked = other.asked
    _wait(lambda: other.asked > asked + 9, "some more tries")
    other.refusal = ""
    _wait(lambda: other.taken, "the notice")
    assert directory.query_reports().others["other"].is_answering, "the reports were there all the time"
    (said,) = (text for text in caplog.messages if text.startswith("flock-notice-refused"))
    assert "DENIED" in said and "docs/administrator/access-point.md#flocking" in said


def test_a_pool_that_is_named_no_more_is_looked_at_until_the_end(make: Make) -> None:
    other, third = Collector("m2"), Collector("m3")
    directory = make(Own(), {"other": other, "third": third}, ["other"])
    directory.follow(["third"])
    _wait(
        lambda: [look.is_answering for look in directory.query_reports().others.values()] == [True, True], "both looks"
    )


def test_which_pools_jobs_flock_to() -> None:
    assert flocked_to(mapping_settings({})) == []
    assert flocked_to(mapping_settings({"FLOCK_TO": "a, b:9619 a"})) == ["a", "b:9619"]
    assert flocked_to(mapping_settings({"FLOCK_TO": "a", "FLOCK_COLLECTOR_HOSTS": "c"})) == ["c"]


class Times:
    """A view of two pools, looked at every five seconds."""

    def __init__(self) -> None:
        self.liveness = LivenessTracker(hole_s=15.0)
        self.now_s = 0.0

    def look(self, for_s: float, own: Sequence[str] | None = (), other: Sequence[str] | None = ()) -> None:
        """Managers that each pool shows; None: its collector is down."""
        for _ in range(int(for_s / 5.0)):
            self.now_s += 5.0
            for pool, managers in (("", own), ("other", other)):
                if managers is None:
                    self.liveness.record_failure(pool)
                    continue
                shown = [(name, JOB) for name in managers]
                self.liveness.record_snapshot(self.now_s, 1000.0 + self.now_s, shown, managers, pool)


def test_the_silence_of_a_manager_counts_by_its_own_pool() -> None:
    times = Times()
    times.look(10.0, own=["m1"], other=["m2"])
    times.liveness.start_waiting(JOB, 1)
    times.look(100.0, own=[], other=None)
    assert times.liveness.silent_s("m1") == times.liveness.absent_s("m1", JOB, 1) == 100.0
    assert times.liveness.silent_s("m2") == times.liveness.absent_s("m2", JOB, 1) == 0.0
    times.look(100.0)
    assert times.liveness.silent_s("m1") == 200.0
    assert times.liveness.silent_s("m2") == times.liveness.absent_s("m2", JOB, 1) == 95.0


def test_what_was_seen_nowhere_may_be_in_any_pool_to_which_the_job_flocked() -> None:
    times = Times()
    times.look(10.0, other=None)
    times.liveness.start_waiting(JOB, 1)
    times.look(100.0, other=None)
    for has_flocked, absent_s in ((True, 0.0), (False, 100.0)):
        assert times.liveness.absent_s("m9", JOB, 1, has_flocked) == absent_s
        assert times.liveness.waited_s(JOB, 1, has_flocked) == absent_s
    times.look(100.0)
    assert times.liveness.absent_s("m9", JOB, 1) == 95.0


def test_the_end_of_a_pilot_counts_by_the_time_of_its_pool() -> None:
    times = Times()
    times.look(10.0, other=["m2"])
    times.liveness.record_announced_end("m2", 1, 60.0)
    times.look(100.0, other=None)
    assert not times.liveness.has_ended("m2")
    times.look(70.0)
    assert times.liveness.has_ended("m2")
