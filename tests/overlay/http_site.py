"""A router with a certificate that answers HTTP, and tokens for it."""

from __future__ import annotations

import subprocess
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stageout.core.signing import SigningKey, new_key
from tests.harness.router import RouterProcess

NAME = "localhost"


def _bytes(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def private_of(key: SigningKey) -> Ed25519PrivateKey:
    """A key, as a library takes it."""
    return Ed25519PrivateKey.from_private_bytes(_bytes(key.private))


@dataclass
class Site:
    """A running router. :param keys: private keys of its users, by name."""

    router: RouterProcess
    ca: Path
    keys: Mapping[str, SigningKey]

    @property
    def url(self) -> str:
        """Of the root, without the slash at its end."""
        return f"https://localhost:{self.router.port}"

    @property
    def root(self) -> Path:
        """Files arrive below it."""
        return self.router.root

    def token(self, user: str = "alice", algorithm: str = "EdDSA", key: object = None, **claims: object) -> str:
        """A token of a user for this router; a claim of None is left out."""
        now = int(time.time())
        said = {"iss": user, "sub": user, "aud": NAME, "iat": now, "nbf": now, "exp": now + 600, **claims}
        signing = key or Ed25519PrivateKey.from_private_bytes(_bytes(self.keys[user].private))
        return jwt.encode({name: one for name, one in said.items() if one is not None}, signing, algorithm)

    def curl(self, path: str, *options: str, token: str = "") -> tuple[int, str]:
        """Status, and head and body, of a request with curl."""
        command = [
            "curl", "--silent", "--show-error", "--include", "--max-time", "60", "--cacert", str(self.ca),
            "--header", f"Authorization: Bearer {token or self.token()}", "--write-out", "\n%{http_code}", *options,
            self.url + path,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        text, _, status = done.stdout.rpartition("\n")
        return int(status), text + done.stderr


@contextmanager
def site(
    home: Path,
    settings: Mapping[str, str] | None = None,
    users: Mapping[str, str] | None = None,
    authority: trustme.CA | None = None,
    keys: Mapping[str, SigningKey] | None = None,
) -> Iterator[Site]:
    """A router for these users, each with its prefix. :param keys: of the users, if another router knows them."""
    prefixes = users or {"alice": "/", "bob": "/bob"}
    home.mkdir(parents=True, exist_ok=True)
    authority = authority or trustme.CA()
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(home / "cert.pem"))
    keys = keys or {name: new_key() for name in prefixes}
    lines = [f"{name} {keys[name].public} {prefix}\n" for name, prefix in prefixes.items()]
    path = home / "http-keys"
    path.write_text("".join(["site not-secret-but-long-enough /\n", *lines]))
    path.chmod(0o600)
    environment = {
        "STAGEOUT_ROUTER_CERT": str(home / "cert.pem"),
        "STAGEOUT_ROUTER_KEYS": str(path),
        "STAGEOUT_ROUTER_ADDRESS": NAME,
        **(settings or {}),
    }
    with RouterProcess(home, environment) as running:
        yield Site(running, home / "ca.pem", keys)
