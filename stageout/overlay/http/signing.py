"""Signatures of operations: compact JWS (RFC 7515) with Ed25519. A type keeps uses of a key apart.

``cryptography`` is imported where a key is used: who sends no signed operation never loads it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING

from stageout.core.errors import StageoutError

if TYPE_CHECKING:
    from stageout.core.signing import SigningKey

OPERATION, CANCEL, MANIFEST = "stageout-operation", "stageout-cancel", "stageout-manifest"
LOW, BATCH = "stageout-low", "stageout-batch"
_TYPES = frozenset({OPERATION, CANCEL, MANIFEST, LOW, BATCH})
_SCHEME = "ed25519:"
_MOST_CHARS = 96 * 1024
_SIGNATURE_BYTES = 64


class BadJws(StageoutError):
    """A signature cannot be used; the text says why."""


def thumbprint(public: str) -> str:
    """Return the thumbprint (RFC 7638) of a public key ``ed25519:X``. Its issuer and owner names are made of it."""
    x = public.partition(":")[2]
    # the members in this order, without white space
    return _text(hashlib.sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'.encode()).digest())


def sign(kind: str, payload: bytes, key: SigningKey) -> str:
    """Sign a payload. :param kind: its type, one of this module's."""
    head = json.dumps({"alg": "EdDSA", "kid": thumbprint(key.public), "typ": kind}, separators=(",", ":"))
    signed = f"{_text(head.encode())}.{_text(payload)}"
    return f"{signed}.{_text(key.sign_bytes(signed.encode()))}"


def signer(jws: str) -> str:
    """Return the thumbprint that a signature names; nothing is verified yet. :raises BadJws: it is malformed."""
    return _parts(jws)[0]


def verified(kind: str, jws: str, public: str) -> bytes:
    """Return the payload that a key signed. :param public: ``ed25519:X``. :raises BadJws: it did not sign that."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    kid, typ, payload, signature = _parts(jws)
    if typ != kind:
        raise BadJws(f"the signature is for another use: its typ has to be {kind}")
    if not public.startswith(_SCHEME) or kid != thumbprint(public):
        raise BadJws("another key has signed it")
    try:
        key = Ed25519PublicKey.from_public_bytes(_bytes(public[len(_SCHEME) :]))
        key.verify(signature, jws.rpartition(".")[0].encode())
    except (InvalidSignature, ValueError):
        raise BadJws("the signature is not that of its key") from None
    return payload


def digest(jws: str) -> str:
    """Return the digest by which another signature names this one."""
    return hashlib.sha256(jws.encode()).hexdigest()


def manifest_payload(operation: str, size: int, root: str) -> bytes:
    """Return what is signed with a block list. :param operation: :func:`digest` of the signature of its operation."""
    return _json({"operation": operation, "root": root, "size": size})


def low_payload(origin: str, below: int) -> bytes:
    """Return what is signed with ``low``."""
    return _json({"below": below, "origin": origin})


def batch_payload(line: bytes) -> bytes:
    """Return what is signed with a batch. :param line: its line of JSON, without the end of the line."""
    return _json({"batch": hashlib.sha256(line).hexdigest()})


def _json(facts: dict[str, object]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def _parts(jws: str) -> tuple[str, str, bytes, bytes]:
    """Return ``kid``, ``typ``, payload and signature. :raises BadJws: it is malformed."""
    parts = jws.split(".")
    if len(jws) > _MOST_CHARS or len(parts) != 3 or not jws.isascii():
        raise BadJws("it is no compact JWS")
    try:
        head = json.loads(_bytes(parts[0]))
        payload, signature = _bytes(parts[1]), _bytes(parts[2])
    except (ValueError, RecursionError):
        raise BadJws("it is no compact JWS") from None
    if not isinstance(head, dict) or head.keys() != {"alg", "typ", "kid"} or head["alg"] != "EdDSA":
        raise BadJws("its header has alg (EdDSA), typ and kid, and nothing else")
    kid, typ = head["kid"], head["typ"]
    if not isinstance(kid, str) or not isinstance(typ, str) or typ not in _TYPES or len(signature) != _SIGNATURE_BYTES:
        raise BadJws("its typ, kid or signature is malformed")
    return kid, typ, payload, signature


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _bytes(text: str) -> bytes:
    found = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(found) != text:  # one text for each signature: its digest names it
        raise ValueError("not canonical")
    return found
