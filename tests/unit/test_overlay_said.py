"""A custodian's statements onward are known after a restart, too, and are asked about before they are called
expired."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router.copying.copier import Copier, _Try
from overlay_router.copying.copies import Copies, CopyStore
from overlay_router.custodians import carrier
from overlay_router.custodians.carrier import Answer, Note
from overlay_router.custodians.facts import before
from overlay_router.custodians.forwarder import Forwarder
from overlay_router.custodians.pack_carrier import Answer as PackAnswer
from overlay_router.custodians.said import ASKS_S
from overlay_router.custodians.spooled import Growth, Spooled
from overlay_router.peers.keys import OwnCredential
from overlay_router.rules.states import Outcome, Result
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.wire import messages
from stageout.overlay.wire.frames import digests
from stageout.overlay.wire.messages import Custody, Operation, Packed
from tests.in_loop import in_loop
from tests.unit import test_overlay_pack_custody as packs
from tests.unit.test_overlay_custodian import EXPIRES, ORIGIN, PEER, TERMINAL, Clock, Spooling, coming, publish
from tests.unit.test_overlay_pack_custody import spooling

__all__ = ["spooling"]
KEY = (ORIGIN, 1)


class Delivering:
    """A forwarder, what it tells the process that delivers, and what it has said; no disk is slow."""

    def __init__(self, spooling: Spooling) -> None:
        self.spooling, self.told, self.said = spooling, list[dict[str, Any]](), list[Any]()
        self.one = in_loop(
            lambda: Forwarder(spooling.one, self._on_disk, self._say, OwnCredential(), 3, spooling.clock)
        )
        self.one._carrier = cast(Any, SimpleNamespace(is_running=True, write=self.told.append))

    async def _on_disk(self, work: Callable[[], Any]) -> Any:
        return work()

    def _say(self, replies: list[Any]) -> None:
        self.said += [reply.message for reply in replies]

    def begin(self) -> list[dict[str, Any]]:
        """The message to the process now."""
        self.told.clear()
        asyncio.run(self.one._begin())
        return list(self.told)

    def order(self) -> dict[str, Any]:
        (told,) = self.begin()
        return told

    def meets(self, number: int, store: str, says: bool) -> list[dict[str, Any]]:
        self.told.clear()
        asyncio.run(self.one._noted(Note(number, [], [], store=store, says=says)))
        return list(self.told)

    def answers(self, answer: Answer) -> None:
        asyncio.run(self.one._answered(answer))
        self.spooling.clock.now_s += 200.0  # behind any pause


def _connection_lost(number: int) -> Answer:
    return Answer(number, failure="lost", code=ErrorClass.CONNECTION_LOST.code)


def test_whom_a_file_may_have_been_said_to_is_on_the_disk_before_it_is(spooling: Spooling) -> None:
    spooling.take(1)
    delivering = Delivering(spooling)
    order = delivering.order()
    assert (order["said_to"], order["store"]) == (None, None), "nobody was met yet"
    assert spooling.store.said() == {}
    assert delivering.meets(order["number"], "old", True) == [{"said": order["number"], "store": "old"}]
    assert spooling.store.said() == {KEY: "old"}
    delivering.answers(replace(_connection_lost(order["number"]), said=True))
    spooling.restart()
    again = Delivering(spooling).order()
    assert (again["said_to"], again["store"]) == ("old", "old")
    spooling.take(2)
    (held,) = [held for held in spooling.one.held() if held.key[1] == 2]
    met = Delivering(spooling)
    met.one._stores[TERMINAL] = "old"
    (order,) = [told for told in met.begin() if json.loads(told["operation"])["seq"] == 2]
    assert (order["said_to"], order["store"]) == (None, "old")
    assert spooling.store.said()[held.key] == "old", "before the process hears of it"
    for seq in (1, 2):
        spooling.one.settle((ORIGIN, seq), Result(Outcome.DONE))
    assert (spooling.store.said(), spooling.one.said.to(KEY)) == ({}, None)


def test_what_cannot_be_recorded_is_not_said(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*facts: object) -> None:
        raise OSError(28, "No space left on device")

    spooling.take(1)
    delivering = Delivering(spooling)
    number = delivering.order()["number"]
    monkeypatch.setattr(spooling.store, "say", full)
    assert delivering.meets(number, "new", True) == [{"stop": number}]
    delivering.answers(Answer(number, failure="stopped", code=ErrorClass.NOT_ATTEMPTED.code))
    assert delivering.begin() == [], "known where, it is not ordered without that record"
    assert "No space" in str(delivering.one.problems)


def test_a_change_of_names_is_recorded_when_it_is_said_and_not_before(spooling: Spooling) -> None:
    spooling.one.operate(Operation(ORIGIN, 1, "delete", "f", EXPIRES, terminal=TERMINAL), PEER, "")
    delivering = Delivering(spooling)
    delivering.one._stores[TERMINAL] = "new"
    order = delivering.order()
    assert (order["said_to"], order["store"], spooling.store.said()) == (None, None, {})


def test_a_file_that_was_sent_on_early_is_published_when_that_is_recorded(spooling: Spooling) -> None:
    spooling.spool.size_bytes = 1000
    tid = coming(spooling, 1)
    delivering = Delivering(spooling)
    delivering.one.opened(tid)
    order = delivering.order()
    spooling.one.staged(tid, [(1, b"d" * 16)])
    manifest = hashlib.sha256(b"d" * 32).hexdigest()
    operation = replace(publish(), size_bytes=2, blocks=2, manifest=manifest)
    assert isinstance(spooling.one.operate(operation, PEER, "blake2b-128")[-1].message, Custody)
    assert delivering.begin() == [], "its terminal was not met"
    delivering.one.wake.clear()
    assert delivering.meets(order["number"], "new", False) == []
    assert delivering.one.wake.is_set(), "else it is published some seconds later"
    whole = delivering.order()
    assert (whole["whole"], whole["store"]) == (order["number"], "new")
    assert spooling.store.said() == {KEY: "new"}


@pytest.mark.parametrize(("release", "outcome"), [("delivered", "expired"), ("custody", "lost")])
def test_what_was_never_said_expires_at_once(spooling: Spooling, release: str, outcome: str) -> None:
    spooling.take(1, release)
    spooling.clock.now_s = EXPIRES + 1.0
    (reply,) = spooling.one.expire(())
    assert isinstance(reply.message, messages.Result)
    assert (reply.message.outcome, "not known" in reply.message.reason) == (outcome, False)


def test_what_never_left_is_not_known_as_said(spooling: Spooling) -> None:
    """Its terminal was away all the time: everybody knows that it was not done."""
    spooling.take(1)
    delivering = Delivering(spooling)
    delivering.one._stores[TERMINAL] = "old"
    delivering.answers(Answer(delivering.order()["number"], failure="away", code=ErrorClass.CONNECT_FAILED.code))
    assert (spooling.one.said.to(KEY), spooling.store.said()) == (None, {})
    delivering.answers(replace(_connection_lost(delivering.order()["number"]), said=True))
    assert spooling.one.said.to(KEY) == "old"
    delivering.answers(Answer(delivering.order()["number"], failure="away", code=ErrorClass.CONNECT_FAILED.code))
    assert spooling.store.said() == {KEY: "old"}, "it may have been said before"


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("answer", ["done", "expired"])
def test_what_may_have_been_done_is_asked_about_before_it_is_expired(
    spooling: Spooling, answer: str, damaged: bool
) -> None:
    spooling.take(1)
    spooling.one.said.say(KEY, "old")
    if damaged:
        spooling.one.damaged(KEY, [0])
    spooling.clock.now_s = EXPIRES + 1.0
    spooling.restart()
    assert spooling.one.expire(()) == []
    delivering = Delivering(spooling)
    order = delivering.order()
    assert (order["cancel"], order["said_to"], order["asks"]) == ("late", "old", False)
    delivering.answers(_connection_lost(order["number"]))
    delivering.answers(Answer(delivering.order()["number"], answer, generation=3))
    assert [message.outcome for message in delivering.said] == [answer]


def test_who_asks_meanwhile_hears_that_it_is_in_custody(spooling: Spooling) -> None:
    """Its data need not come again, and EXPIRED would be final before the terminal was asked."""
    spooling.take(1)
    spooling.one.said.say(KEY, "old")
    spooling.one.damaged(KEY, [0])
    spooling.clock.now_s = EXPIRES + 1.0
    ask = messages.Open(ORIGIN, 1, "f1", 4, 4, EXPIRES, TERMINAL)
    said = [spooling.one.open(ask, PEER), *spooling.one.operate(publish(), PEER, "blake2b-128")]
    said += spooling.one.status(messages.Status(*KEY), PEER)
    assert [reply.message for reply in said] == [Custody(*KEY, "me:1")] * 3


def test_what_may_have_been_done_is_cancelled_by_its_terminal_also_when_its_data_are_gone(spooling: Spooling) -> None:
    for seq in (1, 2):
        spooling.take(seq)
        spooling.one.damaged((ORIGIN, seq), [0])
    spooling.one.said.say(KEY, "old")
    assert spooling.one.cancel(messages.Cancel(*KEY), PEER) == []
    (never_said,) = spooling.one.cancel(messages.Cancel(ORIGIN, 2), PEER)
    assert isinstance(never_said.message, messages.Result)
    assert never_said.message.outcome == "cancelled"
    delivering = Delivering(spooling)
    order = delivering.order()
    assert (order["cancel"], order["said_to"], order["file"]) == ("all", "old", "")
    delivering.answers(Answer(order["number"], "done", generation=3))
    assert [message.outcome for message in delivering.said] == ["done"]


@pytest.mark.parametrize(("release", "outcome"), [("delivered", "expired"), ("custody", "lost")])
def test_when_nobody_answers_it_is_said_that_nobody_knows(spooling: Spooling, release: str, outcome: str) -> None:
    spooling.take(1, release)
    spooling.one.said.say(KEY, "old")
    spooling.clock.now_s = EXPIRES + ASKS_S + 1.0
    (reply,) = spooling.one.expire(())
    assert isinstance(reply.message, messages.Result)
    assert (reply.message.outcome, "not known" in reply.message.reason) == (outcome, True)


def test_of_two_custodians_each_asks(spooling: Spooling) -> None:
    """The other one may have delivered it."""
    spooling.take(1)
    (held,) = spooling.one.held()
    both = replace(held, operation=replace(held.operation, copies=2))
    assert spooling.one.said.is_asked_about(both, EXPIRES + 1.0)
    assert not spooling.one.said.is_asked_about(held, EXPIRES + 1.0)


class _Terminal:
    """Answers a STATUS, and what else it is asked, with these. :ivar heard: what it was told."""

    def __init__(self, answer: str, store: str = "old", status: str = "unknown") -> None:
        self.store, self.heard, self._answer, self._status = store, list[str](), answer, status

    def send(self, message: object) -> None:
        self.heard.append(type(message).__name__)

    def has_more(self, within_s: float) -> bool:
        return True

    def receive(self) -> messages.Result:
        return messages.Result(ORIGIN, 5, self._status if self.heard[-1] == "Status" else self._answer, generation=3)

    def abort(self) -> None:
        pass

    gateway = SimpleNamespace(timeout_s=1.0)


def _delivered(monkeypatch: pytest.MonkeyPatch, terminal: _Terminal, order: carrier.Order) -> Answer:
    monkeypatch.setattr(carrier, "Channel", lambda *place: nullcontext(terminal))
    growth = Growth({}, None, said=order.store)
    growth.meets = lambda store, says: growth.said_to(store)
    return carrier.deliver(order, growth)


def _order(kind: str, onward: str = "", **further: Any) -> carrier.Order:
    operation = Operation(ORIGIN, 5, kind, "f", EXPIRES, terminal=onward)
    return carrier.Order(1, "t:1", "key", "00", json.dumps(asdict(operation)), **further)


@pytest.mark.parametrize(
    ("status", "answer", "outcome"),
    [("done", "", "done"), ("failed", "", "failed"), ("unknown", "cancelled", "expired"),
     ("pending", "done", "done"), ("unknown", "failed", "expired")],
)  # fmt: skip
def test_a_late_operation_is_what_its_terminal_has_recorded(
    monkeypatch: pytest.MonkeyPatch, status: str, answer: str, outcome: str
) -> None:
    """An operation without a result is cancelled there, so that it is not executed after that."""
    terminal = _Terminal(answer, status=status)
    found = _delivered(monkeypatch, terminal, _order("delete", cancel="late", said_to="old", store="old"))
    assert found.outcome == outcome
    assert terminal.heard == (["Status", "Cancel", "Operation"] if answer else ["Status"])


def test_of_a_late_operation_whose_terminal_has_lost_its_records_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal("cancelled", "new")
    found = _delivered(monkeypatch, terminal, _order("delete", cancel="late", said_to="old", store="old"))
    assert (found.outcome, "not known" in found.reason, terminal.heard) == ("expired", True, [])


def test_what_the_next_custodian_does_not_have_is_cancelled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said again it would wait there for data that nobody sends, and be asked about until it expires."""
    terminal = _Terminal("", "")
    found = _delivered(monkeypatch, terminal, _order("publish", "u:1", cancel="all", said_to=""))
    assert (found.outcome, terminal.heard) == ("cancelled", ["Cancel", "Status"])


def test_an_operation_waits_until_its_record_is_there_or_nobody_wants_it() -> None:
    growth, asked = Growth({}, None), threading.Event()
    growth.meets = lambda store, says: asked.set()
    ended: list[str] = []

    def say() -> None:
        try:
            growth.say("new")
            ended.append("said")
        except TransferFailure as failure:
            ended.append(failure.kind.name)

    for end, expected in ((lambda: growth.said_to("new"), "said"), (growth.stop, "NOT_ATTEMPTED")):
        growth._said = None
        asked.clear()
        thread = threading.Thread(target=say)
        thread.start()
        assert asked.wait(60)
        assert not ended
        end()
        thread.join(60)
        assert ended == [expected]
        ended.clear()


def test_a_file_is_not_published_to_other_records_than_those_that_are_recorded(tmp_path: Path) -> None:
    spool, met = tmp_path / "spool", list[tuple[str, bool]]()
    spool.write_bytes(b"data")
    order = Operation(ORIGIN, 5, "publish", "f", EXPIRES, size_bytes=4, blocks=1)
    digest = digests()["blake2b-128"]
    growth = Growth({0: digest(b"data")}, order, meets=lambda *facts: met.append(facts), said="old")
    upload = Spooled(Gateway("host", 1, "key", b"secret"), spool, order, growth, "blake2b-128", None, 1)
    channel = cast(Any, SimpleNamespace(digest_name="blake2b-128", store="new"))
    with pytest.raises(TransferFailure, match="other records"):
        upload.publish(7, channel)
    assert met == [("new", False)]


def test_what_has_its_end_here_is_not_waited_for_at_a_terminal_that_may_have_forgotten_it(spooling: Spooling) -> None:
    rename = Operation(ORIGIN, 3, "rename", "f1", EXPIRES, target="g", after=(1, 2), terminal=TERMINAL)
    assert before(spooling.one, rename) == (1, 2), "nothing is known of them here"
    spooling.take(1)
    spooling.one.settle(KEY, Result(Outcome.DONE))
    assert before(spooling.one, rename) == (2,)
    assert before(spooling.one, replace(rename, capability="signed")) == (1, 2), "that would not be what was signed"
    spooling.one.operate(rename, PEER, "")
    assert json.loads(Delivering(spooling).order()["operation"])["after"] == [2]
    spooling.restart()
    assert json.loads(Delivering(spooling).order()["operation"])["after"] == [2]


def test_what_had_to_come_after_a_failure_fails_without_asking(spooling: Spooling) -> None:
    spooling.take(1)
    spooling.one.settle(KEY, Result(Outcome.FAILED, "no"))
    rename = Operation(ORIGIN, 2, "rename", "f1", EXPIRES, target="g", after=(1,), terminal=TERMINAL)
    spooling.one.operate(rename, PEER, "")
    delivering = Delivering(spooling)
    assert delivering.begin() == []
    assert [(message.outcome, message.reason) for message in delivering.said] == [("failed", "dependency")]
    assert not spooling.one.held()


# ---- packs -----------------------------------------------------------------------------------------------------------


def _outcomes(delivering: packs.Delivering) -> list[str]:
    (reply,) = delivering.told
    assert isinstance(reply.message, Packed)
    return list(reply.message.outcomes)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("answer", ["done", "unknown"])
def test_a_pack_that_may_have_arrived_is_asked_about_before_it_is_expired(
    spooling: Spooling, answer: str, restarts: bool
) -> None:
    spooling.one.packs.take([packs.pack()])
    delivering = packs.Delivering(spooling)
    delivering.step()
    lost = PackAnswer(delivering.number(1), failure="lost", code=ErrorClass.CONNECTION_LOST.code)
    assert delivering.step(lost) == []
    if restarts:
        spooling.restart()
        delivering = packs.Delivering(spooling)
    spooling.clock.now_s = EXPIRES + 1.0
    assert spooling.one.expire(()) == []
    assert delivering.step() == [(1, True)], "it is not sent any more"
    said = PackAnswer(delivering.number(1), [("done", "", 1, 0)] * 3) if answer == "done" else None
    delivering.step(said or PackAnswer(delivering.number(1), failure="no", is_unknown=True))
    assert _outcomes(delivering) == ([] if answer == "done" else ["expired"] * 3)


@pytest.mark.parametrize(("release", "outcome"), [("delivered", "expired"), ("custody", "lost")])
def test_of_a_pack_whose_terminal_was_away_it_is_said_whether_it_may_have_arrived(
    spooling: Spooling, release: str, outcome: str
) -> None:
    """Another custodian may have what its sender has freed."""
    spooling.one.packs.take([packs.pack(release=release)])
    delivering = packs.Delivering(spooling)
    delivering.step()
    delivering.step(PackAnswer(delivering.number(1), failure="away", code=ErrorClass.CONNECT_FAILED.code))
    spooling.clock.now_s = EXPIRES + 1.0
    if release == "custody":
        assert spooling.one.expire(()) == []
        spooling.clock.now_s += ASKS_S
    (reply,) = spooling.one.expire(())
    assert isinstance(reply.message, Packed)
    assert list(reply.message.outcomes) == [outcome] * 3
    assert ("not known" in reply.message.reasons[0]) == (release == "custody")


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["late", "cancelled", "replaced"])
@pytest.mark.parametrize("answer", ["done", "cancelled"])
@pytest.mark.parametrize("reached", [False, True])
def test_a_copy_that_is_given_up_and_has_been_made_is_made(why: str, answer: str, reached: bool) -> None:
    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    async def ways(terminal: str) -> Any:
        return ((),)

    async def run(order: Any, *facts: object) -> dict[str, Any]:
        assert order.cancel
        return {"outcome": answer}

    copy = SimpleNamespace(source="f", source_generation=1, terminal="t:1")
    commanded = cast(Any, SimpleNamespace(copy=copy, key=KEY, reached=reached, given_up=None, sender=f"k/{KEY[0]}"))
    copies = SimpleNamespace(is_late=lambda one: why == "late", cancelled={KEY} if why == "cancelled" else set())
    tree = SimpleNamespace(published=lambda *name: messages.Answer(code=ErrorClass.CONFLICT.code, message="replaced"))
    copier = in_loop(
        lambda: Copier(cast(Any, copies), cast(Any, tree), on_disk, lambda replies: None, ways, OwnCredential(), 1)
    )
    copier._run = run  # type: ignore[method-assign]
    end = asyncio.run(copier._carried_out(commanded, _Try()))
    given_up = {"late": "expired", "cancelled": "cancelled", "replaced": None}[why]
    assert end.get("outcome") == (answer if reached and answer == "done" else given_up)


_REFUSED = {"problem": "wrong key", "code": ErrorClass.CREDENTIAL_REFUSED.code, "again": False}


@pytest.mark.parametrize(
    ("reached", "asked", "outcome", "words"),
    [
        (False, [], "failed", "unreachable"),
        (True, [{"outcome": "done"}], "done", ""),
        (True, [{"outcome": "cancelled"}], "failed", "wrong key"),
        (True, [_REFUSED, {"outcome": "done"}], "done", ""),
        (True, [_REFUSED] * 3, "failed", "wrong key; whether it is there is not known"),
    ],
)
def test_a_copy_has_failed_only_when_it_is_known_that_it_was_not_made(
    tmp_path: Path, reached: bool, asked: list[dict[str, Any]], outcome: str, words: str
) -> None:
    """A router that has refused the last try may have made the copy in the one before."""
    clock, store, said, ends = Clock(), CopyStore(tmp_path / "store"), list[Any](), [_REFUSED, *asked]

    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    def found() -> Any:
        return SimpleNamespace(file=os.open("/dev/null", os.O_RDONLY), digests=b"", content=None)

    async def ways(terminal: str) -> Any:
        return ((),)

    async def run(order: Any, *facts: object) -> dict[str, Any]:
        assert order.cancel == (len(ends) <= len(asked)), "only the first one is tried, the others only ask"
        clock.now_s += ASKS_S / 2
        return ends.pop(0)

    async def story() -> None:
        copies.take(messages.Copy(ORIGIN, 1, "f", 1, "t:1", "g", 4, 0o644, EXPIRES * 10, ""), PEER)
        (commanded,) = copies.due()
        commanded.reached = reached
        tree = SimpleNamespace(published=lambda *name: found())
        copier = Copier(copies, cast(Any, tree), on_disk, said.extend, ways, OwnCredential(), 1)
        copier._run = run  # type: ignore[method-assign]
        for _ in range(len(ends)):
            await copier._try(commanded, _Try())
        assert not copies.has(commanded)

    copies = Copies(store, "me:1", clock)
    try:
        asyncio.run(story())
        end = said[-1].message
        assert (end.outcome, end.reason.startswith(words), ends) == (outcome, True, [])
    finally:
        store.close()


def test_a_copy_that_may_have_been_made_is_not_expired_at_once(tmp_path: Path) -> None:
    clock, store = Clock(), CopyStore(tmp_path / "store")
    copies = Copies(store, "me:1", clock)
    try:
        for seq in (1, 2):
            copies.take(messages.Copy(ORIGIN, seq, "f", 1, "t:1", "g", 4, 0o644, EXPIRES, ""), PEER)
        copies.moved((ORIGIN, 2), 0)
        clock.now_s = EXPIRES + 1.0
        (first,) = copies.expire(())
        assert isinstance(first.message, messages.Result)
        assert (first.message.seq, "not known" in first.message.reason) == (1, False)
        clock.now_s += ASKS_S
        (second,) = copies.expire(())
        assert isinstance(second.message, messages.Result)
        assert (second.message.seq, "not known" in second.message.reason) == (2, True)
    finally:
        store.close()


def test_a_copy_whose_router_never_answers_has_its_end_and_its_place_is_free(tmp_path: Path) -> None:
    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    clock, store, killed = Clock(), CopyStore(tmp_path / "store"), list[str]()
    copies = Copies(store, "me:1", clock)
    try:
        copies.take(messages.Copy(ORIGIN, 1, "f", 1, "t:1", "g", 4, 0o644, EXPIRES, ""), PEER)
        copies.moved(KEY, 0)
        copier = in_loop(
            lambda: Copier(copies, cast(Any, None), on_disk, lambda replies: None, cast(Any, None), OwnCredential(), 1)
        )
        process = cast(Any, SimpleNamespace(returncode=None, kill=lambda: killed.append("it")))
        copier._tries[KEY] = _Try(task=cast(Any, "runs"), process=process)
        clock.now_s = EXPIRES + ASKS_S + 1.0
        assert copies.expire(copier.busy) == []
        asyncio.run(copier._begin())
        assert killed == []
        clock.now_s += ASKS_S
        (end,) = copies.expire(copier.busy)
        assert isinstance(end.message, messages.Result)
        assert (end.message.outcome, "not known" in end.message.reason) == ("expired", True)
        asyncio.run(copier._begin())
        assert killed == ["it"]
    finally:
        store.close()
