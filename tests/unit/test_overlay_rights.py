"""The rights of a peer at a router: by its key, by a capability, by a warrant; and how much of it at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from overlay_router.copying import warrants
from overlay_router.local.store import Transfer
from overlay_router.peers.keys import BadKeys, Key
from overlay_router.peers.origins import as_known, known_as
from overlay_router.peers.rights import Rights, outside_of, read_issuers, too_late
from stageout.core.signing import new_key
from stageout.overlay.wire import capability, warrant
from stageout.overlay.wire.capability import BadCapability, Credential
from stageout.overlay.wire.messages import Get, GetPack, List, Open, Operation, Pack, Stat
from stageout.overlay.wire.warrant import Warrant

ORIGIN, NOW, STORE, NONCE = "0a" * 16, 1000, "e" * 32, "0b" * 16
ISSUER, HOLDER = new_key(), new_key()
OPEN = Open(ORIGIN, 1, "vo/f", 10, 4, 1500)
PUBLISH = Operation(ORIGIN, 1, "publish", "vo/f", 1500, size_bytes=10, mode=0o644, blocks=3, manifest="0" * 64)
NONE, ALL = Key("hop", b"s" * 16, "-", True), Key("all", b"s" * 16, "")
ONLY = Key("only", b"k" * 16, "vo")


def rights(**more: object) -> Rights:
    return Rights({ISSUER.public: "vo"}, address="t:1", **more)  # type: ignore[arg-type]


def credential(prefix: str = "vo", given: tuple[str, ...] = ("write",), expires: int = 2000, **more: int) -> Credential:
    text = capability.issue(ISSUER, HOLDER.public, prefix, given, expires, terminals=("t:1",), **more)
    return Credential(text, HOLDER)


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "allowed"),
    [
        (OPEN, True), (replace(OPEN, path="other"), False), (replace(OPEN, path="vox"), False),
        (Stat("vo/f"), True), (Stat("other"), False), (List(""), False), (Get("vo"), True), (Get("other/f"), False),
        (GetPack(("vo/a", "other")), False), (GetPack(("vo/a", "vo/b")), True), (GetPack(("vo/a", "")), False),
        (Operation(ORIGIN, 1, "rename", "vo/a", 1500, target="other/b"), False),
        (Operation(ORIGIN, 1, "rename", "other/a", 1500, target="vo/b"), False),
        (Operation(ORIGIN, 1, "rename", "vo/a", 1500, target="vo/b"), True),
        (Pack(ORIGIN, 1, 1500, ("vo/a", "other"), (1, 1), (0, 0), ""), False),
        (Pack(ORIGIN, 1, 1500, ("vo/a", "vo/b"), (1, 1), (0, 0), ""), True),
    ],
)  # fmt: skip
def test_a_key_is_for_what_is_below_its_prefix(message: Open, allowed: bool) -> None:
    words = rights().refusal(ONLY, message, NOW)
    assert ("the key 'only' is not for" in words) is not allowed
    assert allowed or "only for what is below 'vo'" in words
    assert rights().refusal(ALL, message, NOW) == ""
    assert "is not for" in rights().refusal(NONE, message, NOW)


def test_a_key_for_all_names_all() -> None:
    assert outside_of(ALL, replace(OPEN, path="anything")) == ""


def test_who_insists_on_capabilities_takes_none_by_keys_alone() -> None:
    for message in (OPEN, PUBLISH, Pack(ORIGIN, 1, 1500, ("vo/a",), (1,), (0,), "")):
        assert "takes nothing without a capability" in rights(insists=True).refusal(ALL, message, NOW)
    assert rights(insists=True).refusal(ALL, Stat("f"), NOW) == "", "a look changes nothing"


# ---- capabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("insists", [True, False])
def test_a_capability_counts_and_the_key_does_not(insists: bool) -> None:
    for message in (OPEN, PUBLISH, Pack(ORIGIN, 1, 1500, ("vo/a",), (1,), (0,), "")):
        assert rights(insists=insists).refusal(NONE, credential().signed(message), NOW) == ""
        other = credential("vo/other").signed(message)
        assert "the capability is for 'vo/other'" in rights(insists=insists).refusal(ALL, other, NOW)


@pytest.mark.parametrize(
    ("given", "message", "words"),
    [
        (credential(expires=NOW - 1), PUBLISH, "expired 1 s ago"),
        (credential(expires=NOW), replace(PUBLISH, expires=NOW), ""),
        (credential(expires=PUBLISH.expires), PUBLISH, ""),
        (credential(expires=PUBLISH.expires - 1), PUBLISH, "it expires after its capability"),
        (credential("other"), replace(PUBLISH, path="other/f"), "does not take capabilities of"),
        (credential(""), PUBLISH, "for the whole root"),
        (credential("vo/f"), PUBLISH, ""),
        (credential("vo/f"), replace(PUBLISH, path="vo/ff"), "is for 'vo/f'"),
        (credential(given=("read", "delete")), PUBLISH, "lacks the right to write"),
        (credential(given=("write",)), replace(PUBLISH, kind="delete"), "lacks the right to delete"),
        (credential(given=("write",)), replace(PUBLISH, kind="rename", target="vo/g"), "lacks the right to delete"),
        (
            credential("vo/a", given=("write", "delete")),
            replace(PUBLISH, kind="rename", path="vo/a/f", target="vo/g"),
            "not for 'vo/g'",
        ),
        (credential(max_priority=3), replace(PUBLISH, priority=4), "no higher priority than 3"),
        (credential(max_priority=3), replace(PUBLISH, priority=3), ""),
        (credential(lot_bytes=9), PUBLISH, "for 9 bytes at once, 10 are asked for"),
        (credential(lot_bytes=10), PUBLISH, ""),
        (credential(lot_bytes=3), Pack(ORIGIN, 1, 1500, ("vo/a", "vo/b"), (2, 2), (0, 0), ""), "4 are asked for"),
    ],
)
def test_a_capability_allows_what_it_says_and_nothing_else(given: Credential, message: Operation, words: str) -> None:
    told = rights().refusal(ALL, given.signed(message), NOW)
    assert words in told if words else told == ""


def test_what_is_only_read_is_signed_for_one_connection() -> None:
    reader = credential(given=("read",))
    assert reader.may_read and not credential().may_read
    for message in (Stat("vo/f"), List("vo"), Get("vo/f"), GetPack(("vo/f", "vo/g"))):
        asked = reader.signed(message, NONCE)
        assert rights().refusal(NONE, asked, NOW, NONCE) == ""
        assert "not signed by the holder" in rights().refusal(NONE, asked, NOW, "0c" * 16)
        assert "lacks the right to read" in rights().refusal(ALL, credential().signed(message, NONCE), NOW, NONCE)
    for urgent in (Get("vo/f", priority=1), GetPack(("vo/f",), priority=1)):
        assert "no higher priority" in rights().refusal(ALL, reader.signed(urgent, NONCE), NOW, NONCE)
    both = reader.signed(GetPack(("vo/f", "other/g")), NONCE)
    assert "is for 'vo', not for 'other/g'" in rights().refusal(ALL, both, NOW, NONCE)
    other = replace(reader.signed(GetPack(("vo/f",)), NONCE), paths=("vo/g",))
    assert "not signed by the holder" in rights().refusal(ALL, other, NOW, NONCE)


def test_a_capability_that_somebody_else_has_made_or_changed_is_none() -> None:
    text = credential().text
    forged = capability.issue(HOLDER, HOLDER.public, "vo", ("write",), 2000)
    for bad, words in (
        (forged, "does not take capabilities of"),
        (text.partition(".")[0] + "." + forged.partition(".")[2], "the capability: "),
        ("x" + text[1:], "damaged"),
        ("", "takes nothing without"),
    ):
        asked = Credential(bad, HOLDER).signed(PUBLISH)
        assert words in rights(insists=True).refusal(ALL, asked, NOW)
    with pytest.raises(BadCapability, match="not signed by the holder"):
        capability.allow(replace(credential().signed(PUBLISH), mode=0o777), {ISSUER.public: ""}, "t:1", NOW)


def test_a_deposit_is_judged_by_its_capability_but_for_the_terminal() -> None:
    """By which address that is named there is not known here."""
    there = Rights({ISSUER.public: "vo"}, address="custodian:1")
    for message in (OPEN, PUBLISH, Pack(ORIGIN, 1, 1500, ("vo/a",), (1,), (0,), "")):
        assert there.deposit_refusal(NONE, credential().signed(message), NOW) == ""
        for bad, words in (
            (credential("other").signed(message), "does not take capabilities of"),
            (credential("vo/other").signed(message), "the capability is for 'vo/other'"),
            (credential(given=("read",)).signed(message), "lacks the right to write"),
            (credential(expires=NOW - 1).signed(message), "expired"),
            (replace(credential().signed(message), seq=7), "not signed by the holder"),
        ):
            assert words in there.deposit_refusal(ALL, bad, NOW)
        assert "STAGEOUT_ROUTER_ISSUERS" in Rights().deposit_refusal(ALL, credential().signed(message), NOW)
        assert there.deposit_refusal(ALL, message, NOW) == ""
        assert "is not for" in there.deposit_refusal(NONE, message, NOW)


# ---- warrants --------------------------------------------------------------------------------------------------------

WARRANT = Warrant("only", "hop", STORE, ORIGIN, 1, "vo/f", 10, 1500, 0o644)
KEYS = {key.name: key for key in (NONE, ONLY)}


def _shown(message: Open | Operation, made: Warrant = WARRANT, secret: bytes = ONLY.secret, **more: object) -> str:
    asked = replace(message, warrant=warrant.write(made, secret))
    return warrants.refusal(asked, NONE, KEYS, rights(**more), STORE, NOW)


def test_a_warrant_lets_one_router_write_one_file() -> None:
    assert _shown(OPEN) == _shown(PUBLISH) == ""


@pytest.mark.parametrize(
    ("message", "made", "words"),
    [
        (PUBLISH, replace(WARRANT, bearer="another"), "for the router 'another', not for 'hop'"),
        (PUBLISH, replace(WARRANT, store="f" * 32), "for another router"),
        (replace(PUBLISH, kind="delete"), WARRANT, "for one new file, and for nothing else"),
        (replace(PUBLISH, priority=1), WARRANT, "for one new file, and for nothing else"),
        (replace(PUBLISH, after=(1,)), WARRANT, "for one new file, and for nothing else"),
        (replace(PUBLISH, mode=0o777), WARRANT, "for another mode"),
        (replace(PUBLISH, absent=True), WARRANT, "for another absent"),
        (replace(PUBLISH, generation=1), WARRANT, "for another generation"),
        (replace(OPEN, path="vo/g"), WARRANT, "for another path"),
        (replace(OPEN, size_bytes=11), WARRANT, "for another size_bytes"),
        (replace(OPEN, seq=2), WARRANT, "for another seq"),
        (replace(OPEN, expires=1501), WARRANT, "for another expires"),
        (replace(OPEN, terminal="t:1"), WARRANT, "for another terminal"),
        (replace(OPEN, path="other"), replace(WARRANT, path="other"), "only for what is below 'vo'"),
        (OPEN, replace(WARRANT, key="unknown"), "not signed with a key 'unknown' that is known here"),
        (OPEN, replace(WARRANT, seq=-2), "damaged"),
        (OPEN, replace(WARRANT, mode=True), "damaged"),
        (OPEN, replace(WARRANT, path=7), "damaged"),
        (OPEN, replace(WARRANT, absent=1), "damaged"),
    ],
)
def test_a_warrant_is_for_nothing_else(message: Operation, made: Warrant, words: str) -> None:
    assert words in _shown(message, made)


def test_a_warrant_is_signed_by_who_may_write_that() -> None:
    assert "not signed with a key 'only'" in _shown(OPEN, secret=b"x" * 16)
    assert "takes nothing without a capability" in _shown(OPEN, insists=True)
    for prefix, words in (("vo", ""), ("vo/other", "the capability is for 'vo/other'")):
        holders = credential(prefix)
        asked = replace(OPEN, capability=holders.text, warrant=warrant.write(replace(WARRANT, key=""), HOLDER))
        told = warrants.refusal(asked, NONE, KEYS, rights(insists=True), STORE, NOW)
        assert words in told if words else told == ""


# ---- how much at once ------------------------------------------------------------------------------------------------


def test_so_many_transfers_of_a_key_are_under_way_at_once() -> None:
    found = rights(most_transfers=2)
    opens = [replace(OPEN, seq=seq) for seq in (1, 2, 3)]
    assert [found.reserve(ONLY, ask, NOW) for ask in opens[:2]] == ["", ""]
    assert found.reserve(ONLY, opens[1], NOW) == "", "the same once more"
    assert "has 2 transfers under way" in found.reserve(ONLY, opens[2], NOW)
    assert found.reserve(ALL, opens[2], NOW) == "", "that of another key"
    mine = known_as(ONLY, ORIGIN)
    found.release(mine, 1)
    found.release(mine, 1)
    assert found.reserve(ONLY, opens[0], NOW) == ""
    found.release_up_to("0c" * 16, 2)
    assert found.reserve(ONLY, replace(OPEN, seq=9), NOW) != ""
    found.release_up_to(mine, 1)
    assert found.reserve(ONLY, replace(OPEN, seq=9), NOW) == ""
    found.expire(OPEN.expires)
    assert found.reserve(ONLY, replace(OPEN, seq=10), NOW) != ""
    found.expire(OPEN.expires + 1)
    assert found.reserve(ONLY, replace(OPEN, seq=10), NOW) == ""


def test_what_was_under_way_before_a_start_counts_and_new_rules_forget_none_of_it() -> None:
    found = rights()
    found.remember([Transfer(1, "only/x", replace(OPEN, seq=seq)) for seq in (1, 2)])
    found.become(Rights({}, insists=True, most_transfers=2))
    assert (found.issuers, found.insists) == ({}, True)
    assert "has 2 transfers" in found.reserve(ONLY, replace(OPEN, seq=3), NOW)


def test_a_capability_bounds_the_bytes_that_are_under_way_at_once() -> None:
    found, given = rights(), credential(lot_bytes=20)
    asks = [given.signed(replace(OPEN, seq=seq)) for seq in (1, 2, 3)]
    assert [found.reserve(NONE, ask, NOW) for ask in asks[:2]] == ["", ""]
    assert "for 20 bytes at once" in found.reserve(NONE, asks[2], NOW)
    assert found.reserve(NONE, credential(lot_bytes=20).signed(replace(OPEN, seq=4)), NOW) == "", "of another one"
    found.release(as_known(asks[1], NONE).origin, 2)
    assert found.reserve(NONE, asks[2], NOW) == ""


def test_nothing_may_go_on_for_years() -> None:
    assert too_late(OPEN, NOW) == ""
    assert "let it expire earlier" in too_late(replace(OPEN, expires=NOW + 10**9), NOW)


@pytest.mark.parametrize("line", ["vo", "vo {key}", "vo {key} /vo more", "vo ed25519:short /vo", "vo rsa:{key} /vo"])
def test_a_list_of_issuers_that_cannot_be_read_is_said(tmp_path: Path, line: str) -> None:
    file = tmp_path / "issuers"
    file.write_text("# who\n\n" + line.format(key=ISSUER.public) + "\n")
    with pytest.raises(BadKeys, match="line 3: write 'NAME ed25519:KEY PREFIX'"):
        read_issuers(file)
    file.write_text(f"# who\nvo {ISSUER.public} /vo/  # ours\nall {HOLDER.public} /\n")
    assert read_issuers(file) == {ISSUER.public: "vo", HOLDER.public: ""}
    with pytest.raises(BadKeys, match="cannot read the issuers"):
        read_issuers(tmp_path / "none")
