"""Files that are given to a custodian again, in other packs or by themselves: each is in custody once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlay_router.custodians import pack_custody
from overlay_router.local.replies import Reply
from overlay_router.rules.states import Outcome, Result
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Custody, Open, Opened, Packed
from tests.unit.test_overlay_custodian import TERMINAL, Spooling
from tests.unit.test_overlay_destination import EXPIRES, ORIGIN, PEER
from tests.unit.test_overlay_pack_custody import DONE, FILES, pack
from tests.unit.test_overlay_pack_custody import spooling as spooling


def test_a_number_is_in_one_pack_only(spooling: Spooling) -> None:
    """A sender that gives files again may put them into other packs: they are in custody already, or go by
    themselves."""
    packs = spooling.one.packs
    packs.take([pack(10)])
    part = pack(10)
    part = part._replace(pack=_without_first(part.pack), files=part.files[1:])
    assert part.pack.paths == tuple(f"10/{name}" for name in list(FILES)[1:])
    part = part._replace(pack=replace(part.pack, seq=11))
    assert packs.take([part]) == [Reply(PEER, Custody(ORIGIN, 11, "me:1"))], "the same files under the same numbers"
    for seq in (8, 11, 12):
        (reply,) = packs.take([pack(seq)])
        assert isinstance(reply.message, Packed)
        assert reply.message.reasons[0].startswith("unpacked: "), seq
    assert len(packs.held()) == 1
    (reply,) = packs.take([pack(10)._replace(peer="other/1")])
    assert isinstance(reply.message, Packed)
    assert reply.message.reasons[0] == "it was deposited with another key"
    both = packs.take([pack(20), pack(22)])
    assert {type(reply.message) for reply in both} == {Packed, Custody}
    # no status of a whole pack is answered for a part of it
    assert packs.custody(ORIGIN, 11, 2)
    assert packs.custody(ORIGIN, 11, 3) is None
    ask = Open(ORIGIN, 11, "10/b/c", len(FILES["b/c"]), 1 << 20, EXPIRES, TERMINAL)
    assert spooling.one.open(ask, PEER).message == Custody(ORIGIN, 11, "me:1")
    assert isinstance(spooling.one.open(replace(ask, path="else"), PEER).message, Opened)
    packs.settle([(held, DONE) for held in packs.held() if held.seq == 10])
    (reply,) = packs.take([pack(12)])
    assert isinstance(reply.message, Packed)
    assert reply.message.reasons[0].startswith("unpacked: "), "one of them has its end"


def test_a_number_that_is_in_custody_by_itself_is_in_no_pack(spooling: Spooling) -> None:
    """Else the next custodian, where it may have its end before the pack comes, would refuse the whole pack."""
    taken = spooling.take(11)
    assert isinstance(taken.message, Custody)
    (reply,) = spooling.one.packs.take([pack(10)])
    assert isinstance(reply.message, Packed)
    assert reply.message.reasons[0].startswith("unpacked: ")
    (reply,) = spooling.one.packs.take([pack(12)])
    assert isinstance(reply.message, Custody)


def _without_first(pack: messages.Pack) -> messages.Pack:
    return replace(pack, paths=pack.paths[1:], sizes_bytes=pack.sizes_bytes[1:], modes=pack.modes[1:])


def test_the_terminal_may_forget_what_has_arrived_without_a_gap(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_custody, "_FORGOTTEN_TOGETHER", 2)
    spooling.spool.size_bytes = 10**6
    spooling.one.packs.take([pack(seq) for seq in (1, 4, 7, 10, 13)])
    first, second, third, fourth, last = spooling.one.packs.held()

    def low() -> object:
        facts = spooling.one.packs.order(last)
        assert facts is not None
        return facts["low"]

    spooling.one.packs.settle([(second, DONE)])
    assert low() == 0
    spooling.one.packs.settle([(first, DONE)])
    assert low() == 6
    spooling.one.packs.settle([(third, [*DONE[:2], Result(Outcome.FAILED, "no")]), (fourth, DONE)])
    assert low() == 6, "something may depend on what has failed"
