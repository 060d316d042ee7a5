"""The lease that a node gives itself, by an expression of its administrator over the machine's ad."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import classad2
import pytest
from daemon_site import served
from manager_site import Site, made, run

from sandbox_manager.intake.startd import value_in_machine
from sandbox_manager.rules import Rules, read_rules
from sandbox_manager.scheduling.leases import Leases, OwnLease
from stageout.core import log
from stageout.core.config import mapping_settings
from tests.polling import until


class Node:
    """A node with the settings of its administrator and the answers of its startd."""

    def __init__(self, expression: str) -> None:
        self.rules: Rules = read_rules(mapping_settings({"STAGEOUT_NEVER_RETURNS": expression}))
        self.answer: Any = None
        self.asked: list[str] = []
        self.changes = 0
        self.leases = Leases(Any)  # type: ignore[arg-type]
        self.own = OwnLease(self.leases, lambda: self.rules, self._evaluate, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def _evaluate(self, expression: str) -> object:
        self.asked.append(expression)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(("expression", "own_s"), [("true", 900), ("TRUE", 900), ("false", 0), ("", 0)])
def test_a_word_counts_before_the_first_report(expression: str, own_s: int) -> None:
    node = Node(expression)
    assert node.leases.own_s == own_s
    run(node.own.refresh())
    assert (node.leases.own_s, node.asked) == (own_s, [])


@pytest.mark.parametrize(
    ("answer", "own_s"), [(True, 900), (1, 900), (False, 0), (0, 0), (None, 0), ("Value.Undefined", 0)]
)
def test_an_expression_is_evaluated_by_the_startd(answer: object, own_s: int) -> None:
    node = Node("IsAnnex =?= true")
    assert node.leases.own_s == 0
    node.answer = answer
    run(node.own.refresh())
    assert (node.leases.own_s, node.asked) == (own_s, ["IsAnnex =?= true"])


def test_while_the_startd_is_silent_the_last_value_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(log, "warn", lambda name, **facts: told.append(name))
    node = Node("IsAnnex")
    node.answer = True
    run(node.own.refresh())
    node.answer = OSError("no answer")
    run(node.own.refresh())
    run(node.own.refresh())
    assert node.leases.own_s == 900
    assert told == ["machine-query-failed"]
    node.answer = False
    run(node.own.refresh())
    assert (node.leases.own_s, node.changes) == (0, 2)


def test_a_startd_that_starts_after_the_manager_is_soon_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_manager.scheduling.leases._AGAIN_S", 0.01)
    node = Node("IsAnnex")
    node.answer = FileNotFoundError("no address of it")

    async def story() -> None:
        task = asyncio.ensure_future(node.own.run())
        await until(lambda: len(node.asked) > 1, node.asked)
        node.answer = True
        await until(lambda: node.leases.own_s == 900, node.asked)
        asked = len(node.asked)
        await asyncio.sleep(0.05)
        assert len(node.asked) == asked, "it has answered"
        task.cancel()

    run(story())


def test_a_new_length_counts() -> None:
    node = Node("true")
    node.rules = replace(node.rules, short_lease_s=120)
    run(node.own.refresh())
    assert node.leases.own_s == 120


def _slot(**attributes: Any) -> Any:
    return classad2.ClassAd(attributes)


def test_a_job_cannot_write_what_the_expression_reads() -> None:
    """The startd copies attributes of jobs into the ads of their slots."""
    job = {"GlobalJobId": "spot", "OutputDestination": "spot", "Mine": "spot"}
    machine = _slot(SlotID=1, Kind="spot", **job)
    slots = [_slot(SlotID=2, Kind="steady"), _slot(SlotID=1, DynamicSlot=True, Kind="steady", **job), machine]
    assert value_in_machine(slots, 'Kind == "spot"', "MINE") is True
    for name in job:
        assert value_in_machine(slots, f'{name} =?= "spot"', "x, MINE") is False
    assert value_in_machine([], "true", "") is None


@pytest.mark.parametrize(("expression", "lease_s"), [("true", 120), ("false", 0)])
def test_the_first_report_promises_the_lease(expression: str, lease_s: int) -> None:
    async def story(site: Site) -> None:
        async with served(site) as node:
            assert node.collector.reports[0].lease_s == lease_s
            node.settings["STAGEOUT_NEVER_RETURNS"] = "true"
            node.settings["STAGEOUT_SHORT_LEASE"] = "240"
            await node.daemon.reload()
            await until(lambda: node.collector.reports[-1].lease_s == 240, "the new promise")

    with made() as site:
        site.knobs.update({"STAGEOUT_NEVER_RETURNS": expression, "STAGEOUT_SHORT_LEASE": "120"})
        run(story(site))
