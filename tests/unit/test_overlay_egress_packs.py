"""Packs for names that plugins deliver: unpacked into the spool, and answered when all of a pack has its end."""

from __future__ import annotations

import errno
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from overlay_router.ends import Ends
from overlay_router.local import hidden
from overlay_router.rules import lots
from overlay_router.rules.lots import Spool
from overlay_router.rules.states import Outcome, Result
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Packed
from tests.unit.test_overlay_custodian import _Death, _faulty
from tests.unit.test_overlay_destination import Router, home
from tests.unit.test_overlay_egress import ORIGIN, PEER, Gate, gate
from tests.unit.test_overlay_packs import arrived

__all__ = ["gate", "home"]
_DONE = Result(Outcome.DONE)
_FILES = {"out/a": b"first", "out/b": b"", "out/c": b"third"}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("label", ["overlay-grant", "egress-unpack", "custody-take", "custody-settle"])
def test_a_pack_is_unpacked_and_answered_when_all_of_it_is_delivered(home: Path, label: str, after: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        gate = Gate(Path(place))
        told: list[messages.Message] = []
        with _faulty(label, _Death(), after) as passed:
            for _ in range(3):
                try:
                    told += gate.pack(1, _FILES)
                    for held in gate.one.held():
                        assert Path(gate.one.file(held)).read_bytes() == _FILES[held.operation.path]
                        told += [one.message for one in gate.one.settle(held.key, Result(Outcome.DONE))]
                    break
                except _Death:
                    gate.restart()
        assert label in passed
        assert told == [Packed(ORIGIN, 1, (0, 0, 0))]
        assert gate.pack(1, _FILES) == told, "asked again"
        assert not list(gate.tree.staged_numbers()) and not gate.one.held()
        gate.close()


def test_a_pack_for_a_plugin_that_fails_in_part_says_of_each_file_why(gate: Gate) -> None:
    assert gate.pack(1, _FILES) == []
    assert sorted(gate.ready()) == sorted(_FILES)
    gate.one.settle((ORIGIN, 1), Result(Outcome.DONE))
    gate.one.settle((ORIGIN, 3), Result(Outcome.FAILED, "no room", code=ErrorClass.QUOTA_EXCEEDED.code))
    assert gate.one.gathers(ORIGIN, 2)
    [damaged] = gate.one.damaged((ORIGIN, 2), [0])
    assert damaged.message == messages.Result(ORIGIN, 1, "unknown")
    assert gate.pack(1, _FILES) == []
    [told] = gate.one.settle((ORIGIN, 2), Result(Outcome.DONE))
    assert told.message == Packed(
        ORIGIN, 1, (0, 0, 0), (2,), ("failed",), ("no room",), (ErrorClass.QUOTA_EXCEEDED.code,)
    )  # fmt: skip
    (bad,) = gate.pack(11, {"out": b"the directory itself"})
    assert isinstance(bad, Packed)
    assert bad.failed == (0,)
    gate.one._spool.size_bytes = 10
    assert isinstance(gate.pack(21, {"out/large": bytes(100)})[0], messages.NoSpace)


@pytest.mark.parametrize("when", ["never", "first", "last"])
@pytest.mark.parametrize("label", ["overlay-pack-settle", "egress-note"])
def test_a_pack_for_plugins_and_for_the_tree_is_answered_as_one(home: Path, label: str, when: str) -> None:
    """A sender that frees its files in custody cannot hear that a pack is to be divided; and signed packs cannot be."""
    files = {"in/a": b"first", "out/b": b"second", "in/c": b"", "in/d": b"4", "out/e": b"5"}
    gate, tree = Gate(home), Router(home / "tree")
    told: list[messages.Message] = []
    with _faulty(label, _Death(), when == "last") if when != "never" else nullcontext([label]) as passed:
        for _ in range(3):
            ends = Ends(tree.place, egress=gate.one)
            try:
                mixed = arrived(1, files)._replace(peer=PEER)
                assert not ends.reason_against(mixed.pack)
                told += [reply.message for reply in ends.pack([mixed])]
                break
            except _Death:
                gate.restart()
                tree.restart()
    assert label in passed
    assert told == []
    assert tree.content() == {"in": "/", "in/a": "first", "in/c": "", "in/d": "4"}
    assert sorted(gate.ready()) == ["out/b", "out/e"]
    (waits,) = ends.decide(messages.Status(ORIGIN, 1, 5), PEER, "")
    assert waits.message == messages.Result(ORIGIN, 1, "pending")
    told += [reply.message for seq in (5, 2) for reply in gate.one.settle((ORIGIN, seq), Result(Outcome.DONE))]
    assert told == [Packed(ORIGIN, 1, (1, 0, 1, 1, 0))]
    gate.restart()
    ends = Ends(tree.place, egress=gate.one)
    assert [reply.message for reply in ends.pack([mixed])] == told, "said again"
    assert [reply.message for reply in ends.decide(messages.Status(ORIGIN, 1, 5), PEER, "")] == told
    gate.close()
    tree.close()


def test_a_pack_without_room_for_its_part_in_the_tree_is_said_again(
    gate: Gate, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*place: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tree = Router(home / "tree")
    ends, mixed = Ends(tree.place, egress=gate.one), arrived(1, {"in/a": b"1", "out/b": b"2"})._replace(peer=PEER)
    with monkeypatch.context() as patch:
        patch.setattr(tree.tree, "entry", full)
        patch.setattr(hidden.Hidden, "write", full)
        (reply,) = ends.pack([mixed])
    assert isinstance(reply.message, messages.NoSpace)
    gate.one.settle((ORIGIN, 2), Result(Outcome.DONE))
    (reply,) = ends.pack([mixed])
    assert reply.message == Packed(ORIGIN, 1, (1, 0))
    tree.close()


def test_a_damaged_file_costs_no_other_of_its_pack(gate: Gate) -> None:
    """One that a custodian has the only copies of would be lost as a whole."""
    ends = Ends(egress=gate.one)
    for first in (1, 11):
        files = {f"out/{first}{name}": name.encode() for name in ("a", "b", "out", "c")}
        damaged = arrived(first, files, wrong=f"out/{first}b")._replace(peer=PEER)
        assert ends.pack([damaged]) == []
        assert gate.ready() == [f"out/{first}{name}" for name in ("a", "out", "c")]
        if first == 11:  # after the death of the router it is the same
            gate.restart()
            ends = Ends(egress=gate.one)
            assert ends.pack([arrived(first, files)._replace(peer=PEER)]) == [], "it has failed already"
        told = [reply.message for seq in (0, 2, 3) for reply in gate.one.settle((ORIGIN, first + seq), _DONE)]
        assert told == [Packed(ORIGIN, first, (0, 0, 0, 0), (1,), ("failed",), ("digest",))]


def test_packs_that_share_files_are_refused_and_nothing_is_left_of_any(gate: Gate) -> None:
    """Of two that overlap, one stayed for ever, and who had sent it was never answered."""
    assert gate.pack(1, _FILES) == []
    for seq, files in ((3, {"out/c": b"third", "out/d": b""}), (1, {"out/a": b"first"})):
        (refused,) = gate.pack(seq, files)
        assert isinstance(refused, Packed) and refused.reasons[0] == "files 1 to 3 are under way in another pack"
    assert gate.pack(1, _FILES) == [], "the same one again"
    assert gate.pack(4, {"out/d": b""}) == []
    told = [reply.message for seq in (4, 3, 2, 1) for reply in gate.one.settle((ORIGIN, seq), Result(Outcome.DONE))]
    assert [(one.seq, one.failed) for one in told if isinstance(one, Packed)] == [(4, ()), (1, ())]
    assert gate.one._gathered == {}


def test_a_pack_that_was_damaged_and_never_comes_again_is_forgotten(gate: Gate) -> None:
    gate.pack(1, {"out/a": b"first", "out/b": b""})
    gate.one.damaged((ORIGIN, 1), [0])
    gate.one.expire(())
    assert gate.one.gathers(ORIGIN, 2), "the other file is under way"
    gate.one.settle((ORIGIN, 2), Result(Outcome.DONE))
    gate.one.expire(())
    assert gate.one._gathered == {}


def test_files_of_a_pack_that_come_cancelled_are_not_delivered(gate: Gate) -> None:
    for _ in range(2):
        assert gate.pack(1, _FILES, cancelled=(1,)) == []
    due, replies = gate.one.ready(())
    assert (len(due), replies) == (len(_FILES) - 1, [])
    (told,) = [reply.message for held in due for reply in gate.one.settle(held.key, Result(Outcome.DONE))]
    assert isinstance(told, Packed)
    assert (told.failed, told.outcomes) == ((0,), ("cancelled",))


def test_all_lots_are_looked_through_once_for_a_pack(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Spool] = []

    def reserved_bytes(spool: Spool) -> int:
        looked.append(spool)
        return sum(lot.size_bytes for lot in spool.lots.values())

    monkeypatch.setattr(lots, "reserved_bytes", reserved_bytes)
    assert gate.pack(1, _FILES) == []
    assert len(looked) == 1
    assert reserved_bytes(gate.one._spool) == sum(map(len, _FILES.values()))
