"""Claims of a token (JWT) as the rules know them: whose it is, and its grants. Pure: no signature is looked at here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stageout.overlay.http.signing import thumbprint
from stageout.overlay.rules.rights import TOLERANCE_S, BadToken, Grant, Right, Token, is_below, may, segments

#: A token that is not bound to scopes lasts so long, and one for a relay; the longest of all.
MOST_OWN_S, MOST_RELAY_S, MOST_S = 15 * 60, 60, 7 * 86400
#: Audience of tokens that are for every service (WLCG Common JWT Profile 1.0); taken with a setting only.
ANY = ("https://wlcg.cern.ch/jwt/v1/any", "ANY")
#: Scope of a token with which a client may go through a router; with ``:HOST:PORT`` to that address, once.
RELAY = "relay"
_MOST_ID_CHARS = 128


#: Words of WLCG tokens, and of SciTokens.
_GRANTS: Mapping[str, frozenset[Right]] = {
    "storage.read": frozenset({Right.READ}),
    "storage.stage": frozenset({Right.READ}),
    "storage.create": frozenset({Right.CREATE}),
    "storage.modify": frozenset({Right.CREATE, Right.MODIFY}),
    "read": frozenset({Right.READ}),
    "write": frozenset({Right.CREATE, Right.MODIFY}),
}
#: Prefix of a key that is for no names.
_NOTHING = "-"
_COORDINATE = re.compile(r"[A-Za-z0-9_-]{43}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._@+-]")


@dataclass(frozen=True)
class Issuer:
    """An issuer of tokens. :param prefix: names that they are about; "" for the whole root.

    :param is_own: a user's own key: its scopes are absolute paths, and a token without scopes is for all of the prefix.
    """

    name: str
    prefix: str
    is_own: bool = False


@dataclass(frozen=True)
class Subject:
    """The sender of a request.

    :param name: of its share. :param token_id: ``jti``. :param relays: may go through a router to all that it lists.
    :param relay_to: address to which it may, with this token, once; "" for none.
    :param holder_key: to which its token is bound. :param delegated: that token, inside of one that this key signed.
    """

    name: str
    token: Token
    relays: bool = False
    relay_to: str = ""
    token_id: str = field(default="", repr=False)
    holder_key: str = ""
    delegated: str = field(default="", repr=False)

    def may(self, right: Right, path: str) -> bool:
        """Tell whether it has a right at a name."""
        return may(self.token.grants, right, path)

    def may_relay(self, address: str, is_private: bool) -> bool:
        """Tell whether it may go through to an address. :param is_private: nobody on the way has seen its token."""
        return self.relay_to == address if self.relay_to else self.relays and is_private

    def sees(self, path: str) -> bool:
        """Tell whether it may read something at a name or below it."""
        return any(Right.READ in one.rights and is_below("/".join(one.base), path) for one in self.token.grants)


#: A sender that has not shown a token.
NOBODY = Subject("", Token("", "", frozenset(), (), 0, 0, 0))


def judge(claims: Mapping[str, Any], issuer: Issuer, audiences: frozenset[str]) -> Subject:
    """Return the subject of claims that were signed by an issuer. Its times are not looked at.

    :raises BadToken: a claim is missing or cannot be used, or the token is for another service.
    """
    begins, ends, made = (_time(claims, name) for name in ("nbf", "exp", "iat"))
    named = frozenset(_texts(claims.get("aud")))
    if audiences.isdisjoint(named):
        raise BadToken(f"the token is for another service: its aud has to be {' or '.join(sorted(audiences)[:2])}")
    sub = claims.get("sub")
    if not isinstance(sub, str) or not sub:
        raise BadToken("the token has no sub")
    holder = _holder(claims["cnf"]) if "cnf" in claims else ""
    said = claims.get("scope")
    if said is not None and not isinstance(said, str):
        raise BadToken("scope is a text of words")
    words, base = (said or "").split(), segments(issuer.prefix)
    onward, jti = [word.partition(":")[2] for word in words if word.startswith(f"{RELAY}:")], claims.get("jti")
    longest = MOST_OWN_S if issuer.is_own and said is None else MOST_RELAY_S if onward else MOST_S
    if ends - made > longest + TOLERANCE_S:
        raise BadToken(f"the token lasts longer than {longest} s")
    if onward and (len(words) > 1 or not isinstance(jti, str) or not 0 < len(jti) <= _MOST_ID_CHARS):
        raise BadToken(f"a token with the scope {RELAY}:HOST:PORT has no other one, and a jti")
    grants = [grant for grant in (_grant(word, base, issuer.is_own) for word in words) if grant]
    if issuer.is_own and said is None:
        grants = [Grant(frozenset(Right), base)]
    if issuer.prefix == _NOTHING:
        grants = []
    held_by = thumbprint(holder) if holder else ""
    token = Token(issuer.name, sub, named, tuple(grants), begins, made, ends, held_by, is_own=issuer.is_own)
    to, told_id = onward[0].lower() if onward else "", jti if isinstance(jti, str) else ""
    return Subject(share_name(issuer, sub), token, RELAY in words, to, told_id, holder)


def held(claims: Mapping[str, Any], bound: Subject, audiences: frozenset[str]) -> Subject:
    """Return the subject of claims that a holder's key signed. :param bound: of the token inside, bound to that key.

    :raises BadToken: a claim is missing or cannot be used.
    """
    begins, ends, made = (_time(claims, name) for name in ("nbf", "exp", "iat"))
    if audiences.isdisjoint(_texts(claims.get("aud"))):
        raise BadToken("the token is for another service")
    if ends - made > MOST_OWN_S + TOLERANCE_S:
        raise BadToken(f"the token lasts longer than {MOST_OWN_S} s")
    before = bound.token
    token = replace(before, begins=max(begins, before.begins), made=made, ends=min(ends, before.ends))
    return replace(bound, token=token, delegated=str(claims["delegated"]))


def _holder(cnf: Any) -> str:
    """Return the key to which a token is bound (RFC 7800), as ``ed25519:`` text. :raises BadToken: there is none."""
    jwk = cnf.get("jwk") if isinstance(cnf, dict) else None
    if not isinstance(jwk, dict) or (jwk.get("kty"), jwk.get("crv")) != ("OKP", "Ed25519"):
        raise BadToken("a token is bound to a key of Ed25519 (cnf with jwk)")
    if not isinstance(jwk.get("x"), str) or not _COORDINATE.fullmatch(jwk["x"]):
        raise BadToken("the key of cnf is malformed")
    return f"ed25519:{jwk['x']}"


def _grant(word: str, base: tuple[str, ...], is_own: bool) -> Grant | None:
    """Return what a scope gives, None for one that gives nothing here."""
    verb, _, place = word.partition(":")
    rights, named = _GRANTS.get(verb), place.split("/")
    # a path that another reader might take for a wider one gives nothing
    if rights is None or not place.startswith("/") or {".", ".."} & set(named) or "%" in place:
        return None
    asked = segments(place)
    if not is_own:
        return Grant(rights, (*base, *asked))
    # absolute, and never more than the key's own prefix
    if asked[: len(base)] == base:
        return Grant(rights, asked)
    return Grant(rights, base) if base[: len(asked)] == asked else None


def share_name(issuer: Issuer, sub: str) -> str:
    """Return the name of a share: nothing that a subject says may look like another's."""
    told = _UNSAFE.sub("_", sub)[:40]
    if issuer.is_own:
        return f"http:{issuer.name}" if sub == issuer.name else f"http:{issuer.name}:{told}-{_short(sub)}"
    return f"http:{told}-{_short(f'{issuer.name} {sub}')}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e11:
        raise BadToken(f"the token has no {name}")
    return float(value)


def _texts(value: Any) -> Sequence[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
