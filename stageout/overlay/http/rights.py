"""The verdict on the claims of a token: whose it is, and what it may do below which names. Pure.

Times are those of the machine that asks. Nothing here looks at a signature.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Clocks of two machines may differ by so much.
TOLERANCE_S = 60
#: A token that is not bound to scopes lasts so long, and one for a relay; the longest of all.
MOST_OWN_S, MOST_RELAY_S, MOST_S = 15 * 60, 60, 7 * 86400
#: Audience of tokens that are for every service (WLCG Common JWT Profile 1.0); taken with a setting only.
ANY = ("https://wlcg.cern.ch/jwt/v1/any", "ANY")
#: Scope of a token with which a client may go through a router.
RELAY = "relay"


class Right(enum.Enum):
    """An effect of a request on a name."""

    READ = "read"
    CREATE = "create"
    MODIFY = "modify"


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
_UNSAFE = re.compile(r"[^A-Za-z0-9._@+-]")


class BadClaims(Exception):
    """A token gives no right now; the text is for its holder."""


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

    :param name: of its share. :param grants: rights with the segments of the directory that each is for.
    :param ends: Unix time after which it has no right. :param token_id: ``jti``.
    """

    name: str
    issuer: str
    grants: tuple[tuple[frozenset[Right], tuple[str, ...]], ...] = ()
    relays: bool = False
    begins: float = 0
    ends: float = 0
    made: float = 0
    token_id: str = field(default="", repr=False)

    def may(self, right: Right, path: str) -> bool:
        """Tell whether it has a right at a name: segments are compared, so ``/a`` says nothing of ``/ab``."""
        asked = segments(path)
        return any(right in rights and asked[: len(base)] == base for rights, base in self.grants)

    def sees(self, path: str) -> bool:
        """Tell whether it may read something at a name or below it."""
        asked = segments(path)
        return any(Right.READ in rights and base[: len(asked)] == asked for rights, base in self.grants)


def segments(path: str) -> tuple[str, ...]:
    """Split a path."""
    return tuple(one for one in path.split("/") if one)


def judge(claims: Mapping[str, Any], issuer: Issuer, audiences: frozenset[str]) -> Subject:
    """Return the subject of claims that were signed by an issuer. Its times are checked with :func:`check_times`.

    :raises BadClaims: a claim is missing or cannot be used, or the token is for another service.
    """
    begins, ends, made = (_time(claims, name) for name in ("nbf", "exp", "iat"))
    if audiences.isdisjoint(_texts(claims.get("aud"))):
        raise BadClaims(f"the token is for another service: its aud has to be {' or '.join(sorted(audiences)[:2])}")
    sub = claims.get("sub")
    if not isinstance(sub, str) or not sub:
        raise BadClaims("the token has no sub")
    if "cnf" in claims:
        raise BadClaims("tokens that are bound to a key (cnf) are not taken here")
    said = claims.get("scope")
    if said is not None and not isinstance(said, str):
        raise BadClaims("scope is a text of words")
    longest = MOST_OWN_S if issuer.is_own and said is None else MOST_S
    if ends - made > longest + TOLERANCE_S:
        raise BadClaims(f"the token lasts longer than {longest} s")
    words, base = (said or "").split(), segments(issuer.prefix)
    grants = [grant for grant in (_grant(word, base, issuer.is_own) for word in words) if grant]
    if issuer.is_own and said is None:
        grants = [(frozenset(Right), base)]
    if issuer.prefix == _NOTHING:
        grants = []
    jti = claims.get("jti")
    return Subject(
        _name(issuer, sub), issuer.name, tuple(grants), RELAY in words, begins, ends, made,
        jti if isinstance(jti, str) else "",
    )  # fmt: skip


def check_times(subject: Subject, now_s: float) -> None:
    """Check whether a subject's token counts at a time. :raises BadClaims: it does not."""
    if subject.ends + TOLERANCE_S <= now_s:
        raise BadClaims("the token has expired: ask for another")
    if max(subject.begins, subject.made) > now_s + TOLERANCE_S:
        raise BadClaims("the token is not valid yet: set the clocks (NTP), or wait")


def _grant(word: str, base: tuple[str, ...], is_own: bool) -> tuple[frozenset[Right], tuple[str, ...]] | None:
    """Return what a scope gives, None for one that gives nothing here."""
    verb, _, place = word.partition(":")
    rights, named = _GRANTS.get(verb), place.split("/")
    # a path that another reader might take for a wider one gives nothing
    if rights is None or not place.startswith("/") or {".", ".."} & set(named) or "%" in place:
        return None
    asked = segments(place)
    if not is_own:
        return rights, (*base, *asked)
    # absolute, and never more than the key's own prefix
    if asked[: len(base)] == base:
        return rights, asked
    return (rights, base) if base[: len(asked)] == asked else None


def _name(issuer: Issuer, sub: str) -> str:
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
        raise BadClaims(f"the token has no {name}")
    return float(value)


def _texts(value: Any) -> Sequence[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
