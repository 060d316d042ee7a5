"""The issuers of tokens for HTTP, as the daemon tells its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlay_router.peers.keys import BadKeys, Keys
from stageout.overlay.http.signing import thumbprint


@dataclass
class HttpAccess:
    """Settings of one router.

    :param audiences: names of this router, one of which a token has to be for.
    :param plain: requests are taken without TLS, too. :param issuers: prefix and key set by ``iss``.
    :param copy_hosts: patterns of servers that a COPY may be from and to.
    """

    audiences: frozenset[str] = frozenset()
    plain: bool = False
    issuers: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    copy_hosts: tuple[str, ...] = ()

    def encoded(self, keys: Keys) -> bytes:
        """Return the message that gives a worker its settings. :param keys: keys file with the accepted public keys."""
        told = {
            "audiences": sorted(self.audiences), "plain": self.plain, "issuers": dict(self.issuers),
            "copy_hosts": self.copy_hosts,
            "keys": {name: (key.public, key.prefix) for name, key in keys.public.items()},
            "routers": sorted(name for name, key in keys.public.items() if key.is_router),
        }  # fmt: skip
        return json.dumps(told).encode()

    def trusts(self, keys: Keys, authority: tuple[str, str]) -> bool:
        """Tell whether an issuer, or a key by its thumbprint, still has that prefix."""
        name, prefix = authority
        held = [key.prefix for key in keys.public.values() if thumbprint(key.public) == name]
        return prefix in held or (name in self.issuers and self.issuers[name][0] == prefix)


def read_token_issuers(path: Path) -> dict[str, tuple[str, Any]]:
    """Prefix and JSON Web Key Set (RFC 7517) of each issuer. :raises BadKeys: a file cannot be used."""
    found: dict[str, tuple[str, Any]] = {}
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            if len(words) != 3:
                raise BadKeys(f"{path}, line {number}: write 'ISSUER PREFIX JWKS-FILE' (PREFIX / for the whole root)")
            keys = json.loads((path.parent / words[2]).read_text())
            if not isinstance(keys, dict) or not isinstance(keys.get("keys"), list):
                raise BadKeys(f"{path}, line {number}: {words[2]} is no JSON Web Key Set")
            found[words[0]] = words[1].strip("/"), keys
    except (OSError, ValueError) as problem:
        raise BadKeys(f"cannot read the issuers of tokens: {problem}") from None
    return found
