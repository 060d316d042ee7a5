"""Digests that servers offer, and what to do when they do or do not agree.

Sources: RFC 9530 (Repr-Digest), RFC 3230 (Digest), RFC 1864 (Content-MD5), Amazon S3's ETag and x-amz-checksum-*
headers, and the OC-Checksum header of ownCloud and Nextcloud.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import re
import zlib
from collections.abc import Mapping
from typing import Protocol

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Request

#: Wire names of algorithms -> ours. Strongest first.
_NAMES = {
    "sha-512": "sha512", "sha512": "sha512", "sha-256": "sha256", "sha256": "sha256", "sha": "sha1", "sha-1": "sha1",
    "sha1": "sha1", "md5": "md5", "adler32": "adler32", "crc32": "crc32",
}  # fmt: skip
_STRENGTH = ("sha512", "sha256", "sha1", "md5", "crc32", "adler32")
_HEX_BYTES = {"sha512": 64, "sha256": 32, "sha1": 20, "md5": 16, "crc32": 4, "adler32": 4}
_S3_ETAG = re.compile(r'^"?([0-9a-fA-F]{32})"?$')


class Policy(str, enum.Enum):
    """What to ask of digests."""

    OFF = "off"
    IF_AVAILABLE = "if-available"
    REQUIRED = "required"


def policy_of(request: Request, context: Context) -> Policy:
    """The file's ``checksum_policy`` in PluginData, else the knob CHECKSUM_POLICY, else "if-available".

    :raises TransferFailure: BAD_REQUEST for another word.
    """
    word = str(request.data.get("checksum_policy") or context.setting("CHECKSUM_POLICY", Policy.IF_AVAILABLE.value))
    try:
        return Policy(word.lower())
    except ValueError:
        allowed = ", ".join(member.value for member in Policy)
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"checksum policy {word!r}: write one of {allowed}") from None


def wanted_by_owner(request: Request) -> dict[str, str]:
    """``checksum = "sha256:HEX"`` in PluginData, as name -> hexadecimal value.

    :raises TransferFailure: BAD_REQUEST when it cannot be read.
    """
    text = request.data.get("checksum")
    if not text:
        return {}
    name, _, value = str(text).partition(":")
    known = _NAMES.get(name.strip().lower())
    if known is None or not re.fullmatch(f"[0-9a-fA-F]{{{2 * _HEX_BYTES[known]}}}", value.strip()):
        names = ", ".join(_STRENGTH)
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"checksum {text!r}: write NAME:HEX with one of {names}")
    return {known: value.strip().lower()}


def offered(headers: Mapping[str, str], whole: bool = True) -> dict[str, str]:
    """Digests of the whole file in a response's headers, name -> hexadecimal value.

    :param whole: the response carries the whole file (a part's Content-MD5 is of the part).
    """
    found: dict[str, str] = {}
    for field in ("repr-digest", "digest"):
        for item in headers.get(field, "").split(","):
            name, mark, value = item.strip().partition("=")
            _add(found, name, value.strip(" :") if mark else "")
    if whole:
        _add(found, "md5", headers.get("content-md5", ""))
    for item in headers.get("oc-checksum", "").split():
        name, _, value = item.partition(":")
        _add(found, name, value)
    for field, value in headers.items():
        for prefix in ("x-checksum-", "x-amz-checksum-"):
            if field.startswith(prefix) and "-" not in value:
                _add(found, field[len(prefix) :], value)
    etag = _S3_ETAG.match(headers.get("etag", ""))
    if etag and _is_s3(headers):
        found.setdefault("md5", etag[1].lower())
    return found


def _is_s3(headers: Mapping[str, str]) -> bool:
    """S3's ETag is the MD5 unless the object is multipart (its form differs) or encrypted with a key of its own."""
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    customer = "x-amz-server-side-encryption-customer-algorithm" in headers
    return "x-amz-request-id" in headers and not encrypted and not customer


def _add(found: dict[str, str], name: str, value: str) -> None:
    known = _NAMES.get(name.strip().lower())
    value = value.strip()
    if known is None or not value:
        return
    size = _HEX_BYTES[known]
    if re.fullmatch(f"[0-9a-fA-F]{{{2 * size}}}", value):
        found.setdefault(known, value.lower())
        return
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return
    if len(raw) == size:
        found.setdefault(known, raw.hex())


class _Running(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Checksum32:
    """zlib's 32-bit checksums in the form of hashlib."""

    def __init__(self, name: str) -> None:
        self._step = zlib.crc32 if name == "crc32" else zlib.adler32
        self._value = 0 if name == "crc32" else 1

    def update(self, data: bytes, /) -> None:
        self._value = self._step(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class Digester:
    """Computes digests while a file passes by.

    :param names: which; sha1 and md5 only serve to compare with what servers offer.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._running: dict[str, _Running] = {name: _make(name) for name in names}

    def update(self, data: bytes) -> None:
        """The next piece."""
        for running in self._running.values():
            running.update(data)

    def values(self) -> dict[str, str]:
        """Digests of all that passed, name -> hexadecimal value."""
        return {name: running.hexdigest() for name, running in self._running.items()}


def _make(name: str) -> _Running:
    if name in ("crc32", "adler32"):
        return _Checksum32(name)
    return hashlib.new(name, usedforsecurity=False) if name in ("md5", "sha1") else hashlib.new(name)


def compare(ours: Mapping[str, str], theirs: Mapping[str, str], what: str) -> str:
    """Name of the strongest digest that both have, "" when there is none.

    :raises TransferFailure: CONTENT_MISMATCH when one that both have differs.
    """
    common = [name for name in _STRENGTH if name in ours and name in theirs]
    for name in common:
        if ours[name] != theirs[name]:
            text = f"{what}: {name} is {theirs[name]} there and {ours[name]} here"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text)
    return common[0] if common else ""


def require(policy: Policy, verified: str, why: str) -> None:
    """:raises TransferFailure: NOT_VERIFIED when the policy is "required" and no digest was compared."""
    if policy is Policy.REQUIRED and verified not in _STRENGTH:
        text = f"{why}; the checksum policy is 'required' (set it to if-available to accept the size alone)"
        raise TransferFailure(ErrorClass.NOT_VERIFIED, text)


def chosen(policy: Policy, owner: Mapping[str, str], hints: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Which digests to compute: those the owner gave, those the server hints at, else MD5 (what most servers offer)."""
    if policy is Policy.OFF and not owner:
        return ()
    return tuple(dict.fromkeys((*owner, *hints, *(() if policy is Policy.OFF or hints else ("md5",)))))
