"""Expiration times of a job's credentials, from their content. Pure."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from typing import Any

from stageout.core.synchronous import NotTaken


class BadCredential(NotTaken):
    """A credential cannot be used; the text names it, the reason and the remedy, but not its content."""

    code = "Credential"


def shown(kind: str, service: str) -> str:
    """Name a credential in a message to its owner."""
    return f"the token of {service}" if kind == "token" else "the X.509 proxy"


def end_of(kind: str, service: str, content: bytes) -> int:
    """Return the expiration of a credential, wall clock in seconds; 0 if its content does not contain it.

    :param kind: "token" or "proxy". :raises BadCredential: the content has no credential.
    """
    return _token_end(service, content) if kind == "token" else _proxy_end(content)


def _token_end(service: str, content: bytes) -> int:
    """Return the expiration of a token: its own claim (RFC 7519, ``exp``), else the credmon's; 0 without either."""
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise BadCredential(f"the token of {service} is no text") from None
    beside: dict[str, Any] = {}
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            beside = json.loads(text)
        token = beside.get("access_token")
        if not isinstance(token, str) or not token:
            raise BadCredential(f"the file of the token of {service} holds no access_token")
        text = token
    return _claimed_end(text) or _seconds(beside.get("expires_at"))


def _claimed_end(token: str) -> int:
    try:
        claims = token.split(".")[1]
        return _seconds(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"])
    except (IndexError, KeyError, TypeError, ValueError, RecursionError, binascii.Error):
        return 0


def _seconds(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and 0 < value < 1 << 40 else 0


def _proxy_end(content: bytes) -> int:
    """Return the first expiration in the proxy's chain; 0 if no library can read certificates."""
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise BadCredential("the X.509 proxy's file holds no certificate")
    try:
        from cryptography.x509 import load_pem_x509_certificates
    except ImportError:
        return 0
    try:
        chain = load_pem_x509_certificates(content)
    except ValueError:
        raise BadCredential("the X.509 proxy's certificates cannot be read") from None
    return min(int(item.not_valid_after_utc.timestamp()) for item in chain)
