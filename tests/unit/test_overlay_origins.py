"""Owners of origins: under which digits a router knows an operation, and hands it on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from overlay_router.custodians.spool import Begun, CustodyStore
from overlay_router.peers.keys import Key
from overlay_router.peers.origins import as_handed_on, as_known, as_said, is_signed, same_owner
from stageout.core.signing import SigningKey, new_key
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.fields import is_origin
from stageout.overlay.wire.messages import Open, Result, Staged

ORIGIN = "0a" * 16
ALICE, BOB, ROUTER = Key("alice", b"s", ""), Key("bob", b"s", ""), Key("hop", b"s", "-", True)
ISSUER = new_key()
OPEN = Open(ORIGIN, 1, "f", 10, 4, 1500)
_WITHOUT_SAID = """CREATE TABLE earlier AS SELECT origin, seq, terminal, path, expires FROM begun;
DROP TABLE begun; ALTER TABLE earlier RENAME TO begun;"""


def test_keys_have_origins_of_their_own_and_routers_share_theirs() -> None:
    alices, bobs = (as_known(OPEN, key).origin for key in (ALICE, BOB))
    assert len({alices, bobs, ORIGIN}) == 3
    assert len(alices) == len(ORIGIN)
    assert as_known(as_known(OPEN, ALICE), ROUTER).origin == alices, "two custodians hand on the same"
    renewed = Key("alice", b"another secret", "elsewhere")
    assert as_known(OPEN, renewed).origin == alices


def test_a_peer_hears_its_own_digits() -> None:
    known = as_known(OPEN, ALICE).origin
    assert as_said(Result(known, 1, "done"), f"alice/{ORIGIN}") == Result(ORIGIN, 1, "done")
    assert as_said(Result(known, 1, "done"), f"hop/{known}") == Result(known, 1, "done")
    assert as_said(Staged(7, ()), f"alice/{ORIGIN}") == Staged(7, ())


def _signed(holder: SigningKey, number: int = 1) -> Open:
    text = issue(ISSUER, holder.public, "vo", ("write",), 2000, terminals=("t:1",))
    return Credential(text, holder).signed(Open(ORIGIN, number, "vo/f", 10, 4, 1500))


def test_signed_digits_are_the_holders_and_handed_on_as_they_were_signed() -> None:
    known, sender = as_known(OPEN, ALICE), f"alice/{ORIGIN}"
    assert as_handed_on(known, sender) == known
    mine, other = new_key(), new_key()
    by_alice, by_bob, by_router = (as_known(_signed(mine), key) for key in (ALICE, BOB, ROUTER))
    assert by_alice.origin == by_bob.origin == by_router.origin, "whichever key brings it"
    assert as_known(_signed(other), ALICE).origin != by_alice.origin
    assert is_signed(by_alice.origin) and not is_signed(known.origin)
    assert not is_origin(by_alice.origin), "no peer can name it"
    assert as_handed_on(by_alice, sender).origin == ORIGIN
    assert same_owner(by_alice.origin, sender, f"bob/{ORIGIN}")
    assert same_owner(known.origin, sender, sender) and not same_owner(known.origin, sender, f"bob/{ORIGIN}")


def test_what_may_lie_at_a_terminal_is_remembered_as_the_terminal_knows_it(tmp_path: Path) -> None:
    """Also in a database that has no place for that yet."""
    path, early = tmp_path / "custody.sqlite", Begun(("0b" * 16, 1), "t:1", "early", 2000, "0b" * 16)
    with closing(CustodyStore(path)) as store:
        store.begin(early)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(_WITHOUT_SAID)
    later = Begun(("0c" * 16, 1), "t:1", "later", 2000, ORIGIN)
    with closing(CustodyStore(path)) as store:
        assert store.begun() == [early]
        store.begin(later)
    with closing(CustodyStore(path)) as store:
        assert store.begun() == [early, later]
