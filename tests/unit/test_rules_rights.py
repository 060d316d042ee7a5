"""Rights: chains of signatures, scopes by segments, entries of custodians, owners."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stageout.overlay.rules import rights
from stageout.overlay.rules.operations import Fields, Identity, Kind, Row
from stageout.overlay.rules.rights import Action, Asker, BadToken, Entry, Grant, NoRight, Right, Token

NOW = 1_000_000
ALL = frozenset(Right)
USER, HOLDER = "user-key", "holder-key"
OWN = Token(USER, USER, frozenset({"T"}), (Grant(ALL, ("alice",)),), NOW, NOW, NOW + 900, is_own=True)
DELEGATED = replace(OWN, subject="job 7", holder=HOLDER, latest_expires=NOW + 86400, largest=100)
FILE = Fields("o1", 1, Kind.FILE, "/alice/f", "T", NOW, NOW + 3600, size=10)
RENAME = replace(FILE, kind=Kind.RENAME, size=None)


def chain(fields: Fields = FILE, token: Token = DELEGATED, signer: str = HOLDER, **more: Any) -> None:
    rights.check_chain(fields, token, signer, "T", more.pop("prefixes", {USER: "/alice"}), more.pop("now", NOW), **more)


def test_a_chain_that_holds() -> None:
    chain()
    chain(token=OWN, signer=USER)
    chain(now=NOW + 86400 * 3, received=NOW + 5, carrier="gw", listed=frozenset({"gw"}))


@pytest.mark.parametrize(
    "changed",
    [
        {"signer": USER}, {"signer": "other"}, {"token": OWN, "signer": HOLDER}, {"prefixes": {}},
        {"prefixes": {USER: "/alice/g"}}, {"prefixes": {USER: "/bob"}},
        {"token": replace(DELEGATED, is_own=False, holder=""), "signer": USER},
        {"token": replace(DELEGATED, audiences=frozenset({"B"}))},
        {"token": replace(DELEGATED, grants=(Grant(ALL, ("al",)),))},
        {"token": replace(DELEGATED, grants=(Grant(frozenset({Right.READ, Right.CREATE}), ("alice",)),))},
        {"fields": replace(FILE, terminal="B")}, {"fields": replace(FILE, path="/alice2/f")},
        {"fields": replace(FILE, size=101)}, {"fields": replace(FILE, expires=NOW + 86401)},
        {"fields": replace(RENAME, second="/bob/f")}, {"fields": replace(RENAME, path="/bob/f", second="/alice/f")},
    ],
)  # fmt: skip
def test_a_chain_that_breaks(changed: dict[str, Any]) -> None:
    with pytest.raises(NoRight):
        chain(**changed)


@pytest.mark.parametrize(
    "more",
    [
        {"now": NOW + 960}, {"now": NOW - 61}, {"now": NOW + 961, "received": NOW + 5, "carrier": "gw"},
        {"now": NOW + 961, "received": NOW + 5, "listed": frozenset({"gw"})},
        {"received": NOW + 960, "carrier": "gw", "listed": frozenset({"gw"})},
    ],
)  # fmt: skip
def test_an_operation_is_taken_while_its_token_counts(more: dict[str, Any]) -> None:
    with pytest.raises(BadToken):
        chain(**more)


def test_creating_needs_less_than_replacing() -> None:
    grants = [Grant(frozenset({Right.CREATE}), ("alice",))]
    rights.check_fields(grants, "", replace(FILE, precondition="absent"))
    rights.check_fields(grants, "", replace(FILE, kind=Kind.MKDIR))
    for kind in (Kind.FILE, Kind.DELETE):
        with pytest.raises(NoRight):
            rights.check_fields(grants, "", replace(FILE, kind=kind))


def test_an_unsigned_operation_has_no_time_of_receipt() -> None:
    token = replace(OWN, issuer="https://issuer", is_own=False)
    rights.check_bearer(FILE, token, "T", {"https://issuer": ""}, NOW)
    with pytest.raises(BadToken):
        rights.check_bearer(FILE, token, "T", {"https://issuer": ""}, NOW + 961)
    for fields, prefixes in ((FILE, {}), (replace(FILE, terminal="B"), {"https://issuer": ""})):
        with pytest.raises(NoRight):
            rights.check_bearer(fields, token, "T", prefixes, NOW)


@pytest.mark.parametrize(
    ("entry", "signed", "is_right"),
    [
        (None, True, False), (Entry("/alice", custody=False), True, False), (Entry(None), True, True),
        (Entry(None), False, False), (Entry("/alice"), False, True), (Entry("/alic"), False, False),
    ],
)  # fmt: skip
def test_a_custodian_keeps_nothing_without_an_entry(entry: Entry | None, signed: bool, is_right: bool) -> None:
    if is_right:
        rights.check_custody(entry, FILE, signed)
    else:
        with pytest.raises(NoRight):
            rights.check_custody(entry, FILE, signed)


def test_owners_issuers_carriers_and_strangers() -> None:
    owner, issuer = rights.owner_of(DELEGATED, HOLDER), rights.issuer_of(DELEGATED, HOLDER)
    row = Row(Identity(owner, "o1", 1), FILE, issuer=issuer, carriers=frozenset({"gw"}))
    may = {
        name: {action for action in Action if action in rights.ALLOWED[rights.relation(asker, row)]}
        for name, asker in {
            "owner": Asker(owner), "user": Asker(rights.owner_of(OWN, USER)), "gw": Asker("key:gw", "gw"),
            "gw2": Asker("key:gw2", "gw2"), "other": Asker(rights.owner_of(DELEGATED, "other-holder")),
            "bearer": Asker(rights.owner_of(DELEGATED, "")),
        }.items()
    }  # fmt: skip
    assert may.pop("owner") == set(Action)
    assert may.pop("user") == set(Action) - {Action.BRING}
    assert may.pop("gw") == {Action.SEE, Action.BRING}
    assert may == {"gw2": set(), "other": set(), "bearer": set()}
    with pytest.raises(NoRight):
        rights.check_action(Asker("key:gw", "gw"), row, Action.CANCEL)


def test_a_holder_can_do_nothing_with_its_issuers_operations() -> None:
    row = Row(Identity(rights.owner_of(OWN, USER), "o1", 1), FILE, issuer=rights.issuer_of(OWN, USER))
    assert row.issuer == ""
    assert rights.relation(Asker(rights.owner_of(DELEGATED, HOLDER)), row) is rights.Relation.STRANGER
    assert rights.relation(Asker(""), row) is rights.Relation.STRANGER


def test_two_pairs_of_texts_are_two_owners() -> None:
    assert rights.bearer_owner("a:b", "c") != rights.bearer_owner("a", "b:c")
