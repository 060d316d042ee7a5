"""The end of a pilot: what is sent in the grace, what is said of the rest, and that nothing of it is sent again."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import classad2
import pytest
from daemon_site import Served, accepted, in_thread, served
from handoff_site import Child
from manager_site import AGENT, Node, Site, made, run

from sandbox_manager.intake.acceptance import Refusal
from sandbox_manager.report.collector import CollectorProcess
from sandbox_manager.report.drain import REASON, Drain, jobs_at_risk
from sandbox_manager.scheduling.throughput import Amount, Throughput
from stageout.condor.bindings import CondorError
from stageout.core import durable
from stageout.core.eta import FILE_BYTES
from stageout.core.states import State
from stageout.wire.custody import Action, Order, OrderSheet, payload_of, read_report
from tests.polling import until, wait_for

PILOT = {"STAGEOUT_PILOT": "true", "STAGEOUT_PILOT_GRACE": "60"}


@pytest.fixture
def site() -> Iterator[Site]:
    with made(PILOT) as found:
        yield found


async def handed_off(node: Node, job: str, urls: Mapping[str, bytes], priority: int = 0) -> None:
    facts = node.facts(job, dslot_id=int(float(job)))
    receipt = await node.hand_off(urls, facts)
    node.site.orders += 1
    order = Order(
        node.site.orders, Action.CONFIRM, facts.run.job, 1, (receipt.ticket,), receipt.files, priority,
        owner=facts.run.owner,
    )  # fmt: skip
    await node.pipeline.apply_orders(OrderSheet(AGENT, "manager@ep", 1, (order,)))


def state(node: Node, job: str) -> State | None:
    return node.state(node.facts(job))


# ---- the drain -------------------------------------------------------------------------------------------------------


def test_what_can_be_sent_is_sent_and_the_rest_is_lost_for_good(site: Site) -> None:
    async def story() -> None:
        site.flag("hold")
        async with site.manager() as node:
            await handed_off(node, "1.0", {"copy://h/ok/a": b"1"})
            await node.until_state(State.RELEASED, node.facts("1.0"))
            await handed_off(node, "2.0", {"copy://h/ok/b": b"22", "copy://slow/wait/c": b"3"})
            await handed_off(node, "3.0", {"copy://h/refuse/d": b"4444"})
            await handed_off(node, "4.0", {"copy://h/busy/e": b"5"})
            facts = node.facts("5.0", dslot_id=5)
            await node.hand_off({"copy://h/ok/f": b"6"}, facts)
            await until(lambda: (site.base / "waiting").exists(), "the slow mover")
            await until(lambda: state(node, "3.0") is State.FAILED and state(node, "4.0") is State.RETRY_WAIT, "ends")
            drain = Drain(node.pipeline, node.clock, 1.5)
            await drain.run()
            site.flag("hold", up=False)
            assert [state(node, f"{number}.0") for number in (2, 3, 4, 5)] == [State.LOST] * 4
            assert len(node.pipeline.custody.running) == 0
            reasons = [(node.box(node.facts(f"{number}.0")) or site).reason for number in (2, 3)]  # type: ignore[union-attr]
            assert reasons == [REASON, f"{REASON}; before that: quota exceeded for alice"]
            await node.order(Action.CONFIRM, facts)
            await until(lambda: not any(node.spool.directories()), "the bytes to go")
        assert sorted(site.delivered()) == ["a", "b"]

    run(story())
    assert site.open_spool


def test_a_drain_ends_as_soon_as_nothing_is_left(site: Site) -> None:
    async def story() -> None:
        site.flag("down")
        async with site.manager() as node:
            await handed_off(node, "1.0", {"copy://h/ok/a": b"1"})
            await node.until_state(State.RETRY_WAIT, node.facts("1.0"))
            site.flag("down", up=False)
            started = time.monotonic()
            await Drain(node.pipeline, node.clock, 600).run()
            assert time.monotonic() - started < 60
            await node.until_state(State.RELEASED, node.facts("1.0"))

    run(story())
    assert site.delivered() == ["a"]


def test_nothing_that_arrived_before_the_stop_counts_as_lost(site: Site) -> None:
    """One call of the plugin with several jobs' files is stopped in the middle: what it had verified is delivered."""

    async def story() -> None:
        site.flag("hold")
        site.write_script("copy_plugin", site.plugin.read_text().replace(
            "    ads.append(ad(url, name, True, **facts))\n",
            "    ads.append(ad(url, name, True, **facts))\n"
            "    with open(outfile, 'r+') as stream: stream.write(''.join(ads))\n",
        ))  # fmt: skip
        async with site.manager(moving=False) as node:
            await handed_off(node, "1.0", {"copy://h/ok/a": b"1"})
            await handed_off(node, "2.0", {"copy://h/wait/b": b"22"})
            await handed_off(node, "3.0", {"copy://h/ok/c": b"333"})
            loop = asyncio.get_running_loop().create_task(node.pipeline.run())
            await until(lambda: (site.base / "waiting").exists(), "the second file")
            assert len(site.calls()) == 1
            await Drain(node.pipeline, node.clock, 0.0).run()
            loop.cancel()
            states = [state(node, job) for job in ("1.0", "2.0", "3.0")]
            assert states[0] in (State.DELIVERED, State.RELEASED)
            assert states[1:] == [State.LOST] * 2
        assert site.delivered() == ["a"]

    run(story())


def test_what_cannot_arrive_in_time_stands_behind_what_can(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            rates = node.pipeline.scheduler.throughput
            rates.started("copy://h", Amount(1, 10), 0.0)
            rates.ended("copy://h", Amount(1, 10), Amount(1, 10), 1.0)
            await handed_off(node, "1.0", {"copy://h/ok/large": b"x" * 1000}, priority=9)
            await handed_off(node, "2.0", {"copy://h/ok/small": b"x" * 20})
            registry = node.pipeline.store.registry
            boxes = registry.by_id.values()
            for grace_s, wanted in ((60, ["2.0", "1.0"]), (6000, ["1.0", "2.0"])):
                registry.order_anew(Drain(node.pipeline, node.clock, grace_s).deadline)
                (queue,) = registry.backlog.queues.values()
                queue.wake(time.time() + 1)
                assert [box.run.job_id for box, _ in queue.due(time.time() + 10**6)] == wanted
            assert jobs_at_risk(boxes) == "ap#1.0=1000 ap#2.0=20"

    run(story())


# ---- the known end ---------------------------------------------------------------------------------------------------


def test_a_hand_off_that_cannot_be_delivered_before_the_end_is_refused(site: Site) -> None:
    site.knobs["STAGEOUT_PILOT_END"] = str(int(time.time()) + 1000)

    async def story() -> None:
        async with site.manager(moving=False) as node:
            pipeline = node.pipeline
            assert not isinstance(node.offer(node.facts("1.0"), ["copy://h/ok/a"], 10**9), Refusal), "nothing known"
            pipeline.acceptance.unreserve(node.offer(node.facts("2.0"), ["copy://h/ok/a"], 1))
            pipeline.scheduler.throughput.started("copy://h", Amount(1, 1000), 0.0)
            pipeline.scheduler.throughput.ended("copy://h", Amount(1, 1000), Amount(1, 1000), 10.0)
            refused = node.offer(node.facts("3.0"), ["copy://h/ok/a"], 1)
            assert isinstance(refused, Refusal), "what is promised counts"
            assert "the pilot ends in" in refused.reason
            assert not isinstance(node.offer(node.facts("3.0"), ["copy://other/ok/a"], 1), Refusal)

    run(story())


@pytest.mark.parametrize(("size_bytes", "takes_work"), [(50_000, True), (200_000, False)])
def test_a_pilot_with_more_than_it_can_deliver_takes_no_jobs(site: Site, size_bytes: int, takes_work: bool) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            node.pipeline.scheduler.throughput.started("copy://h", Amount(1, 1000), 0.0)
            node.pipeline.scheduler.throughput.ended("copy://h", Amount(1, 1000), Amount(1, 1000), 10.0)
            await handed_off(node, "1.0", {"copy://h/ok/a": b"x" * size_bytes})
            assert node.pipeline.admission.end.fits, "no end is known"
            site.knobs["STAGEOUT_PILOT_END"] = str(int(time.time()) + 1000)
            node.pipeline.new_rules(site.rules)
            assert node.pipeline.admission.end.fits is takes_work

    run(story())


def test_rates_count_the_time_in_which_something_moved() -> None:
    rates = Throughput()
    assert rates.bytes_per_s("a") == 0
    rates.started("a", Amount(1, 100), 0.0)
    rates.started("a", Amount(2, 300), 5.0)
    assert (rates.underway("a"), rates.busy_servers()) == (Amount(3, 400), ["a"])
    rates.ended("a", Amount(1, 100), Amount(1, 100), 10.0)
    rates.ended("a", Amount(2, 300), Amount(2, 300), 20.0)
    assert rates.bytes_per_s("a") == 20
    assert rates.work_bytes_per_s("a") == 20 + 3 * FILE_BYTES / 20
    rates.started("a", Amount(1, 40), 1000.0)
    assert rates.needs_s({"a": 60, "unknown": 10**9}) == 5
    rates.ended("a", Amount(1, 40), Amount(0, 0), 1000.0)
    assert (rates.bytes_per_s("a"), rates.busy_servers()) == (20, []), "idle time does not count"
    rates.started("a", Amount(1, 12000), 2000.0)
    rates.ended("a", Amount(1, 12000), Amount(10, 1200 * 100), 3200.0)
    assert 90 < rates.bytes_per_s("a") <= 100, "the newest counts most"


# ---- the daemon ------------------------------------------------------------------------------------------------------


class Apart:
    """A collector of which an ordinary pilot may use one door only."""

    def __init__(self, node: Served) -> None:
        self.ads: list[Mapping[str, Any]] = []
        node.collector.refuses = True
        node.collector.advertise_apart = self._advertise  # type: ignore[attr-defined]

    async def _advertise(self, ad: Mapping[str, Any]) -> None:
        self.ads.append(ad)


def test_a_pilot_says_itself_what_is_lost(site: Site) -> None:
    """Even when it is stopped fast, as glideinWMS does."""
    site.knobs["STAGEOUT_PILOT_GRACE"] = "2"

    async def story() -> Apart:
        async with served(site) as node:
            site.flag("hold")
            await accepted(node, "copy://h/wait/a")
            await until(lambda: (site.base / "waiting").exists(), "the mover")
            apart = Apart(node)
            node.daemon.stop(fast=True)
            await until(lambda: apart.ads, "the first report on the way out")
            first = apart.ads[0]
            assert (first["StageOutDraining"], first["StageOutAccept"]) == (True, False)
            assert first["StageOutJobsAtRisk"] == "ap#1.0=3"
            answer = await in_thread(node.hand_off, "copy://h/ok/b") if node.socket.exists() else {"op": "refuse"}
            assert answer["op"] == "refuse"
        return apart

    async def check() -> None:
        apart = await story()
        last = apart.ads[-1]
        assert last["ClassAdLifetime"] == 7200
        (box,) = read_report(payload_of(last)).sandboxes
        assert (box.state, box.reason) == ("Lost", "the pilot ended before the output could be delivered")
        assert read_report(payload_of(last)).bytes_at_risk == 0

    run(check())
    assert site.delivered() == []


def _arm_behind(label: str, armed: Path) -> None:
    """From that step on the planned fault happens; in a process that ends with it."""
    real = durable.step

    @contextmanager
    def step(name: str) -> Iterator[None]:
        with real(name):
            yield
        if name == label:
            armed.touch()

    durable.step = step  # type: ignore[assignment]


def _runs(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty: a zombie
    return False


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_pilot_that_dies_at_its_last_report_sends_nothing_that_it_calls_lost(
    site: Site, when: str, is_lost: bool
) -> None:
    """At `report-last`. Before the loss is recorded nobody was told of it, and a manager that comes back sends on."""
    site.knobs["STAGEOUT_PILOT_GRACE"] = "1" if is_lost else "600"
    armed = site.base / "armed"

    async def ends() -> None:
        async with served(site) as node:
            site.flag("hold")
            await accepted(node, "copy://h/wait/a")
            await until(lambda: (site.base / "waiting").exists(), "the mover")
            Apart(node)
            if is_lost:
                _arm_behind("record-lost", armed)
            else:
                armed.touch()
            node.daemon.stop(fast=True)
            await asyncio.sleep(60)  # it dies sooner

    faults = {"STAGEOUT_FAULTS": f"report-last={when}@{armed}"}
    assert Child(lambda: run(ends()), os.geteuid(), env=faults).result() is None, "it has not died"
    wait_for(lambda: not any(_runs(call["pid"]) for call in site.calls()), "the end of its plugin")
    (site.base / "hold").unlink()

    async def again() -> None:
        async with site.manager() as node:
            if is_lost:
                await node.until_state(State.LOST)
                assert site.delivered() == []
            else:
                await node.until_state(State.RELEASED)
                assert site.delivered() == ["a"]

    run(again())


def test_a_fast_stop_during_a_drain_ends_it(site: Site) -> None:
    site.knobs["STAGEOUT_PILOT_GRACE"] = "3600"

    async def story() -> None:
        async with served(site) as node:
            site.flag("hold")
            await accepted(node, "copy://h/wait/a")
            await until(lambda: (site.base / "waiting").exists(), "the mover")
            node.daemon.stop(fast=False)
            await until(lambda: not node.socket.exists(), "the drain")
            assert node.collector.last() != {"1.0": "Lost"}
        assert node.collector.last() == {"1.0": "Lost"}

    run(story())


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next() -> None:
    """The last report is made when the look at the orders has just been given up."""

    async def story() -> None:
        child = CollectorProcess()
        # It answers a question when the next one comes, and starts nothing that would keep its pipes open when it dies.
        child._argv = ["sh", "-c", "read line; read line; echo '{\"ads\": []}'"]
        look = asyncio.ensure_future(child.messages("manager@x"))
        await until(lambda: child._child, "the question")
        look.cancel()
        child._argv = ["sh", "-c", 'read line; echo \'{"error": "refused"}\'']
        with pytest.raises(CondorError, match="refused"):
            await child.advertise({"Name": "x"})
        await child.close()

    run(story())


@pytest.mark.parametrize(
    ("end", "takes_work"), [(0, True), (100_000 + 599, False), (100_000 + 601, True), (99_000, False)]
)
def test_no_job_starts_shortly_before_a_known_end(end: int, takes_work: bool) -> None:
    """The START of the fragment, as the startd evaluates it at the time 100,000."""
    fragment = Path(__file__).resolve().parents[2] / "condor_config.d" / "30-stageout-pilot.conf"
    text = re.search(r"^START = ((?:.*\\\n)*.*)", fragment.read_text(), re.M)
    assert text
    expression = text[1].replace("\\\n", " ").replace("$(START)", "true").replace("time()", "100000")
    expression = expression.replace("$(STAGEOUT_PILOT_END:0)", str(end)).replace("$(STAGEOUT_PILOT_CLOSE:600)", "600")
    assert "$(" not in expression
    assert classad2.ExprTree(expression).eval() is takes_work
