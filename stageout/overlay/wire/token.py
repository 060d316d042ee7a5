"""HTCondor's tokens (IDTOKENS) as keys of the overlay: what of one is said, and what is its secret. No I/O.

A token is a JSON Web Token (RFC 7519), ``HEADER.CONTENT.SIGNATURE``, signed by HMAC-SHA-256 with a key of the pool that
machines of its administrators have. So its signature is a secret that the holder has and whoever has that key can work
out: both prove it to each other as any other key (docs/developer/wire.md), and it is never sent. Made by
``condor_token_create``; see HTCondor's manual, "Introduction to Configuring Security", section "IDTOKENS
authentication".
"""

from __future__ import annotations

import base64
import hmac
import itertools
import json
import re
from dataclasses import dataclass, field
from typing import Any

#: The prefix of a key's name, as HELLO says it, when HEADER and CONTENT of a token follow.
MARK = "token:"
#: Key that signs where the header names none.
POOL = "POOL"
#: An identity as HTCondor writes it, ``USER@DOMAIN``, and nothing that is a pattern or a path.
IDENTITY = re.compile(r"[A-Za-z0-9._@+-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
#: The level of HTCondor's authorization without which a token that has any gives no right here.
_WRITE = "condor:/WRITE"
#: Constants that HTCondor's files of keys are mixed with, and with which a key for tokens is derived.
_SCRAMBLE, _SALT, _PURPOSE = b"\xde\xad\xbe\xef", b"htcondor", b"master jwt"


class BadToken(ValueError):
    """A text is no token, or the token gives no right now; the message is for its holder."""


_SHOWN_CHARS = 100
#: Clocks of two machines may differ by so much when a token is new.
_SKEW_S = 60


@dataclass(frozen=True)
class Claims:
    """The claims of a token, not yet proved. :param key: name of the key that signed it.

    :param ends: Unix time in seconds after which it gives no right, 0: never.
    """

    identity: str
    key: str
    ends: float = field(default=0, compare=False)


@dataclass(frozen=True)
class Service:
    """The service that a token is shown to. :param issuer: whose tokens it takes (HTCondor's TRUST_DOMAIN).

    :param names: those that ``aud`` of a token may have. A token without ``aud`` is for all services.
    """

    issuer: str = ""
    names: frozenset[str] = frozenset()


def is_token(text: str) -> bool:
    """Tell whether a word of a key file is a token."""
    return _TOKEN.fullmatch(text) is not None


def key_of(token: str) -> tuple[str, bytes]:
    """The name that HELLO says, and the secret that is proved and never sent."""
    said, _, signature = token.rpartition(".")
    return MARK + said, signature.encode()


def claims(name: str, now_s: float, service: Service) -> Claims:
    """The content of the token behind the name of a key. The peer that says so still has to prove it.

    :param now_s: Unix time. :raises BadToken: it is none, not signed as HTCondor does, over, not valid yet, of another
        issuer, for another service, or not for writing.
    """
    found, said = _read(name)
    identity, issuer = found.identity, said.get("iss")
    if "exp" in said and not found.ends > now_s:
        raise BadToken(f"the token of {identity} has expired: ask for another")
    if not all(0 < _number(said[begin]) <= now_s + _SKEW_S for begin in ("nbf", "iat") if begin in said):
        raise BadToken(f"the token of {identity} is not valid yet: set the clocks (NTP), or wait")
    if not service.issuer or issuer != service.issuer:
        whose = repr(issuer)[:_SHOWN_CHARS]
        raise BadToken(
            f"the token of {identity} is of the issuer {whose}, and this router takes those of {service.issuer!r}"
            " (TRUST_DOMAIN)"
        )
    if "aud" in said and service.names.isdisjoint(_texts(said["aud"])):
        raise BadToken(
            f"the token of {identity} is for another service: ask for one for {' or '.join(sorted(service.names))}"
        )
    if "scope" in said and _WRITE not in str(said["scope"]).split():
        raise BadToken(f"the token of {identity} is not for WRITE: ask for one with -authz WRITE, or without -authz")
    return found


def _read(name: str) -> tuple[Claims, dict[str, Any]]:
    """The identity of a token, and all that it says. :raises BadToken: it is none."""
    header, _, content = name[len(MARK) :].partition(".")
    signed, said = _object(header), _object(content)
    key, identity = signed.get("kid", POOL), said.get("sub")
    if signed.get("alg") != "HS256" or not isinstance(key, str):
        raise BadToken("the token is not one of HTCondor's (HS256)")
    if not isinstance(identity, str) or not IDENTITY.fullmatch(identity):
        raise BadToken("the token has no identity that can be used here")
    ends = _number(said["exp"]) if "exp" in said else 0
    return Claims(identity, key, ends), said


def known_as(name: str) -> str:
    """The name for a peer that has proved its key: ``token:KEY:IDENTITY`` of a token, else the same."""
    if not name.startswith(MARK):
        return name
    try:
        said, _ = _read(name)
    except BadToken:
        return name
    return f"{MARK}{said.key}:{said.identity}"


def secret(name: str, key: str, file: bytes) -> bytes:
    """The signature that the token behind the name of a key must have.

    :param key: its name. :param file: content of HTCondor's file with that key.
    """
    mixed = bytes(one ^ other for one, other in zip(file, itertools.cycle(_SCRAMBLE)))
    # HTCondor takes the pool's key twice (condor_auth_passwd.cpp), for the sake of its older method PASSWORD
    first = hmac.new(_SALT, mixed * 2 if key == POOL else mixed, "sha256").digest()
    derived = hmac.new(first, _PURPOSE + b"\x01", "sha256").digest()  # HKDF (RFC 5869), one round: 32 bytes
    signature = hmac.new(derived, name[len(MARK) :].encode(), "sha256").digest()
    return base64.urlsafe_b64encode(signature).rstrip(b"=")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadToken("this is no token")
    return found


def _texts(value: Any) -> set[str]:
    """Of a text, or of a list of texts."""
    return {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)}


def _number(value: Any) -> float:
    """Of a time; 0, which is long over, for what is none."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
