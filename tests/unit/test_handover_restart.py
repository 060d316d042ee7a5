"""Manager and agent know a hand-over when they are started again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
from manager_site import Site, run
from test_agent_decisions import JOB_KEY, job
from test_drain import handed_off, state
from test_handover import ONE, ROUTER, TWO, Asked, asked, handed_over, site, slow, waiting_for_a_slow_server

from sandbox_manager.custody import queries, updates
from sandbox_manager.delivery.handover import DrainTarget, written
from sandbox_manager.report.drain import Drain
from stageout.core import durable
from stageout.core.states import FileState, State
from stageout.model.job import HistoryRecord
from stageout.model.job import Status as JobStatus
from stageout.wire.deposits import read_numbers
from tests.polling import until
from tests.unit.ledger_steps import attempt
from tests.unit.test_overlay_destination import Crash, _dying

__all__ = ["asked", "site"]


def test_a_manager_that_is_started_again_gives_the_same_deposits(site: Site) -> None:
    """It had ended before it recorded what the custodian has: that got a second deposit of the same file."""
    given: list[dict[str, bytes]] = [{"overlay://h/ok/a": b"1" * 10_000}, {"overlay://h/ok/b": b"2"}]
    plugin = site.plugin.read_text()

    def calls() -> set[tuple[str, str, int]]:
        """Seed, URL and number of each file that was given."""
        found = [(call["env"], call["urls"]) for call in site.calls() if "STAGEOUT_OVERLAY_SEED" in call["env"]]
        return {
            (env["STAGEOUT_OVERLAY_SEED"], *one)
            for env, urls in found
            for one in zip(urls, read_numbers(env["STAGEOUT_OVERLAY_NUMBERS"]))
        }

    async def story() -> None:
        begin = "        number = numbered"
        site.write_script("copy_plugin", plugin.replace(begin, f"        time.sleep(1000)\n{begin}"))
        async with site.manager() as node:
            await waiting_for_a_slow_server(site, node, "1.0", given[0])
            draining = asyncio.get_running_loop().create_task(Drain(node.pipeline, node.clock, 600, ROUTER).run())
            await until(calls, "the hand-over")
            draining.cancel()
        ((seed, url, number),) = calls()
        assert (url, number) == ("overlay://h/ok/a", 1)
        site.write_script("copy_plugin", plugin)
        async with site.manager() as node:
            slow(node)
            await handed_off(node, "2.0", given[1])
            await Drain(node.pipeline, node.clock, 600, ROUTER).run()
            assert state(node, "1.0") is State.HANDED_OVER
        assert {(seed, url) for seed, url, _ in calls()} == {(seed, "overlay://h/ok/a"), (seed, "overlay://h/ok/b")}
        assert [number for _, url, number in calls() if url == "overlay://h/ok/a"] == [1]

    run(story())


def test_receipts_of_another_key_are_not_gone_on_with(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            await handed_off(node, "1.0", {"overlay://h/ok/a": b"1", "overlay://h/ok/b": b"22"})
            box = node.box(node.facts("1.0"))
            assert box is not None
            rows = await node.pipeline.store.ledger.read(lambda db: list(queries.all_files(db, box.id)))
            first = DrainTarget(ROUTER, "key")
            first.begin(rows[:1], 0)
            ((receipt, *_),) = first.receipts(rows[:1])
            begun = [replace(rows[0], proof=receipt), replace(rows[1], proof="md5: of a b-c d")]
            for key in ("key", "another"):
                again = DrainTarget(ROUTER, key)
                again.remember(begun)
                told = again.begin(rows[::-1], 0)
                assert (told["STAGEOUT_OVERLAY_SEED"] in receipt) is (key == "key")
                new, old = read_numbers(told["STAGEOUT_OVERLAY_NUMBERS"])
                assert (new, old) == (1, 2) if key == "another" else (old == 1 and new > 2)
            elsewhere = DrainTarget("other.org:1", "key")
            elsewhere.remember(begun)
            assert 1 not in read_numbers(elsewhere.begin(rows[::-1], 0)["STAGEOUT_OVERLAY_NUMBERS"])
            assert receipt in written(elsewhere.begun(box.id)), "the first custodian may have it"

    run(story())


def test_no_file_gets_the_number_of_one_that_the_ledger_has_forgotten(site: Site) -> None:
    """A custodian that has delivered that one would say that this one has arrived."""

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await handed_off(node, "1.0", {"overlay://h/ok/a": b"1", "overlay://h/ok/b": b"2", "overlay://h/ok/c": b""})
            box = node.box(node.facts("1.0"))
            assert box is not None
            rows = await node.pipeline.store.ledger.read(lambda db: list(queries.all_files(db, box.id)))
            first, again = DrainTarget(ROUTER, "key"), DrainTarget(ROUTER, "key")
            forgotten = first.begin(rows[:2], 0)["STAGEOUT_OVERLAY_NUMBERS"]
            ((receipt, *_), _) = first.receipts(rows[:2])
            again.remember([replace(rows[0], proof=receipt)])
            told = again.begin(rows[2:], 0)["STAGEOUT_OVERLAY_NUMBERS"]
            assert not set(read_numbers(told)) & set(read_numbers(forgotten))

    run(story())


def test_what_is_lost_at_once_after_a_restart_is_told_with_what_may_be_in_custody(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            await handed_off(node, "1.0", {"overlay://h/ok/a": b"1", "overlay://h/ok/b": b"22"})
            (box,) = node.pipeline.store.registry.by_id.values()
            ledger = node.pipeline.store.ledger
            rows = await ledger.read(lambda db: list(queries.all_files(db, box.id)))
            first = DrainTarget(ROUTER, "")
            first.begin(rows, 0)
            await ledger.write(lambda db: updates.keep_receipts(db, first.receipts(rows)))
            await ledger.write(lambda db: attempt(db, FileState.DELIVERED, rows[1].position))
            begun = await ledger.read(queries.begun_hand_over)
            assert [row.name for row in begun] == ["a"], "the other is its plugin's word only"
            drain = Drain(node.pipeline, node.clock, 600, ROUTER)
            drain.cut_short()
            await drain.run()
            assert state(node, "1.0") is State.LOST
            assert node.pipeline.runner.hand_over_to is not None
            assert written(node.pipeline.runner.hand_over_to.begun(box.id)) == (first.receipts(rows)[0][0],)

    run(story())


def test_a_file_that_cannot_be_read_is_not_replaced(asked: Asked) -> None:
    asked.path.write_text('[{"rubbish"')
    for _ in range(2):
        asked.one.close()
        asked.start()
    asked.look(handed_over())
    assert len(json.loads(asked.path.read_text())) == 1
    (aside,) = asked.path.parent.glob("kept.unreadable-*")
    assert aside.read_text() == '[{"rubbish"'


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: 7,
        lambda row: {**row, "key": 7},
        lambda row: {**row, "given_up": ["Lost"]},
        lambda row: {**row, "sandbox": {**row["sandbox"], "number": "1"}},
        lambda row: {**row, "sandbox": {**row["sandbox"], "custody": ["rubbish"]}},
        lambda row: {name: value for name, value in row.items() if name != "sandbox"},
    ],
)
def test_a_row_that_is_none_is_kept_for_who_can_read_it_and_costs_no_other(
    at: int, spoil: Callable[[dict[str, Any]], object], asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    asked.look(handed_over())
    asked.one.close()
    (good,) = json.loads(asked.path.read_text())
    other = {**good, "sandbox": {**good["sandbox"], "number": 2}}
    rows = [good, other]
    rows.insert(at, spoil(json.loads(json.dumps(good))))
    asked.path.write_text(json.dumps(rows))
    asked.start()
    found = asked.one.with_answers({})
    assert sorted(item.sandbox.number for item in found[JOB_KEY]) == [1, 2]
    (line,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("custody-row-read-failed")
    assert "mend the file" in line
    asked.one.update_from_jobs({}, {})
    asked.one.with_answers({JOB_KEY: (replace(handed_over(), sandbox=replace(handed_over().sandbox, number=3)),)})
    assert rows[at] in json.loads(asked.path.read_text())


def test_receipts_that_could_not_be_stored_are_stored_with_the_next_look(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were in memory only from then on: an agent that was started again knew nothing of them."""
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_faults", durable.parse_faults("custody-keep=ENOSPC"))
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                asked.one.with_answers({JOB_KEY: (handed_over(),)})
    assert not asked.path.exists()
    asked.one.with_answers({})
    asked.one.close()
    asked.start()
    assert asked.one.with_answers({})[JOB_KEY][0].sandbox.state == "HandedOver"
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_faults", durable.parse_faults("custody-keep=ENOSPC"))
        asked.one.with_answers({})
        with pytest.raises(OSError, match="No space left"):
            asked.one.update_from_jobs({}, {JOB_KEY: HistoryRecord(JobStatus.REMOVED, 1)})
    asked.one.update_from_jobs({}, {JOB_KEY: HistoryRecord(JobStatus.REMOVED, 1)})
    assert '"given_up": "Cancelled"' in asked.path.read_text()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_agent_that_dies_while_it_keeps_a_hand_over_knows_it_or_reads_it_again(asked: Asked, when: str) -> None:
    """At `custody-keep`: of two hand-overs one was kept before, and stays whatever becomes of the other."""
    first = handed_over()
    second = replace(first, sandbox=replace(first.sandbox, number=2))
    asked.one.with_answers({JOB_KEY: (first,)})
    with _dying("custody-keep", 1, when), pytest.raises(Crash):
        asked.one.with_answers({JOB_KEY: (first, second)})
    asked.one.close()
    asked.start()
    kept = [item.sandbox.number for item in asked.one.with_answers({}).get(JOB_KEY, ())]
    assert kept == ([1] if when == "before" else [1, 2]), "the reports have vanished"
    found = asked.one.with_answers({JOB_KEY: (first, second)})[JOB_KEY]
    assert [item.sandbox.number for item in found] == [1, 2], "they stand still"
    asked.one.close()
    asked.start()
    asked.says = {ONE: ("done", ""), TWO: ("done", "")}
    assert asked.look().state == "Delivered"
    assert not asked.cancelled


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_agent_that_dies_while_it_gives_an_unreadable_file_another_name_loses_nothing(
    asked: Asked, when: str
) -> None:
    asked.one.close()
    asked.path.write_text("damaged")
    with _dying("custody-keep", 1, when), pytest.raises(Crash):
        asked.start()
    assert asked.path.read_text() == "damaged"
    asked.start()
    for count in (1, 2):
        with _dying("custody-keep", 1, when) if count == 1 else nullcontext(), suppress(Crash):
            asked.one.with_answers({JOB_KEY: (handed_over(),)})
        asked.one.close()
        (aside,) = asked.path.parent.glob("*.unreadable-*")
        assert aside.read_text() == "damaged"
        asked.start()
    assert [item.sandbox.state for item in asked.one.with_answers({})[JOB_KEY]] == ["HandedOver"]


@pytest.mark.parametrize("jump_s", [-3600.0, 24 * 3600.0])
def test_a_wall_clock_that_is_set_makes_nothing_lost(jump_s: float, asked: Asked) -> None:
    """Routers still deliver it, and the job would run again beside that."""
    asked.clock.now_s = 3000.0
    assert asked.look(handed_over()).state == "HandedOver"
    asked.clock.ahead_s = jump_s
    newer = replace(handed_over(), sandbox=replace(handed_over().sandbox, change=10**6))
    for found in ((), (newer,)):
        assert asked.look(*found).state == "HandedOver"
        asked.one.update_from_jobs({JOB_KEY: job(run=1)}, {})
    asked.clock.now_s = 5000 + 3600 - 30
    assert asked.look().state == "HandedOver"
    asked.clock.now_s = 5000 + 3600 + 1
    assert asked.look().state == "Lost"
