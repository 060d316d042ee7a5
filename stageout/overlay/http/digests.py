"""Digests of files in fields of HTTP: RFC 9530, and RFC 3230 as grid tools use it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Mapping
from typing import Callable, Protocol

from stageout.overlay.http.heads import Head, Refused


class Hasher(Protocol):
    """A running digest, as of ``hashlib``."""

    def update(self, data: memoryview, /) -> None:
        """Take these bytes."""

    def digest(self) -> bytes:
        """Return the digest of all that came."""


class Adler:
    """Adler-32 (RFC 1950)."""

    def __init__(self) -> None:
        self._sum = 1

    def update(self, data: memoryview, /) -> None:
        """Take these bytes."""
        self._sum = zlib.adler32(data, self._sum)

    def digest(self) -> bytes:
        """Return four bytes."""
        return self._sum.to_bytes(4, "big")


#: Makers by kind, as this module names them.
KINDS: Mapping[str, Callable[[], Hasher]] = {
    "adler32": Adler, "md5": lambda: hashlib.md5(usedforsecurity=False), "sha-256": hashlib.sha256,
    "sha-512": hashlib.sha512,
}  # fmt: skip
#: Names of RFC 9530 that are others.
_OF_9530 = {"adler": "adler32"}
_MEMBER = re.compile(r"\s*([A-Za-z0-9*._-]+)\s*=\s*(?::([A-Za-z0-9+/=]*):|([0-9.]+))\s*")


def wanted(head: Head) -> tuple[str, str]:
    """Return the field that a client asks for, and the kind; ("", "") when it asks for none that is known."""
    for field, answer in (("want-repr-digest", "Repr-Digest"), ("want-digest", "Digest")):
        found = _preferred(head.get(field), ";q=" if answer == "Digest" else "=")
        if found:
            return answer, found
    return "", ""


def _preferred(listed: str, sign: str) -> str:
    best, most = "", 0.0
    for one in listed.split(","):
        name, _, weight = one.replace(" ", "").partition(sign)
        kind = _kind(name)
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            continue
        if kind and value > most:
            best, most = kind, value
    return best


def field(answer: str, kind: str, digest: bytes) -> str:
    """Return the value of a field. :param answer: its name, as of :func:`wanted`."""
    text = base64.b64encode(digest).decode()
    if answer == "Digest":
        return f"adler32={digest.hex()}" if kind == "adler32" else f"{kind}={text}"
    names = {kind: name for name, kind in _OF_9530.items()}
    return f"{names.get(kind, kind)}=:{text}:"


def promised(head: Head) -> dict[str, bytes]:
    """Return the digests that the body of a PUT must have, by kind; kinds that are unknown here are left out.

    :raises Refused: 400: one is malformed.
    """
    found: dict[str, bytes] = {}
    try:
        for name in ("repr-digest", "content-digest"):
            for one in filter(str.strip, head.get(name).split(",")):
                member = _MEMBER.fullmatch(one)
                if member is None or member[2] is None:
                    raise Refused(400, f"{name} is malformed")
                if _kind(member[1]):
                    found[_kind(member[1])] = base64.b64decode(member[2], validate=True)
        for one in filter(str.strip, head.get("digest").split(",")):
            name, _, value = one.strip().partition("=")
            if _kind(name) == "adler32":
                found["adler32"] = bytes.fromhex(value.rjust(8, "0"))
            elif _kind(name):
                found[_kind(name)] = base64.b64decode(value, validate=True)
        if head.get("content-md5"):
            found["md5"] = base64.b64decode(head.get("content-md5"), validate=True)
    except (binascii.Error, ValueError):
        raise Refused(400, "a digest is malformed") from None
    return found


def _kind(name: str) -> str:
    lowered = name.strip().lower()
    known = _OF_9530.get(lowered, lowered)
    return known if known in KINDS else ""
