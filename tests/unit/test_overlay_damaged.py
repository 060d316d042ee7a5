"""A file whose only copy was damaged in a spool is asked about where it may have arrived, before it is called lost."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlay_router.custodians import carrier
from overlay_router.custodians.carrier import Answer
from overlay_router.custodians.pack_carrier import Answer as PackAnswer
from overlay_router.custodians.said import ASKS_S
from overlay_router.custodians.spooled import Growth
from overlay_router.local.store import StoreError
from overlay_router.rules import lots
from overlay_router.rules.states import Outcome, Result
from stageout.core import durable
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Cancel, Custody, Open, Opened, Operation, Staged, Status
from tests.unit import test_overlay_pack_custody as packs
from tests.unit.test_overlay_custodian import EXPIRES, ORIGIN, PEER, TERMINAL, Spooling, publish, spooling
from tests.unit.test_overlay_said import KEY, Delivering

__all__ = ["spooling"]


def _damaged_after_it_was_said(spooling: Spooling) -> Delivering:
    spooling.take(1, "custody")
    delivering = Delivering(spooling)
    delivering.one._stores[TERMINAL] = "old"
    number = delivering.order()["number"]
    delivering.answers(Answer(number, failure="lost", code=ErrorClass.CONNECTION_LOST.code, said=True))
    number = delivering.order()["number"]
    delivering.answers(Answer(number, damaged=[0], code=ErrorClass.SOURCE_CHANGED.code))
    return delivering


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("outcome", ["done", "lost"])
def test_what_may_have_arrived_is_asked_about(spooling: Spooling, restarts: bool, outcome: str) -> None:
    delivering = _damaged_after_it_was_said(spooling)
    assert delivering.said == []
    if restarts:
        spooling.restart()
        delivering = Delivering(spooling)
    (reply,) = spooling.one.status(Status(*KEY), PEER)
    assert isinstance(reply.message, Custody), "its sender has no data any more"
    assert spooling.one.find(TERMINAL, "f1") is None
    order = delivering.order()
    assert (order["cancel"], order["said_to"], order["file"]) == ("damaged", "old", "")
    delivering.answers(Answer(order["number"], waits=True))
    order = delivering.order()
    delivering.answers(Answer(order["number"], outcome))
    (end,) = delivering.said
    assert end.outcome == outcome
    assert spooling.files() == 0


def test_what_was_never_said_is_lost_at_once(spooling: Spooling) -> None:
    spooling.take(1, "custody")
    delivering = Delivering(spooling)
    delivering.one._stores[TERMINAL] = "old"
    delivering.answers(Answer(delivering.order()["number"], damaged=[0], code=ErrorClass.SOURCE_CHANGED.code))
    (end,) = delivering.said
    assert end.outcome == "lost"


@pytest.mark.parametrize("copies", [1, 2])
def test_it_is_asked_about_for_a_while(spooling: Spooling, copies: int) -> None:
    _damaged_after_it_was_said(spooling)
    if copies > 1:
        held = spooling.one._held[KEY]
        spooling.one._held[KEY] = replace(
            held, operation=replace(held.operation, copies=copies, expires=EXPIRES + 5000)
        )
    assert spooling.one.expire(()) == []
    spooling.clock.now_s += ASKS_S + 1.0
    ends = spooling.one.expire(())
    if copies > 1:
        assert ends == [], "another custodian has it"
        return
    (reply,) = ends
    assert isinstance(reply.message, messages.Result)
    assert (reply.message.outcome, "not known" in reply.message.reason) == ("lost", True)


def test_who_cancels_it_is_heard(spooling: Spooling) -> None:
    delivering = _damaged_after_it_was_said(spooling)
    assert spooling.one.cancel(Cancel(*KEY), PEER) == []
    assert delivering.order()["cancel"] == "all"


def test_while_the_spool_is_not_there_nothing_is_lost(spooling: Spooling) -> None:
    """Its filesystem was unmounted, say, or its directory moved: both come back."""
    spooling.spool.size_bytes = 10_000
    spooling.take(1, "custody")
    spooling.one.packs.take([packs.pack(1, origin="0b" * 16, release="custody")])
    files, small = Delivering(spooling), packs.Delivering(spooling)
    small.step()
    (pack,) = spooling.one.packs.held()
    inside, away = spooling.home / ".stageout", spooling.home / "away"
    inside.rename(away)
    damaged = Answer(files.order()["number"], damaged=[0], code=ErrorClass.SOURCE_CHANGED.code)
    files.answers(damaged)
    small.step(PackAnswer(small.one._given[pack.key].number, damaged=[0, 1, 2]))
    assert (files.said, small.told) == ([], [])
    for problems in (files.one.problems, small.one.problems):
        assert "is not there" in str(problems)
    with pytest.raises(OSError, match="is not there"):
        spooling.take(2)
    with pytest.raises(OSError, match="is not there"):
        spooling.one.packs.take([packs.pack(11)])
    spooling.clock.now_s += 1.5
    assert small.step() == [(1, False)]
    small.step(PackAnswer(small.one._given[pack.key].number, damaged=[0, 1, 2]))
    spooling.clock.now_s += 1.5
    assert small.step() == [], "it is tried ever more seldom"
    away.rename(inside)
    spooling.clock.now_s += 200.0
    assert Path(files.order()["file"]).exists()
    assert small.step() == [(1, False)]
    assert isinstance(spooling.take(2).message, Custody)


class _Hop:
    """Answers each question with the next of these. :ivar heard: what it was told."""

    store = "old"
    gateway = SimpleNamespace(timeout_s=1.0)

    def __init__(self, *answers: Any) -> None:
        self.heard, self._answers = list[str](), list(answers)

    def send(self, message: object) -> None:
        self.heard.append(type(message).__name__)

    def has_more(self, within_s: float) -> bool:
        return True

    def receive(self) -> Any:
        return self._answers.pop(0)


def _result(outcome: str) -> messages.Result:
    return messages.Result(ORIGIN, 1, outcome)


def _asked(
    monkeypatch: pytest.MonkeyPatch, hop: _Hop, onward: str = "", copies: int = 1, said_to: str = "old"
) -> Answer:
    monkeypatch.setattr(carrier, "Channel", lambda *place: nullcontext(hop))
    operation: Operation = replace(publish(), terminal=onward)
    text = json.dumps(asdict(operation))
    order = carrier.Order(1, "t:1", "key", "00", text, cancel="damaged", said_to=said_to, copies=copies)
    return carrier.deliver(order, Growth({}, None))


_WHOLE, _PART = Staged(7, ((0, 1),)), Staged(7, ())


@pytest.mark.parametrize(
    ("answers", "onward", "copies", "end", "heard"),
    [
        ([_result("done")], "", 1, "done", "Status"),
        ([_result("pending")], "", 1, "waits", "Status"),
        ([Custody(ORIGIN, 1, "u:1")], "u:1", 1, "waits", "Status"),
        ([_WHOLE, _result("done")], "", 1, "done", "Status Operation"),
        ([_PART, _result("cancelled")], "", 1, "lost", "Status Cancel Operation"),
        ([_PART, _result("done")], "", 1, "done", "Status Cancel Operation"),
        ([_result("unknown"), _result("cancelled")], "", 1, "lost", "Status Cancel Operation"),
        ([_result("unknown"), _result("unknown")], "u:1", 1, "lost", "Status Cancel Status"),
        ([_result("unknown")], "", 2, "waits", "Status"),
    ],
)
def test_what_the_next_hop_says_counts(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], onward: str, copies: int, end: str, heard: str
) -> None:
    hop = _Hop(*answers)
    found = _asked(monkeypatch, hop, onward, copies)
    assert (found.outcome or ("waits" if found.waits else found.failure), " ".join(hop.heard)) == (end, heard)


def test_of_a_terminal_that_has_lost_its_records_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _asked(monkeypatch, hop := _Hop(), said_to="older")
    assert (found.outcome, "not known" in found.reason, hop.heard) == ("lost", True, [])


def test_what_cannot_be_looked_at_now_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = carrier.Order(1, TERMINAL, "key", "00", "{}", file=str(tmp_path / "gone"), digest="blake2b-128")
    assert list(carrier._damaged(order, 4, {0: b"d" * 16})) == [0]

    def refuses(*how: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="too many"):
        patch.setattr(carrier.os, "open", refuses)
        list(carrier._damaged(order, 4, {0: b"d" * 16}))


def test_a_router_does_not_start_on_another_spool_than_its_records_are_of(spooling: Spooling) -> None:
    """Which was not mounted, say, at the start of its machine: what is in custody would be lost by that."""
    spooling.take(1, "custody")
    inside, away = spooling.home / ".stageout", spooling.home / "away"
    inside.rename(away)
    with pytest.raises(StoreError, match=r"is not the spool .* of 1 files and packs .* mount it") as caught:
        spooling.restart()
    place = inside / "place"
    assert str(place) in str(caught.value)
    shutil.rmtree(inside)
    away.rename(inside)
    spooling.restart()
    assert [held.key for held in spooling.one.due()] == [KEY]
    name = place.read_text()
    shutil.rmtree(inside)
    with pytest.raises(StoreError, match=name.strip()):
        spooling.restart()
    place.write_text(name)
    spooling.restart()
    assert len(spooling.one.due()) == 1, "it is found to be lost when it is to leave"


@pytest.mark.parametrize("file", ["staging/7", "packs/0f-1"])
def test_data_in_another_spool_than_before_are_not_removed(spooling: Spooling, file: str) -> None:
    """They may be in the custody of another router, whose disk was mounted here by mistake."""
    inside, away = spooling.home / ".stageout", spooling.home / "away"
    inside.rename(away)
    foreign = inside / file
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"x")
    with pytest.raises(
        StoreError, match=r"perhaps another router's: mount the right one.*empty .*" + foreign.parent.name
    ):
        spooling.restart()
    assert foreign.exists()
    foreign.unlink()
    spooling.restart()


def test_an_empty_custodian_takes_whatever_spool_it_finds(spooling: Spooling) -> None:
    shutil.rmtree(spooling.home / ".stageout")
    spooling.restart()
    assert isinstance(spooling.take(1).message, Custody)
    spooling.restart()


def test_data_of_a_read_only_spool_are_removed_later_and_keep_their_room(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooling.take(1)
    with monkeypatch.context() as patched:
        patched.setattr(durable, "_faults", durable.parse_faults("overlay-discard=EROFS"))
        (told,) = spooling.one.settle(KEY, Result(Outcome.DONE))
        assert isinstance(told.message, messages.Result)
        assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (1, 4)
        spooling.one.expire(())
    spooling.one.expire(())
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (0, 0)


def test_data_that_are_removed_late_take_no_room_from_their_sender_that_has_begun_anew(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Open(ORIGIN, 1, "f1", 4, 4, EXPIRES, TERMINAL)
    spooling.one.open(ask, PEER)
    with monkeypatch.context() as patched:
        patched.setattr(durable, "_faults", durable.parse_faults("overlay-discard=EROFS"))
        spooling.one.cancel(Cancel(ORIGIN, 1, data_only=True), PEER)
    assert lots.reserved_bytes(spooling.spool) == 4
    opened = spooling.one.open(ask, PEER).message
    assert isinstance(opened, Opened)
    assert lots.reserved_bytes(spooling.spool) == 8
    spooling.one.expire(())
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (1, 4)
    spooling.one.staged(opened.tid, [(0, b"d" * 16)])
    spooling.one.expire(())
    (taken,) = spooling.one.operate(publish(1), PEER, "blake2b-128")
    assert isinstance(taken.message, Custody)


def test_a_custodian_starts_on_a_read_only_spool_in_which_something_is_left(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooling.take(1)
    spooling.tree.staging(99).write_bytes(b"left")
    pack_left = spooling.home / ".stageout/packs/left"
    pack_left.write_bytes(b"left")
    with monkeypatch.context() as patched:
        patched.setattr(durable, "_faults", durable.parse_faults("overlay-discard=EROFS custody-pack-free=EROFS"))
        spooling.restart()
    assert [held.key for held in spooling.one.due()] == [KEY]
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (2, 8)
    spooling.one.expire(())
    assert (spooling.files(), lots.reserved_bytes(spooling.spool)) == (1, 4)
    spooling.restart()
    assert not pack_left.exists()
