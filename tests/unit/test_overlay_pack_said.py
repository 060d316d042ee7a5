"""To which records a pack may have been said is known after a restart, too; what may have arrived is asked about."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router.custodians.pack_carrier import Answer, Way
from overlay_router.custodians.pack_records import as_pack
from overlay_router.custodians.said import ASKS_S
from overlay_router.waiting import Packs
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import pack_looking
from stageout.overlay.channel import Gateway
from stageout.overlay.pack_looking import Seen
from stageout.overlay.wire.messages import Answer as Entry
from stageout.overlay.wire.messages import FoundPack, GetPack, Packed, Result, Stat
from tests.unit.test_overlay_custodian import TERMINAL, Spooling
from tests.unit.test_overlay_destination import EXPIRES, ORIGIN
from tests.unit.test_overlay_pack_custody import DONE, Delivering, order, pack, spooling
from tests.unit.test_overlay_packs import digest

__all__ = ["spooling"]


class _Meeting(Delivering):
    """As the process would: nothing is said to records that are not known."""

    def met(self, store: str) -> dict[int, str]:
        """The packs that are sent to a terminal with these records: which records each pack may have been said to
        before."""
        self.step()
        orders = self._orders(store)
        return {order["seq"]: order["said_to"] for order in orders}

    def step(self, *answers: Answer) -> list[tuple[int, bool]]:
        async def run() -> None:
            self.one._answers += answers
            await self.one._settle()
            await self.one._begin()

        asyncio.run(run())
        return []

    def _orders(self, store: str) -> list[dict[str, Any]]:
        given = []
        while self.process.orders:
            orders, self.process.orders = self.process.orders, []
            unmet = [order for order in orders if order.store != store]
            given += [
                {"seq": self._seq(order.number), "said_to": order.said_to} for order in orders if order not in unmet
            ]
            if unmet:
                self.step(*(Answer(order.number, store=store) for order in unmet))
        return given

    def _seq(self, number: int) -> int:
        return self.one._keys[number][1]


def _lost(delivering: Delivering, *seqs: int) -> list[Answer]:
    code = ErrorClass.CONNECTION_LOST.code
    return [Answer(delivering.number(seq), failure="lost", code=code) for seq in seqs]


def test_a_pack_may_have_been_said_to_the_records_of_before(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(1)])
    delivering = _Meeting(spooling)
    assert delivering.met("old") == {1: ""}
    assert spooling.store.hops() == {TERMINAL: "old"}
    spooling.one.packs.take([pack(11)])
    assert delivering.met("new") == {11: ""}, "it was said to nobody"
    assert [(one.seq, one.store) for one in spooling.store.said_packs()] == [(1, "old")]
    delivering.step(*_lost(delivering, 1))
    spooling.clock.now_s += 5.0
    assert delivering.met("new") == {1: "old"}
    for store in ("new", "newest", "newest"):
        spooling.restart()
        assert _Meeting(spooling).met(store) == {1: "old", 11: "new"}
    for held in spooling.one.packs.held():
        spooling.one.packs.settle([(held, [DONE[0]] * 3)])
    assert spooling.store.said_packs() == []


def test_no_record_is_made_for_each_pack(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    delivering, met = _Meeting(spooling), list[str]()
    record = spooling.store.meet
    monkeypatch.setattr(spooling.store, "meet", lambda *facts: (met.append(facts[1]), record(*facts)))
    for seq in (1, 11, 21):
        spooling.one.packs.take([pack(seq)])
        delivering.met("old")
    assert met == ["old"]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_pack_that_comes_again_may_have_arrived_before(spooling: Spooling, restarts: bool) -> None:
    packs = spooling.one.packs
    packs.take([pack()])
    delivering = _Meeting(spooling)
    delivering.met("old")
    delivering.step(*_lost(delivering, 1))
    spooling.clock.now_s += 5.0
    delivering.step()
    delivering.step(Answer(delivering.number(1), damaged=[0]))
    assert [one.message for one in delivering.told] == [Result(ORIGIN, 1, "unknown")]
    if restarts:
        spooling.restart()
    spooling.one.packs.take([pack()])
    (held,) = spooling.one.packs.held()
    assert _Meeting(spooling).met("new") == {1: "old"}
    spooling.clock.now_s = EXPIRES + 1.0
    assert spooling.one.packs.is_asked_about(held)


def test_what_was_withdrawn_and_never_came_again_is_forgotten(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    spooling.restart()
    (held,) = spooling.one.packs.held()
    spooling.one.packs.damaged(held)
    assert len(spooling.store.said_packs()) == 1
    spooling.clock.now_s = EXPIRES + 1.0
    spooling.one.expire(())
    assert spooling.store.said_packs() == []


@pytest.mark.parametrize(
    ("end", "outcomes"), [("done", []), ("unknown", ["lost"] * 3), ("waits", None), ("silent", ["lost"] * 3)]
)
def test_a_damaged_pack_whose_sender_has_freed_it_is_asked_about(
    spooling: Spooling, end: str, outcomes: list[str] | None
) -> None:
    spooling.one.packs.take([pack(release="custody")])
    delivering = Delivering(spooling)
    delivering.step()
    delivering.step(*_lost(delivering, 1))
    spooling.clock.now_s += 5.0
    assert delivering.step() == [(1, False)]
    assert delivering.step(Answer(delivering.number(1), damaged=[0, 1, 2])) == [(1, True)]
    assert delivering.told == [], "it may have arrived"
    number = delivering.number(1)
    if end == "silent":
        spooling.clock.now_s += ASKS_S + 1.0
        delivering.told += spooling.one.expire(delivering.one.busy)
    else:
        said = {
            "done": Answer(number, [("done", "", 1, 0)] * 3),
            "unknown": Answer(number, failure="does not have it", is_unknown=True),
            "waits": Answer(number, waits=True),
        }
        delivering.step(said[end])
    found = [one.message for one in delivering.told]
    assert [list(one.outcomes) for one in found if isinstance(one, Packed)] == ([] if outcomes is None else [outcomes])
    if end == "silent":
        assert isinstance(found[0], Packed)
        assert "not known" in found[0].reasons[0]


def test_a_damaged_pack_that_was_never_sent_is_lost_at_once(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(release="custody")])
    delivering = _Meeting(spooling)
    delivering.met("old")
    delivering.step(Answer(delivering.number(1), damaged=[0, 1, 2]))
    assert [type(one.message) for one in delivering.told] == [Packed]


class _Terminal:
    """Has these files: size, content, time of their last change."""

    def __init__(self, files: dict[str, tuple[bytes, int]], packs: bool = True, refuses: bool = False) -> None:
        self.files, self.packs, self._refuses, self._asked = files, packs, refuses, list[Any]()

    def __call__(self, *place: object) -> _Terminal:
        return self

    def __enter__(self) -> _Terminal:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def send(self, message: Any) -> None:
        self._asked.append(message)

    def receive(self) -> Entry:
        ask = self._asked.pop(0)
        assert isinstance(ask, Stat)
        if ask.path not in self.files:
            return Entry(code=ErrorClass.NOT_FOUND.code)
        data, modified = self.files[ask.path]
        return Entry((ask.path,), ("file",), (len(data),), (0o644,), (modified,), generation=7)

    def receive_pack(self, asked: int) -> tuple[FoundPack, list[bytes]]:
        ask = self._asked.pop(0)
        assert isinstance(ask, GetPack)
        if self._refuses:
            raise TransferFailure(ErrorClass.NOT_SUPPORTED, "a plugin fetches some")
        data = [self.files[path][0] for path in ask.paths]
        return FoundPack(tuple(map(len, data)), (0o644,) * asked, (0,) * asked), data


@pytest.mark.parametrize(("packs", "refuses"), [(True, False), (True, True), (False, False)])
def test_what_is_there_is_told_from_what_is_newer(monkeypatch: pytest.MonkeyPatch, packs: bool, refuses: bool) -> None:
    names = ("same", "other", "newer", "longer", "gone", "empty")
    data = [b"1234", b"1234", b"1234", b"1234", b"1234", b""]
    there = {
        "same": (b"1234", 500), "other": (b"4321", 50), "newer": (b"4321", 101), "longer": (b"12345", 101),
        "empty": (b"", 1),
    }  # fmt: skip
    terminal = _Terminal(there, packs, refuses)
    monkeypatch.setattr(pack_looking, "Channel", terminal)
    monkeypatch.setattr(
        pack_looking, "generation_of", lambda gateway, routes, path, *facts: 7 if path in ("same", "empty") else None
    )
    one = pack(1, paths=names, sizes_bytes=tuple(map(len, data)), modes=(0o644,) * len(names)).pack
    files = pack_looking.Files(one, "blake2b-128", [digest(content) for content in data], 100)
    seen = pack_looking.look(Gateway("t", 1, "k", b""), files, range(len(names)))
    assert (seen.same, seen.newer) == ({0: 7, 5: 7}, {2, 3})


def test_no_question_is_for_more_than_it_may_be() -> None:
    one = pack(1, paths=("x" * 1000,) * 30 + ("y",) * 600).pack
    questions = list(pack_looking._questions(one, range(630)))
    assert [len(some) for some in questions] == [11, 11, 256, 256, 96]
    assert [place for some in questions for place in some] == list(range(630))


def test_a_pack_that_waits_for_the_disk_is_known() -> None:
    async def run() -> None:
        waiting = Packs()
        await waiting.put(cast(Any, SimpleNamespace()), pack(11))
        assert waiting.has(ORIGIN, 11)
        assert not waiting.has(ORIGIN, 1)

    asyncio.run(run())


def test_what_expires_is_not_called_expired_while_nobody_could_look(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its terminal has lost its records, and there is no descriptor to read what it should have."""
    spooling.one.packs.take([pack(release="custody")])
    one, answers = replace(order(spooling), asks=True, said_to="old", store="new"), list[Answer]()

    def short_of(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "too many open files")

    way = Way(Gateway("localhost", 1, "k", b""), answers.append)
    monkeypatch.setattr(Way, "_connected", lambda self: SimpleNamespace(store="new"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", short_of)
        way._inquire(one, as_pack(one.pack))
    monkeypatch.setattr(Way, "_look", lambda self, order, load: Seen({1: 7}, set()))
    way._inquire(one, as_pack(one.pack))
    now, later = answers
    assert (now.results, now.code, "too many open files" in now.failure) == ([], ErrorClass.UNKNOWN.code, True)
    assert [result[0] for result in later.results] == ["expired", "done", "expired"]
