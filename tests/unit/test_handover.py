"""A pilot's way out: what it cannot deliver is given to a custodian, and the access point asks what became of it."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manager_site import Node, Site, made, run
from test_agent_decisions import JOB_KEY, job, seen
from test_drain import PILOT, handed_off, state

from sandbox_manager.custody import queries
from sandbox_manager.delivery.handover import DrainTarget, written
from sandbox_manager.report.drain import Drain
from sandbox_manager.report.reporter import sandbox_report
from sandbox_manager.scheduling.throughput import Amount
from schedd_agent import custodian_client
from schedd_agent.custodians import CustodyTable, HandedOverSandbox
from schedd_agent.model import ReportedSandbox
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.states import State
from stageout.model.job import HistoryRecord
from stageout.model.job import Status as JobStatus
from stageout.overlay.channel import Gateway
from stageout.overlay.wire.messages import Cancel, Custody, Result, Status
from stageout.wire.custody import Report, SandboxReport, payload_of, read_report, report_ad
from stageout.wire.deposits import (
    EXPIRES_AFTER_S,
    BadReceipt,
    Holding,
    Receipt,
    earlier_operation_of,
    joined,
    name_of,
    operation_of,
    read_holdings,
    read_numbers,
    read_receipt,
    written_numbers,
)
from tests.polling import until

#: Made by ``new_seed("")`` once: names of tests must be the same in each process.
SEED = "c72877be5735efabccb165997ac4a6d9"
ROUTER = "router.example.org:9621"
_GIVE = """
    def numbered(text):
        ends = [word.partition("-") for word in text.split(",")]
        return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]
    if os.environ.get("STAGEOUT_OVERLAY_HANDOVER") and url.startswith("overlay:"):
        number = numbered(os.environ["STAGEOUT_OVERLAY_NUMBERS"])[requests.index((url, name))]
        words = (os.environ["STAGEOUT_OVERLAY_HANDOVER"], os.environ["STAGEOUT_OVERLAY_SEED"], number, number)
        ads.append(ad(url, name, True, TransferFileBytes=size, TransferTotalBytes=size,
                      DeveloperData=dict(StageOutCustody="%s %s %d-%d 9999999999" % words)))
        continue
"""


# ---- receipts --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 2**49))
def test_receipts_come_out_as_they_went_in(first: int, more: int, expires: int) -> None:
    receipt = Receipt(ROUTER, SEED, first, first + more, expires)
    assert read_receipt(str(receipt)) == receipt
    assert len(set(receipt.names())) == more + 1


@pytest.mark.parametrize(
    "text",
    ["", "x", f"{ROUTER} {SEED} 2-1 9", f"{ROUTER} {SEED} 1-9999999 9", f"host {SEED} 1-1 9", f"{ROUTER} x 1-1 9",
             f"{ROUTER} {SEED} 1-1 -9", f"{ROUTER} {SEED} 1 9", f"{ROUTER} {SEED} 1-1 9 9"],
)  # fmt: skip
def test_other_texts_are_no_receipts(text: str) -> None:
    with pytest.raises(BadReceipt):
        read_receipt(text)


@given(st.sets(st.integers(1, 60)))
def test_joined_receipts_are_of_the_same_deposits(numbers: set[int]) -> None:
    found = joined(Receipt(ROUTER, SEED, number, number, 9) for number in numbers)
    assert sorted(number for one in found for number in range(one.first, one.last + 1)) == sorted(numbers)
    assert all(before.last + 1 < after.first for before, after in zip(found, found[1:]))


# ---- the pilot -------------------------------------------------------------------------------------------------------


@pytest.fixture
def site() -> Iterator[Site]:
    with made(PILOT) as found:
        found.write_plugin("copy_plugin", "copy,overlay")
        text = found.plugin.read_text()
        line = next(line for line in text.splitlines() if line.startswith("    target = "))
        found.write_script("copy_plugin", text.replace(line, line + _GIVE))
        yield found


def slow(node: Node) -> None:
    """Ten bytes a second were seen."""
    node.pipeline.scheduler.throughput.started("overlay://h", Amount(1, 10), 0.0)
    node.pipeline.scheduler.throughput.ended("overlay://h", Amount(1, 10), Amount(1, 10), 1.0)


async def waiting_for_a_slow_server(site: Site, node: Node, job: str, urls: Mapping[str, bytes]) -> None:
    """Output that waits, for a server that takes ten bytes a second."""
    slow(node)
    site.flag("down")
    await handed_off(node, job, urls)
    await until(lambda: state(node, job) is State.RETRY_WAIT, "the first attempt")


def test_a_drain_hands_over_what_it_cannot_deliver(site: Site) -> None:
    """The overlay's files are safe, others are lost as before."""

    async def story() -> None:
        async with site.manager() as node:
            await handed_off(node, "2.0", {"copy://g/refuse/c": b"3"})
            await until(lambda: state(node, "2.0") is State.FAILED, "the other to fail")
            await waiting_for_a_slow_server(
                site, node, "1.0", {"overlay://h/ok/a": b"1" * 10_000, "overlay://h/ok/b": b"22"}
            )
            await Drain(node.pipeline, node.clock, 600, ROUTER).run()
            assert (state(node, "1.0"), state(node, "2.0")) == (State.HANDED_OVER, State.LOST)
            box = node.box(node.facts("1.0"))
            assert box is not None
            assert (box.bytes_left, box.reason) == (0, f"in custody of {ROUTER}")
            (receipt,) = map(read_receipt, box.custody)
            assert (receipt.custodian, receipt.first, receipt.last) == (ROUTER, 1, 2)
            since = 9999999999 - EXPIRES_AFTER_S
            assert read_holdings(box.holdings) == (Holding(ROUTER, 2, 10_002, since),)
            assert node.pipeline.store.registry.bytes_at_risk == 0
            said = sandbox_report(box, 0, ())
            ad = report_ad(Report("m", "", 1, 0, {}, 0, (said,)))
            assert read_report(payload_of(ad)).sandboxes == (said,)
        assert site.delivered() == []

    run(story())


def test_the_most_urgent_goes_first_to_the_custodian(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            node.pipeline.scheduler.throughput.started("overlay://h", Amount(1, 10), 0.0)
            node.pipeline.scheduler.throughput.ended("overlay://h", Amount(1, 10), Amount(1, 10), 1.0)
            await handed_off(node, "1.0", {"overlay://h/ok/large": b"x" * 1000}, priority=9)
            await handed_off(node, "2.0", {"overlay://h/ok/small": b"x" * 20})
            registry, drain = node.pipeline.store.registry, Drain(node.pipeline, node.clock, 60, ROUTER)
            orders = []
            for target in (None, DrainTarget(ROUTER, "")):
                if target is not None:
                    node.pipeline.runner.hand_over(target)
                registry.order_anew(drain.deadline)
                (queue,) = registry.backlog.queues.values()
                queue.wake(time.time() + 1)
                orders.append([box.run.job_id for box, _ in queue.due(time.time() + 10**6)])
            assert orders == [["2.0", "1.0"], ["1.0", "2.0"]]

    run(story())


def test_what_may_have_been_given_away_is_said_of_what_is_lost(site: Site) -> None:
    async def story() -> None:
        text = site.plugin.read_text()
        begin = "        number = numbered"
        site.write_script("copy_plugin", text.replace(begin, f"        time.sleep(1000)\n{begin}"))
        async with site.manager() as node:
            await waiting_for_a_slow_server(site, node, "1.0", {"overlay://h/ok/a": b"1" * 10_000})
            drain = Drain(node.pipeline, node.clock, 600, ROUTER)
            draining = asyncio.get_running_loop().create_task(drain.run())
            await until(lambda: any("STAGEOUT_OVERLAY_SEED" in call["env"] for call in site.calls()), "the hand-over")
            drain.cut_short()
            await draining
            assert state(node, "1.0") is State.LOST
            box, target = node.box(node.facts("1.0")), node.pipeline.runner.hand_over_to
            assert box is not None
            assert target is not None
            (receipt,) = map(read_receipt, sandbox_report(box, 0, (), written(target.begun(box.id))).custody)
            assert (receipt.custodian, receipt.first, receipt.last) == (ROUTER, 1, 1)
            for end in (State.SUPERSEDED, State.CANCELLED):  # old output would come after the new, or after all
                assert sandbox_report(replace(box, state=end), 0, (), (str(receipt),)).custody == (str(receipt),)
            assert sandbox_report(replace(box, state=State.RELEASED), 0, (), (str(receipt),)).custody == ()

    run(story())


def test_a_file_that_is_given_away_again_is_the_same_deposit(site: Site) -> None:
    """The first answer was lost: whoever gives the job up withdraws one deposit, and there is no other."""

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await handed_off(node, "1.0", {"overlay://h/ok/a": b"1", "overlay://h/ok/b": b"22"})
            box = node.box(node.facts("1.0"))
            assert box is not None
            rows = await node.pipeline.store.ledger.read(lambda db: list(queries.all_files(db, box.id)))
            target = DrainTarget(ROUTER, "")
            settings = [target.begin(some, 0) for some in (rows, rows[1:], rows[::-1])]
            assert {one["STAGEOUT_OVERLAY_SEED"] for one in settings} == {settings[0]["STAGEOUT_OVERLAY_SEED"]}
            assert [one["STAGEOUT_OVERLAY_NUMBERS"] for one in settings] == ["1-2", "2", "2,1"]
            (receipt,) = map(read_receipt, written(target.begun(box.id)))
            assert (receipt.first, receipt.last, receipt.custodian) == (1, 2, ROUTER)

    run(story())


def test_a_file_that_is_left_out_of_a_call_leaves_the_others_their_numbers(site: Site) -> None:
    """Else one would be given away as another, and that one count as delivered when this one has arrived."""

    async def story() -> None:
        async with site.manager() as node:
            await waiting_for_a_slow_server(
                site, node, "1.0", {"overlay://h/ok/a": b"1" * 10_000, "overlay://h/ok/b": b"22" * 10_000}
            )
            (ticket,) = (node.spool.root / "sandboxes").iterdir()
            (ticket / "0").write_bytes(b"longer")
            await Drain(node.pipeline, node.clock, 600, ROUTER).run()
            given = [call for call in site.calls() if "STAGEOUT_OVERLAY_NUMBERS" in call["env"]]
            assert [(call["urls"], call["env"]["STAGEOUT_OVERLAY_NUMBERS"]) for call in given] == [
                (["overlay://h/ok/b"], "2")
            ]

    run(story())


def test_files_that_may_be_in_one_pack_have_numbers_behind_each_other(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            files = {"x/a": b"1", "l": b"l" * 70_000, "y/b": b"2", "x/c": b""}
            await handed_off(node, "1.0", {f"overlay://h/{name}": data for name, data in files.items()})
            box = node.box(node.facts("1.0"))
            assert box is not None
            rows = await node.pipeline.store.ledger.read(lambda db: list(queries.all_files(db, box.id)))
            assert DrainTarget(ROUTER, "").begin(rows, 0)["STAGEOUT_OVERLAY_NUMBERS"] == "1,4,2-3"

    run(story())


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_each_deposit_is_another_operation(one: int, other: int) -> None:
    found = [operation_of(name_of(SEED, number), b"secret") for number in (one, other)]
    assert (found[0] == found[1]) == (one == other)
    assert [seq for _, seq in found] == [one, other]
    assert operation_of(name_of(SEED, one), b"other")[0] != found[0][0]


@given(st.lists(st.integers(0, 30)))
def test_numbers_of_deposits_come_out_as_they_went_in(numbers: list[int]) -> None:
    assert read_numbers(written_numbers(numbers)) == numbers


@pytest.mark.parametrize("text", ["x", "-1", "3-2", "1-9999999", "1,,x", "1 2"])
def test_other_texts_are_no_numbers(text: str) -> None:
    with pytest.raises(BadReceipt):
        read_numbers(text)


# ---- the access point ------------------------------------------------------------------------------------------------


class Clock:
    now_s, ahead_s = 1000.0, 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s + self.ahead_s


class Asked:
    """An access point with its custodians; what they say is put in by hand."""

    def __init__(self, home: Path) -> None:
        self.path, self.clock = home / "kept", Clock()
        self.says: dict[str, tuple[str, str]] = {}
        self.away = False
        self.cancelled: set[str] = set()
        self.start()

    def start(self) -> None:
        self.one = CustodyTable(self.path, [ROUTER], self._ask, self.clock)

    def _ask(self, custodian: str, origins: Sequence[str], cancel: bool) -> Mapping[str, tuple[str, str]]:
        assert custodian == ROUTER
        if self.away:
            raise TransferFailure(ErrorClass.CONNECT_FAILED, "refused")
        if cancel:
            self.cancelled |= set(origins)
        return {origin: self.says.get(origin, ("custody", "")) for origin in origins}

    def look(self, *found: ReportedSandbox) -> SandboxReport:
        """The input of the decisions after the custodians were asked."""
        for _ in range(2):
            self.clock.now_s += 11
            self.one.with_answers({JOB_KEY: found} if found else {})
            if self.one._asking:
                self.one._asking.result()
        return self.one.with_answers({})[JOB_KEY][0].sandbox


@pytest.fixture
def asked() -> Iterator[Asked]:
    with tempfile.TemporaryDirectory() as path:
        made = Asked(Path(path))
        yield made
        made.one.close()


def handed_over(place: str = ROUTER, state: State = State.HANDED_OVER) -> ReportedSandbox:
    return seen(state, custody=(f"{place} {SEED} 1-2 5000",), files_left=0)


ONE, TWO = name_of(SEED, 1), name_of(SEED, 2)


def test_delivered_only_when_all_files_are(asked: Asked) -> None:
    asked.says[ONE] = ("done", "")
    box = asked.look(handed_over())
    assert (box.state, box.reason) == ("HandedOver", f"in custody of {ROUTER}")
    asked.says[TWO] = ("done", "")
    assert asked.look().state == "Delivered"
    assert not asked.cancelled


def test_it_is_known_over_a_restart_and_without_the_pilot(asked: Asked) -> None:
    assert asked.look(handed_over()).state == "HandedOver"
    asked.one.close()
    asked.start()
    asked.says = {ONE: ("done", ""), TWO: ("done", "")}
    assert asked.look().state == "Delivered"
    asked.one.update_from_jobs({JOB_KEY: job(ad_state=replace(job().ad_state, run=1, state="Delivered"))}, {})
    written = asked.path.read_text()
    found = asked.one.with_answers({JOB_KEY: (handed_over(),)})
    assert [item.sandbox.state for item in found[JOB_KEY]] == ["Delivered"], (
        "the pilot's own report may stand for hours"
    )
    assert asked.path.read_text() == written == "[]"


@pytest.mark.parametrize(("word", "end"), [("lost", "Lost"), ("expired", "Lost"), ("failed", "Failed")])
def test_one_that_does_not_arrive_ends_the_others_first(asked: Asked, word: str, end: str) -> None:
    """Else old output could come after that of the next run."""
    asked.says[ONE] = (word, "conflict")
    assert asked.look(handed_over()).state == "HandedOver"
    assert asked.cancelled == {TWO}
    asked.says[TWO] = ("cancelled", "")
    box = asked.look()
    assert box.state == end
    assert "conflict" in box.reason


def test_what_a_lost_sandbox_may_have_given_away_is_cancelled_before_it_is_lost(asked: Asked) -> None:
    assert asked.look(handed_over(state=State.LOST)).state == "HandedOver"
    assert asked.cancelled == {ONE, TWO}
    asked.says = {ONE: ("unknown", ""), TWO: ("cancelled", "")}
    assert asked.look().state == "Lost"


def test_a_newer_run_wants_nothing_of_it(asked: Asked) -> None:
    asked.look(handed_over())
    asked.one.update_from_jobs({JOB_KEY: job(run=2, status=JobStatus.RUNNING)}, {})
    assert asked.look().state == "HandedOver", "the newer run must not be sent yet"
    assert asked.cancelled == {ONE, TWO}
    asked.says = {ONE: ("cancelled", ""), TWO: ("done", "")}
    assert asked.look().state == "Lost"
    asked.one.update_from_jobs({JOB_KEY: job(run=2, status=JobStatus.RUNNING)}, {})
    assert [item.sandbox.state for item in asked.one.with_answers({JOB_KEY: (handed_over(),)})[JOB_KEY]] == ["Lost"]


@pytest.mark.parametrize("counts", [0, 1])
@pytest.mark.parametrize("wish", ["", "cancel", "cancel run=2"])
def test_a_shadow_that_only_says_that_the_job_is_done_gives_nothing_up(asked: Asked, counts: int, wish: str) -> None:
    """The job's number has grown after the run that counts. :param counts: number of that run, 0: not known."""
    asked.look(handed_over())
    asked.one.update_from_jobs({JOB_KEY: job(run=2, request=wish)}, {}, lambda job: counts)
    asked.look()
    assert asked.cancelled == ({ONE, TWO} if wish and counts else set())
    (one,) = asked.one._handed_over.values()
    assert one.given_up == ("Cancelled" if wish and counts else "")


def test_a_copied_receipt_cancels_nothing(asked: Asked) -> None:
    """Any daemon that may advertise can read the report of a pilot and name its deposits as its own."""
    asked.look(handed_over())
    stranger = ReportedSandbox("m2", "ed25519:other", replace(handed_over().sandbox, state="Lost", number=2))
    asked.look(handed_over(), stranger)
    assert not asked.cancelled


@pytest.mark.parametrize("end", [State.CANCELLED, State.SUPERSEDED])
def test_what_its_manager_has_given_up_has_not_ended_while_it_may_arrive(asked: Asked, end: State) -> None:
    """The manager obeys an order at once, the custodian has still to be told: a newer run must wait for that."""
    asked.look(handed_over())
    assert asked.look(replace(handed_over(), sandbox=replace(handed_over(state=end).sandbox, change=2))).state == (
        "HandedOver"
    )
    assert asked.cancelled == {ONE, TWO}
    asked.says = {ONE: ("cancelled", ""), TWO: ("cancelled", "")}
    assert asked.look().state == end


def test_what_another_sandbox_has_given_in_the_same_call_is_not_cancelled(asked: Asked) -> None:
    """One call of the plugin had files of both, and was stopped after the first file."""
    whole = seen(State.HANDED_OVER, custody=(f"{ROUTER} {SEED} 1-1 5000",))
    begun = seen(State.LOST, run=2, custody=(f"{ROUTER} {SEED} 1-2 5000",))
    asked.look(begun, whole)
    assert asked.cancelled == {TWO}
    asked.says = {TWO: ("unknown", ""), ONE: ("done", "")}
    asked.look()
    boxes = {item.sandbox.number: item.sandbox.state for item in asked.one.with_answers({})[JOB_KEY]}
    assert boxes == {1: "Delivered", 2: "Lost"}


@pytest.mark.parametrize("removed", [True, False])
def test_a_job_that_was_removed_wants_nothing_of_it(asked: Asked, removed: bool) -> None:
    """It may have left the queue between two looks."""
    asked.look(handed_over())
    asked.one.update_from_jobs({}, {JOB_KEY: HistoryRecord(JobStatus.REMOVED if removed else JobStatus.COMPLETED, 1)})
    asked.one.close()
    asked.start()
    asked.look()
    assert asked.cancelled == ({ONE, TWO} if removed else set())


def test_its_owner_can_give_it_up(asked: Asked) -> None:
    asked.look(handed_over())
    asked.one.update_from_jobs({JOB_KEY: job(request="cancel")}, {})
    assert asked.look().state == "HandedOver"
    assert asked.cancelled == {ONE, TWO}
    asked.says = {ONE: ("done", ""), TWO: ("cancelled", "")}
    assert asked.look().state == "Cancelled"


@pytest.mark.parametrize(("request_text", "is_given_up"), [("cancel run=1", False), ("cancel run=2", True)])
def test_a_request_to_cancel_an_earlier_run_gives_nothing_up(
    asked: Asked, request_text: str, is_given_up: bool
) -> None:
    held = handed_over()
    asked.look(replace(held, sandbox=replace(held.sandbox, number=2)))
    asked.one.update_from_jobs({JOB_KEY: job(run=2, request=request_text)}, {})
    asked.look()
    assert bool(asked.cancelled) is is_given_up


def test_an_end_is_kept_while_the_pilots_last_report_stands(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be taken up again, and asked for again, in every pass."""
    asked.says = {ONE: ("done", ""), TWO: ("done", "")}
    asked.look(handed_over())
    monkeypatch.setattr("schedd_agent.custodians.write_file", lambda *_: pytest.fail("nothing has changed"))
    for _ in range(2):
        (item,) = asked.one.with_answers({JOB_KEY: (handed_over(),)})[JOB_KEY]
        assert item.sandbox.state == "Delivered"
        asked.one.update_from_jobs({JOB_KEY: job(ad_state=replace(job().ad_state, run=1, state="Delivered"))}, {})


def test_silence_is_no_loss_before_the_end_of_the_time(asked: Asked) -> None:
    asked.away = True
    box = asked.look(handed_over())
    assert (box.state, box.reason) == ("HandedOver", f"{ROUTER} does not answer: refused")
    asked.clock.now_s = 5000 + 3601
    box = asked.look()
    assert box.state == "Lost"
    assert "nothing was heard of it" in box.reason


def test_a_custodian_that_knows_nothing_may_have_been_asked_with_another_key(asked: Asked) -> None:
    """It said CUSTODY to the pilot: the job must not run again while it may deliver."""
    asked.says = {ONE: ("unknown", ""), TWO: ("done", "")}
    box = asked.look(handed_over())
    assert box.state == "HandedOver"
    assert "STAGEOUT_CUSTODIAN_KEY" in box.reason


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        ("done", "custody", "done"), ("done", "unknown", "done"), ("lost", "done", "done"), ("unknown", "done", "done"),
        ("lost", "custody", ""), ("unknown", "custody", ""), ("lost", "lost", "lost"), ("unknown", "lost", "lost"),
        ("unknown", "unknown", ""), ("custody", "custody", ""), ("cancelled", "unknown", "cancelled"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_custodians_one_that_delivers_is_enough(first: str, second: str, end: str, turned: bool) -> None:
    other = "other.example.org:9621"
    kept = HandedOverSandbox(handed_over(f"{ROUTER},{other}"), (read_receipt(f"{ROUTER},{other} {SEED} 1-1 5000"),))
    assert kept.open == [(ROUTER, ONE), (other, ONE)]
    answers = [(ROUTER, first), (other, second)]
    for place, outcome in reversed(answers) if turned else answers:
        if kept.open:
            kept.record_answer(ONE, (outcome, ""), place)
    assert kept.outcomes.get(ONE, ("", ""))[0] == end
    assert bool(kept.open) == (not end)


def test_all_deposits_with_a_custodian_are_asked_for_at_once_and_one_that_fails_holds_up_no_other(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question to a host that is down takes a minute."""
    asked.one.allowed = frozenset([ROUTER, "away.org:1"])
    places: list[str] = []

    def ask(place: str, names: Sequence[str], cancel: bool) -> Mapping[str, tuple[str, str]]:
        places.append(place)
        if place != ROUTER:
            raise OSError("no such file")
        return dict.fromkeys(names, ("done", ""))

    monkeypatch.setattr(asked.one, "ask", ask)
    runs = [replace(handed_over("away.org:1"), sandbox=replace(handed_over("away.org:1").sandbox, number=number))
            for number in range(2, 9)]  # fmt: skip
    asked.clock.now_s += 11
    asked.one.with_answers({JOB_KEY: [*runs, handed_over()]})
    assert asked.one._asking
    asked.one._asking.result()
    assert sorted(places) == ["away.org:1", ROUTER]
    assert asked.one.with_answers({})[JOB_KEY][-1].sandbox.state == "Delivered"


def test_what_is_said_of_other_deposits_meanwhile_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pilot's deposits are of one origin, and whoever asks for one of them hears what becomes of the others."""
    gateway = Gateway("router", 1, "key", b"secret")
    (origin, _), asked_for = operation_of(ONE, gateway.secret), list[Status]()

    class Told:
        def __init__(self, gateway: Gateway) -> None:
            self._said = [Custody(origin, 7, "r"), Result(origin, 8, "done"), Custody(origin, 1, "r")]

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def send(self, message: Status) -> None:
            asked_for.append(message)

        def receive(self) -> Custody | Result:
            return self._said.pop(0) if self._said else Result(asked_for[-1].origin, asked_for[-1].seq, "unknown")

    monkeypatch.setattr(custodian_client, "gateway_of", lambda host, port, key: gateway)
    monkeypatch.setattr(custodian_client, "Channel", Told)
    assert custodian_client.CustodianClient(Path("key"))(ROUTER, [ONE], False) == {ONE: ("custody", "")}


@pytest.mark.parametrize("cancel", [False, True])
def test_deposits_of_pilots_of_an_earlier_release_are_found(cancel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were asked for in vain, so their jobs waited for a day and ran again although all had arrived."""
    gateway = Gateway("router", 1, "key", b"secret")
    knows = {earlier_operation_of(ONE, gateway.secret): "done", operation_of(TWO, gateway.secret): "failed"}
    said, cancelled = list[Result](), list[tuple[str, int]]()

    class Told:
        def __init__(self, gateway: Gateway) -> None:
            pass

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def send(self, message: Status | Cancel) -> None:
            key = message.origin, message.seq
            if isinstance(message, Cancel):
                cancelled.append(key)
            else:
                said.append(Result(*key, knows.get(key, "unknown")))

        def receive(self) -> Result:
            return said.pop(0)

    monkeypatch.setattr(custodian_client, "gateway_of", lambda host, port, key: gateway)
    monkeypatch.setattr(custodian_client, "Channel", Told)
    three = name_of(SEED, 3)
    found = custodian_client.CustodianClient(Path("key"))(ROUTER, [ONE, TWO, three], cancel)
    assert found == {ONE: ("done", ""), TWO: ("failed", ""), three: ("unknown", "")}
    assert (earlier_operation_of(ONE, gateway.secret) in cancelled) is cancel


def test_custodians_that_are_not_named_are_not_asked(asked: Asked) -> None:
    box = asked.look(handed_over("other.org:1"))
    assert box.state == "HandedOver"
    assert "STAGEOUT_CUSTODIANS does not name" in box.reason


def test_a_report_with_a_bad_receipt_is_left_alone(asked: Asked) -> None:
    asked.one.with_answers({JOB_KEY: (seen(State.HANDED_OVER, custody=("rubbish",)),)})
    assert asked.one.with_answers({}) == {}
    assert not asked.path.exists()


def test_events_of_the_hand_over_are_named_in_the_document() -> None:
    text = Path(__file__).parents[2].joinpath("docs/pilot/index.md").read_text()
    assert {"handover-started", "output-stranded"} <= set(re.findall(r"`([a-z-]+)`", text))
