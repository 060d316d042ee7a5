"""Operations of one origin as plain requests, signed or not: what any client may send, right or wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jwt
import requests
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.overlay.http_site import NAME, Site

BLOCK_BYTES = 1 << 20
_FOLDER = "/.stageout/v1/o"
_EXPIRES_S = 6 * 3600


def thumbprint(public: str) -> str:
    """Return the thumbprint (RFC 7638) of ``ed25519:X``."""
    x = public.partition(":")[2]
    digest = hashlib.sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'.encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def blocks_of(data: bytes) -> list[bytes]:
    """Return the blocks of a file."""
    return [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]


def digests_of(data: bytes) -> list[bytes]:
    """Return the SHA-256 of each block."""
    return [hashlib.sha256(block).digest() for block in blocks_of(data)]


@dataclass
class Origin:
    """An origin of a user.

    :param by: user whose token a request carries; "" for the same. :param signs: operations are signed by the user.
    :param router: NAME of the router that reads the requests. :param via: beginning of each path: ``/.via/NAME`` at a
        custodian. :param terminal: NAME in the fields.
    """

    here: Site
    user: str = "alice"
    signs: bool = False
    by: str = ""
    via: str = ""
    terminal: str = NAME
    router: str = NAME
    name: str = field(default_factory=lambda: os.urandom(16).hex())
    made: int = field(default_factory=lambda: int(time.time()))
    _session: requests.Session = field(default_factory=requests.Session, repr=False)

    def __post_init__(self) -> None:
        self._session.trust_env, self._session.verify = False, str(self.here.ca)

    def close(self) -> None:
        """End the connection."""
        self._session.close()

    def fields(self, seq: int, kind: str, path: str, **more: object) -> dict[str, object]:
        """Return the fields of an operation."""
        return {
            "origin": self.name, "seq": seq, "kind": kind, "path": path, "second": "", "terminal": self.terminal,
            "made": self.made, "expires": self.made + _EXPIRES_S, "size": None, "mode": 0o644, "mtime": self.made,
            "after": [], "all_below": 0, "precondition": "", "block_kind": "sha-256", "digest_kind": "sha-256", **more,
        }  # fmt: skip

    def ask(self, method: str, place: str, body: bytes = b"", **fields: str) -> requests.Response:
        """Send one request. :param place: behind the origin, such as ``/3/data``."""
        told = {name.replace("_", "-"): value for name, value in fields.items()}
        token = self.here.token(self.by or self.user, aud=self.router)
        headers = {"Authorization": f"Bearer {token}", **told}
        url = f"{self.here.url}{self.via}{_FOLDER}/{self.name}{place}"
        return self._session.request(method, url, data=body, headers=headers, timeout=60)

    def sign(self, use: str, payload: dict[str, object]) -> str:
        """Return a signature of the user (compact JWS)."""
        key = self.here.keys[self.user]
        private = base64.urlsafe_b64decode(key.private + "=" * (-len(key.private) % 4))
        head = {"typ": use, "kid": thumbprint(key.public)}
        return jwt.encode(payload, Ed25519PrivateKey.from_private_bytes(private), "EdDSA", headers=head)

    def _told(self, use: str, facts: dict[str, object]) -> dict[str, Any]:
        if self.signs:
            return {"body": self.sign(use, facts).encode(), "Content_Type": "application/jose"}
        return {"body": json.dumps(facts).encode(), "Content_Type": "application/json"}

    def begin(self, facts: dict[str, object], **hop: str) -> requests.Response:
        """``PUT O``."""
        return self.ask("PUT", f"/{facts['seq']}", **self._told("stageout-operation", facts), **hop)

    def cancel(self, facts: dict[str, object]) -> requests.Response:
        """``DELETE O``."""
        return self.ask("DELETE", f"/{facts['seq']}", **self._told("stageout-cancel", facts))

    def data(self, seq: int, data: bytes, digests: Sequence[bytes] = ()) -> requests.Response:
        """``PUT O/data``: all of it. :param digests: that are said; () for the right ones."""
        said = ",".join(one.hex() for one in digests or digests_of(data))
        size = len(data)
        return self.ask("PUT", f"/{seq}/data", data, Content_Range=f"bytes 0-{size - 1}/{size}", Stageout_Blocks=said)

    def manifest(self, facts: dict[str, object], data: bytes) -> requests.Response:
        """``PUT O/manifest``: the list of these bytes."""
        listed = b"".join(digests_of(data))
        more = {}
        if self.signs:
            operation = hashlib.sha256(self.sign("stageout-operation", facts).encode()).hexdigest()
            root = hashlib.sha256(listed).hexdigest()
            said = {"operation": operation, "size": len(data), "root": root}
            more["Stageout_Signature"] = self.sign("stageout-manifest", said)
        return self.ask("PUT", f"/{facts['seq']}/manifest", listed, Stageout_Size=str(len(data)), **more)

    def put(self, seq: int, path: str, data: bytes, **more: object) -> requests.Response:
        """Bring a file; the last answer. :param more: fields, and with a capital letter, fields of the first head."""
        hop = {name: str(more.pop(name)) for name in list(more) if name[0].isupper()}
        facts = self.fields(seq, "file", path, size=len(data), **more)
        begun = self.begin(facts, **hop)
        if begun.status_code != 201:
            return begun
        came = self.data(seq, data)
        return self.manifest(facts, data) if came.status_code == 204 else came

    def state(self, seq: int, wait_s: int = 0, until: str = "done") -> dict[str, Any]:
        """``GET O``; {} if there is none for who asks."""
        prefer = {"Prefer": f"wait={wait_s}"} if wait_s else {}
        answer = self.ask("GET", f"/{seq}?until={until}", **prefer)
        found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return found
