"""The verdict on rights. Signatures were verified before: these functions see claims only."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stageout.overlay.rules.operations import Fields, Kind, Row, bearer_owner, signed_owner

#: Clocks of two machines may differ by so much (seconds).
TOLERANCE_S = 60


class NoRight(Exception):
    """403. The text is for the owner; it does not tell whether a name exists."""


class BadToken(Exception):
    """401: the token does not count at this time."""


class Right(enum.Enum):
    """Effect of a request on a name."""

    READ = "read"
    CREATE = "create"
    MODIFY = "modify"


class Grant(NamedTuple):
    """Rights for a directory and all below it."""

    rights: frozenset[Right]
    base: tuple[str, ...]


@dataclass(frozen=True)
class Token:
    """The claims of a verified token.

    :param issuer: thumbprint of the user's key, or the URL of an issuer. :param holder: thumbprint of ``cnf``, "" for
        none. :param is_own: the issuer is a user's key, and may sign operations itself.
    :param latest_expires: of operations that are made under it. :param largest: size of a file.
    """

    issuer: str
    subject: str
    audiences: frozenset[str]
    grants: tuple[Grant, ...]
    begins: float
    made: float
    ends: float
    holder: str = ""
    is_own: bool = False
    latest_expires: int | None = None
    largest: int | None = None


class Entry(NamedTuple):
    """A line of a custodian's own table. :param prefix: at the terminal; None if only signed operations pass."""

    prefix: str | None
    custody: bool = True


#: Rights that a kind needs at its path, and at its second path. A put over a file, and a rename, change what exists.
NEEDS: Mapping[Kind, tuple[Right, Right | None]] = {
    Kind.FILE: (Right.MODIFY, None),
    Kind.MKDIR: (Right.CREATE, None),
    Kind.DELETE: (Right.MODIFY, None),
    Kind.RENAME: (Right.MODIFY, Right.MODIFY),
}


def segments(path: str) -> tuple[str, ...]:
    """Split a path."""
    return tuple(one for one in path.split("/") if one)


def is_below(path: str, prefix: str) -> bool:
    """Tell whether a path is a directory or lies below it. Segments are compared: /alice does not match /alice2."""
    base = segments(prefix)
    return segments(path)[: len(base)] == base


def may(grants: Iterable[Grant], right: Right, path: str) -> bool:
    """Tell whether one grant gives a right at a path."""
    asked = segments(path)
    return any(right in one.rights and asked[: len(one.base)] == one.base for one in grants)


def check_fields(grants: Iterable[Grant], prefix: str, fields: Fields) -> None:
    """Check the paths of an operation against the scopes and the prefix of the key. :raises NoRight: one lies outside.

    CREATE is enough for a file with the precondition ``absent``.
    """
    held = tuple(grants)
    first, second = NEEDS[fields.kind]
    if fields.kind is Kind.FILE and fields.precondition == "absent":
        first = Right.CREATE
    for right, path in ((first, fields.path), (second, fields.second)):
        if right is not None and not (is_below(path, prefix) and may(held, right, path)):
            raise NoRight(f"no right to {right.value} {path}")


def check_times(token: Token, now: float) -> None:
    """Check a token's lifetime, at each head. :raises BadToken: it has ended or has not begun."""
    if token.ends + TOLERANCE_S <= now:
        raise BadToken("the token has expired: ask for another")
    if max(token.begins, token.made) > now + TOLERANCE_S:
        raise BadToken("the token is not valid yet: set the clocks (NTP), or wait")


def check_chain(
    fields: Fields,
    token: Token,
    signer: str,
    here: str,
    prefixes: Mapping[str, str],
    now: float,
    received: float = 0,
    carrier: str = "",
    listed: frozenset[str] = frozenset(),
) -> None:
    """Check the chain of a signed operation: user's key, token, holder's key, path, size, terminal, ``expires``.

    :param signer: thumbprint of the key that signed the operation. :param prefixes: by issuer: those whose keys this
        router has now. :param received: when a custodian took the operation; it counts if ``carrier``, whose own key
        the request proves, is ``listed``.
    :raises NoRight: the chain does not hold. :raises BadToken: the token had ended when the operation was taken.
    """
    if token.issuer not in prefixes:
        raise NoRight("the key or the issuer of the token was removed")
    if signer != (token.holder or (token.issuer if token.is_own else None)):
        raise NoRight("another key signed the operation")
    if fields.terminal != here or here not in token.audiences:
        raise NoRight(f"the operation is for {fields.terminal}")
    if token.latest_expires is not None and fields.expires > token.latest_expires:
        raise NoRight("the operation lives longer than its token allows")
    if token.largest is not None and fields.kind is Kind.FILE and (fields.size or 0) > token.largest:
        raise NoRight("the file is larger than its token allows")
    check_fields(token.grants, prefixes[token.issuer], fields)
    check_times(token, received if carrier in listed else now)


def check_bearer(fields: Fields, token: Token, here: str, prefixes: Mapping[str, str], now: float) -> None:
    """Check an unsigned operation that its sender brings to the terminal. :raises NoRight, BadToken: see above."""
    if token.issuer not in prefixes:
        raise NoRight("the key or the issuer of the token was removed")
    if fields.terminal != here or here not in token.audiences:
        raise NoRight(f"the operation is for {fields.terminal}")
    check_fields(token.grants, prefixes[token.issuer], fields)
    check_times(token, now)


def check_custody(entry: Entry | None, fields: Fields, signed: bool) -> None:
    """Check at a custodian, before anything is stored. :param entry: of the subject. :raises NoRight: no entry fits."""
    if entry is None or not entry.custody:
        raise NoRight("no entry for custody here")
    if not signed and (entry.prefix is None or not all(is_below(name, entry.prefix) for name in fields.names)):
        raise NoRight("no entry for this path here")


class Relation(enum.Enum):
    """Part of an asker in an operation."""

    OWNER = "owner"
    ISSUER = "issuer"
    CARRIER = "carrier"
    STRANGER = "stranger"


class Action(enum.Enum):
    """Request of an asker about an operation. BRING: the fields, bytes and signatures that its owner made."""

    SEE = "see"
    FETCH = "fetch"
    BRING = "bring"
    CANCEL = "cancel"
    SETTLE = "settle"


ALLOWED: Mapping[Relation, frozenset[Action]] = {
    Relation.OWNER: frozenset(Action),
    # A pilot is gone when its user looks.
    Relation.ISSUER: frozenset(Action) - {Action.BRING},
    Relation.CARRIER: frozenset({Action.SEE, Action.BRING}),
    Relation.STRANGER: frozenset(),
}


class Asker(NamedTuple):
    """The sender of a request. :param owner: as in an identity. :param router: NAME of a router that proved it."""

    owner: str
    router: str = ""


def relation(asker: Asker, row: Row) -> Relation:
    """Return what an asker is to the operation of a row."""
    if asker.owner == row.identity.owner:
        return Relation.OWNER
    if row.issuer and asker.owner == row.issuer:
        return Relation.ISSUER
    return Relation.CARRIER if asker.router and asker.router in row.carriers else Relation.STRANGER


def check_action(asker: Asker, row: Row, action: Action) -> None:
    """Check what an asker does with an operation. :raises NoRight: it may not."""
    if action not in ALLOWED[relation(asker, row)]:
        raise NoRight("this operation belongs to somebody else")


def owner_of(token: Token, signer: str) -> str:
    """Return the owner of an operation. :param signer: thumbprint, "" for an unsigned operation."""
    return signed_owner(signer) if signer else bearer_owner(token.issuer, token.subject)


def issuer_of(token: Token, signer: str) -> str:
    """Return the owner that may see and cancel a holder's operation; "" if it is the same, or nobody."""
    return signed_owner(token.issuer) if token.is_own and signer != token.issuer else ""
