"""The issuers of tokens for HTTP, as the daemon tells its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlay_router.issuer_keys import kept
from overlay_router.peers.keys import BadKeys, Keys
from stageout.overlay.http.signing import thumbprint


@dataclass
class HttpAccess:
    """Settings of one router.

    :param audiences: names of this router, one of which a token has to be for.
    :param plain: requests are taken without TLS, too. :param issuers: prefix and key set by ``iss``.
    :param copy_hosts: patterns of servers that a COPY may be from and to.
    :param published: issuers whose key sets are fetched, with the URL, or "" where the issuer names it.
    """

    audiences: frozenset[str] = frozenset()
    plain: bool = False
    issuers: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    copy_hosts: tuple[str, ...] = ()
    published: Mapping[str, str] = field(default_factory=dict)

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


def read_token_issuers(path: Path, place: Path) -> tuple[dict[str, tuple[str, Any]], dict[str, str]]:
    """Prefix and JSON Web Key Set (RFC 7517) of each issuer, and the URLs of those that are fetched.

    :param place: of key sets that were fetched. :raises BadKeys: a file cannot be used.
    """
    found: dict[str, tuple[str, Any]] = {}
    published: dict[str, str] = {}
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            issuer, source = words[0], words[2] if len(words) > 2 else ""
            is_fetched = source.startswith("https://") or (not source and issuer.startswith("https://"))
            if len(words) not in (2, 3) or not (source or is_fetched):
                raise BadKeys(
                    f"{path}, line {number}: write 'ISSUER PREFIX JWKS' (PREFIX / for the whole root). JWKS is a file"
                    " or an https:// URL, and may be missing if ISSUER is an https:// URL"
                )
            keys = kept(place, issuer) if is_fetched else json.loads((path.parent / source).read_text())
            if not isinstance(keys, dict) or not isinstance(keys.get("keys"), list):
                raise BadKeys(f"{path}, line {number}: {source} is no JSON Web Key Set")
            found[issuer] = words[1].strip("/"), keys
            if is_fetched:
                published[issuer] = source
    except (OSError, ValueError) as problem:
        raise BadKeys(f"cannot read the issuers of tokens: {problem}") from None
    return found, published
