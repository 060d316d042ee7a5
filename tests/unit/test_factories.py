"""Factories: jobs that wait for their output take no place of max_materialize, and no others are made beyond it."""

from __future__ import annotations

import random
import re
from collections.abc import Collection

import pytest

from schedd_agent.factories import Factory, FactoryLimits, MaterializeLimit, limit_for, read_limit
from schedd_agent.queue import QueueError, parse_job
from stageout.model.job import Job, Status


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("3", MaterializeLimit(3)),
        ("JobMaterializeNextProcId < 9 ? 8 : 3", MaterializeLimit(3, 9, 8)),
        ("(JobMaterializeNextProcId < 9) ? 8 : 3", MaterializeLimit(3, 9, 8)),
        ("1 + 2", None),
        ("undefined", None),
    ],
)
def test_limits_are_read_from_the_cluster(text: str, limit: MaterializeLimit | None) -> None:
    assert read_limit(text) == limit
    assert limit is None or read_limit(str(limit)) == limit


SPENT = MaterializeLimit(3, 4, 5)


@pytest.mark.parametrize(
    ("factory", "waiting", "active", "wanted"),
    [
        (Factory(1, MaterializeLimit(3), 3, 12), 0, 3, MaterializeLimit(3)),
        (Factory(1, MaterializeLimit(3), 3, 12), 1, 2, MaterializeLimit(3, 4, 4)),
        (Factory(1, MaterializeLimit(3), 3, 12), 2, 1, MaterializeLimit(3, 5, 5)),
        (Factory(1, MaterializeLimit(3), 3, 0), 2, 1, MaterializeLimit(3, 5, 5)),
        (Factory(1, SPENT, 4, 12), 2, 3, SPENT),
        (Factory(1, MaterializeLimit(3, 5, 5), 4, 12), 2, 3, MaterializeLimit(3)),
        (Factory(1, SPENT, 4, 12), 0, 3, MaterializeLimit(3)),
        (Factory(1, SPENT, 12, 12), 9, 2, MaterializeLimit(3)),
        (Factory(1, SPENT, 4, 12, is_paused=True), 4, 0, MaterializeLimit(3)),
        (Factory(1, MaterializeLimit(12), 5, 12), 4, 1, MaterializeLimit(12)),
        (Factory(1, MaterializeLimit(0), 5, 12), 4, 1, MaterializeLimit(0)),
        (Factory(1, MaterializeLimit(1000), 1000, 9000), 49, 951, MaterializeLimit(1000)),
        (Factory(1, MaterializeLimit(1000), 1000, 9000), 50, 950, MaterializeLimit(1000, 1050, 1050)),
    ],
    ids=[
        "nothing waits", "one waits", "two wait", "unknown total", "spent", "a place was taken", "all delivered",
        "all made", "held", "max_idle alone", "unlimited", "few places", "a twentieth",
    ],
)  # fmt: skip
def test_the_limit_of_a_factory(factory: Factory, waiting: int, active: int, wanted: MaterializeLimit) -> None:
    assert limit_for(factory, waiting, active) == wanted


def test_jobs_that_wait_in_a_factory() -> None:
    ad = {
        "GlobalJobId": "ap#7.0#1", "ClusterId": 7, "JobStatus": 4, "StageOutUserLeave": False,
        "TransferOutputStats": {"STAGEOUTFilesCountLastRun": 2}, "JobMaterializeNextProcId": 3,
    }  # fmt: skip
    assert parse_job(ad, True).waits_in_factory
    for other in ({"StageOutUserLeave": "JobStatus == 4"}, {"JobStatus": 5}, {"TransferOutputStats": {}}):
        assert not parse_job({**ad, **other}, True).waits_in_factory
    del ad["JobMaterializeNextProcId"]
    assert not parse_job(ad, True).waits_in_factory


class Death(BaseException):
    """The agent dies."""


class Schedd:
    """One factory, as HTCondor treats it: it makes jobs when anything changes.

    :param own: max_materialize. :param total: number of jobs of the factory.
    """

    def __init__(self, own: int, total: int) -> None:
        self.limit, self.total = str(own), total
        self.status: dict[int, Status] = {}
        self.made = self.most = 0
        self.is_paused = self.refuses = self.kills = False
        self.edits: list[str] = []
        self.make()

    def make(self) -> None:
        """Make jobs up to the limit, which is looked at once before."""
        found = re.fullmatch(r"JobMaterializeNextProcId < (\d+) \? (\d+) : (\d+)", self.limit)
        until, raised, own = map(int, found.groups()) if found else (0, 0, int(self.limit))
        limit = raised if self.made < until else own
        while not self.is_paused and self.made < self.total and len(self.status) < limit:
            self.status[self.made] = Status.IDLE
            self.made += 1
        self.most = max(self.most, sum(status != Status.COMPLETED for status in self.status.values()))

    def end(self, proc: int) -> None:
        self.status[proc] = Status.COMPLETED
        self.make()

    def leave(self, proc: int) -> None:
        del self.status[proc]
        self.make()

    def jobs(self) -> list[Job]:
        return [
            Job(f"ap#5.{proc}#1", 5, proc, status, 1, "alice@test", handed_off=1, in_factory=True)
            for proc, status in self.status.items()
        ]

    def factories(self) -> list[Factory]:
        limit = read_limit(self.limit)
        return [Factory(5, limit, self.made, self.total, self.is_paused)] if limit and self.status else []

    def procs(self, clusters: Collection[int]) -> list[tuple[int, int]]:
        return [(cluster, proc) for cluster in clusters for proc in self.status]

    def set_limit(self, cluster: int, limit: str) -> None:
        if self.refuses:
            raise QueueError("no")
        self.limit = limit
        self.edits.append(limit)
        self.make()
        if self.kills:
            raise Death


def test_next_jobs_are_made_although_outputs_wait_and_the_limit_is_the_owners_again() -> None:
    schedd = Schedd(3, 12)
    agent = FactoryLimits(schedd)
    for proc in range(12):
        agent.follow(schedd.jobs())
        schedd.end(proc)
    agent.follow(schedd.jobs())
    assert (schedd.made, schedd.most, schedd.limit) == (12, 3, "3")
    assert len(schedd.edits) <= 12


def test_an_edit_by_the_owner_counts_from_then_on() -> None:
    schedd = Schedd(2, 40)
    agent = FactoryLimits(schedd)
    for proc in range(6):
        schedd.end(proc)
        agent.follow(schedd.jobs())
    schedd.limit = "4"
    for proc in range(6, 12):
        agent.follow(schedd.jobs())
        schedd.end(proc)
    assert schedd.most == 4
    for proc in range(12):
        schedd.leave(proc)
    agent.follow(schedd.jobs())
    assert (schedd.limit, schedd.most) == ("4", 4)


def test_an_agent_that_dies_leaves_a_limit_that_ends_by_itself_and_the_next_one_restores_it() -> None:
    """It dies at the step "edit-factory"."""
    schedd = Schedd(3, 40)
    schedd.kills = True
    for proc in range(3):
        schedd.end(proc)
    with pytest.raises(Death):
        FactoryLimits(schedd).follow(schedd.jobs())
    schedd.kills = False
    for proc in range(3):
        schedd.leave(proc)
    assert (schedd.most, schedd.limit) == (3, "JobMaterializeNextProcId < 6 ? 6 : 3")
    FactoryLimits(schedd).follow(schedd.jobs())
    assert schedd.limit == "3"


def test_a_held_factory_has_its_own_limit_and_a_refused_edit_stops_nothing() -> None:
    schedd = Schedd(2, 40)
    agent = FactoryLimits(schedd)
    schedd.is_paused = True
    schedd.end(0)
    agent.follow(schedd.jobs())
    assert schedd.edits == []
    schedd.is_paused, schedd.refuses = False, True
    agent.follow(schedd.jobs())
    schedd.refuses = False
    agent.follow(schedd.jobs())
    assert schedd.made == 3


def test_a_queue_without_factories_is_asked_once() -> None:
    schedd = Schedd(2, 2)
    schedd.status.clear()
    agent = FactoryLimits(schedd)
    agent.follow([])
    schedd.factories = None  # type: ignore[method-assign, assignment]
    agent.follow([Job("ap#6.0#1", 6, 0, Status.COMPLETED, 1, "alice@test", handed_off=1)])


@pytest.mark.parametrize("seed", range(30))
def test_max_materialize_holds_whatever_happens(seed: int) -> None:
    """Jobs end, leave with and without delivery, and are removed; the agent looks now and then, or starts anew."""
    chance = random.Random(seed)
    own = chance.randint(1, 6)
    schedd, total = Schedd(own, 60), 60
    agent = FactoryLimits(schedd)
    for _ in range(1500):
        running = [proc for proc, status in schedd.status.items() if status != Status.COMPLETED]
        waiting = [proc for proc in schedd.status if proc not in running]
        what = chance.random()
        if what < 0.4 and running:
            schedd.end(chance.choice(running))
        elif what < 0.5 and running:
            schedd.leave(chance.choice(running))
        elif what < 0.6 and waiting:
            schedd.leave(chance.choice(waiting))
        elif what < 0.9:
            agent.follow(schedd.jobs())
        elif what < 0.92:
            agent = FactoryLimits(schedd)
    agent.follow(schedd.jobs())
    assert (schedd.most, schedd.made) == (own, total)
