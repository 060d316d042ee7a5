"""Claims of tokens become what the rules judge."""

from __future__ import annotations

from typing import Any

import pytest

from stageout.core.signing import new_key
from stageout.overlay.http.claims import Issuer, Subject, held, judge
from stageout.overlay.http.signing import thumbprint
from stageout.overlay.rules.rights import BadToken, Right, Token

NOW = 1_000_000
OWN, LISTED = Issuer("alice", "alice", is_own=True), Issuer("https://issuer", "vo")


def subject(issuer: Issuer = OWN, **claims: Any) -> Subject:
    said = {"sub": "alice", "aud": ["gw", "other"], "iat": NOW, "nbf": NOW, "exp": NOW + 600, **claims}
    return judge(said, issuer, frozenset({"gw", "https://gw"}))


def test_the_token_that_the_rules_see() -> None:
    found = subject(scope="storage.read:/alice/run7")
    assert found.token == Token(
        "alice", "alice", frozenset({"gw", "other"}), found.token.grants, NOW, NOW, NOW + 600, is_own=True
    )  # fmt: skip
    assert [(one.rights, one.base) for one in found.token.grants] == [({Right.READ}, ("alice", "run7"))]


@pytest.mark.parametrize(
    ("issuer", "scope", "reads", "sees", "not_even_seen"),
    [
        (OWN, None, "alice/f", "alice", "alice2"), (OWN, "storage.read:/", "alice/f", "", "bob"),
        (OWN, "storage.read:/alice/run7", "alice/run7/f", "alice", "alice/run77"),
        (LISTED, "read:/run7", "vo/run7", "vo", "run7"), (LISTED, "storage.read:/run7", "vo/run7/f", "", "vo/run"),
    ],
)  # fmt: skip
def test_scopes_are_compared_by_segments(
    issuer: Issuer, scope: str | None, reads: str, sees: str, not_even_seen: str
) -> None:
    found = subject(issuer, scope=scope)
    assert found.may(Right.READ, reads) and found.sees(sees)
    assert not found.may(Right.READ, sees) or sees == "alice"
    assert not found.may(Right.READ, not_even_seen) and not found.sees(not_even_seen)


@pytest.mark.parametrize(
    "changed",
    [{"aud": "gw2"}, {"exp": NOW + 961}, {"sub": ""}, {"iat": None}, {"scope": ["read:/"]}, {"cnf": {"jwk": {}}}],
)
def test_claims_that_give_nothing(changed: dict[str, Any]) -> None:
    with pytest.raises(BadToken):
        subject(**changed)


def test_a_holder_has_no_more_than_the_token_that_is_bound_to_its_key() -> None:
    public = new_key().public
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": public.partition(":")[2]}
    bound = subject(sub="pilot7", scope="storage.create:/alice/run7", cnf={"jwk": jwk})
    assert bound.token.holder == thumbprint(public) and bound.holder_key == public
    claims = {"aud": "gw", "iat": NOW + 5, "nbf": NOW - 9, "exp": NOW + 800, "delegated": "a.b.c"}
    found = held(claims, bound, frozenset({"gw"}))
    assert (found.token.begins, found.token.made, found.token.ends) == (NOW, NOW + 5, NOW + 600)
    assert found.token.grants == bound.token.grants and found.delegated == "a.b.c"
    for changed in ({"aud": "gw2"}, {"exp": NOW + 2000}, {"nbf": None}):
        with pytest.raises(BadToken):
            held({**claims, **changed}, bound, frozenset({"gw"}))


@pytest.mark.parametrize(
    "cnf", [None, "", {}, {"jkt": "x"}, {"jwk": {"kty": "RSA"}}, {"jwk": {"kty": "OKP", "crv": "Ed25519", "x": "/"}}]
)
def test_keys_that_no_token_is_bound_to(cnf: object) -> None:
    with pytest.raises(BadToken):
        subject(cnf=cnf)
