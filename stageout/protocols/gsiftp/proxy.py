"""X.509 proxy certificates: presence, expiration, and limitation (RFC 3820, by the OID of its policy)."""

from __future__ import annotations

import base64
import os
import re
import time
from calendar import timegm
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.S)
_SEQUENCE, _OBJECT, _OCTETS, _UTC_TIME, _LONG_TIME = 0x30, 0x06, 0x04, 0x17, 0x18
_PROXY_CERT_INFO = bytes.fromhex("2b0601050507010e")  # 1.3.6.1.5.5.7.1.14
_LIMITED = bytes.fromhex("2b060104019b5001010109")  # 1.3.6.1.4.1.3536.1.1.1.9
RENEW = "renew it (grid-proxy-init or voms-proxy-init) and submit again, or let condor_submit delegate a longer one"


@dataclass(frozen=True)
class Proxy:
    """The facts in a file of certificates.

    :param ends_s: expiration of the first certificate to expire, wall clock. :param limited: one is a limited proxy.
    """

    ends_s: float
    limited: bool


def proxy_path(environment: Mapping[str, str]) -> Path | None:
    """Find the credential as GSI does: the named proxy, else the user's default one; None without any."""
    named = environment.get("X509_USER_PROXY")
    path = Path(named) if named else Path(f"/tmp/x509up_u{os.geteuid()}")
    if path.is_file():
        return path
    certificate = environment.get("X509_USER_CERT")
    return Path(certificate) if certificate and Path(certificate).is_file() else None


def checked(environment: Mapping[str, str], host: str) -> Proxy:
    """Check the credential for a GSI server.

    :raises TransferFailure: CREDENTIAL_MISSING, CREDENTIAL_EXPIRED, or CREDENTIAL_REFUSED for an invalid certificate.
    """
    path = proxy_path(environment)
    if path is None:
        text = "gsiftp needs an X.509 proxy: put x509userproxy (or use_x509userproxy = true) into the submit file"
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, text, host)
    try:
        found = read_proxy(path.read_bytes())
    except (OSError, ValueError) as error:
        text = f"the X.509 proxy {path.name} cannot be read ({error}): {RENEW}"
        raise TransferFailure(ErrorClass.CREDENTIAL_REFUSED, text, host) from None
    if found.ends_s <= time.time():
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.ends_s))
        raise TransferFailure(ErrorClass.CREDENTIAL_EXPIRED, f"the X.509 proxy ended {ended}: {RENEW}", host)
    return found


def read_proxy(pem: bytes) -> Proxy:
    """Read all certificates of a file.

    :raises ValueError: there is none, or one is not DER.
    """
    certificates = [base64.b64decode(body) for body in _PEM.findall(pem)]
    if not certificates:
        raise ValueError("it holds no certificate")
    try:
        facts = [(_end_s(der), _is_limited(der)) for der in certificates]
    except (IndexError, StopIteration):
        raise ValueError("it is damaged") from None
    return Proxy(min(end_s for end_s, _ in facts), any(limited for _, limited in facts))


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each DER value in a sequence."""
    place = 0
    while place < len(data):
        tag, length = data[place], data[place + 1]
        place += 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(data[place : place + count], "big")
            place += count
        if place + length > len(data):
            raise ValueError("it is cut off")
        yield tag, data[place : place + length]
        place += length


def _inside(data: bytes) -> list[tuple[int, bytes]]:
    return list(_items(data))


def _fields(der: bytes) -> list[tuple[int, bytes]]:
    """Return the fields of the signed part of a certificate."""
    certificate = next(content for _, content in _items(der))
    return _inside(next(content for _, content in _items(certificate)))


def _end_s(der: bytes) -> float:
    times = (_inside(content) for tag, content in _fields(der) if tag == _SEQUENCE)
    validity = next(pair for pair in times if pair and pair[0][0] in (_UTC_TIME, _LONG_TIME))
    tag, text = validity[1]
    digits = text.decode("ascii").rstrip("Z")
    if tag == _UTC_TIME:  # RFC 5280: a year of two digits below 50 is 20xx
        digits = ("20" if digits < "50" else "19") + digits
    return float(timegm(time.strptime(digits, "%Y%m%d%H%M%S")))


def _is_limited(der: bytes) -> bool:
    for tag, content in _fields(der):
        if tag != 0xA3:
            continue
        for _, extension in _items(_inside(content)[0][1]):
            parts = _inside(extension)
            if parts[0] == (_OBJECT, _PROXY_CERT_INFO):
                return _policy(parts[-1][1]) == _LIMITED
    return False


def _policy(info: bytes) -> bytes:
    """Return the OID of the policy in a ProxyCertInfo."""
    (_, content) = _inside(info)[0]
    policy = next(inner for tag, inner in _items(content) if tag == _SEQUENCE)
    return next(oid for tag, oid in _items(policy) if tag == _OBJECT)
