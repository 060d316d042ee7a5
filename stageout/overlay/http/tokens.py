"""Tokens of requests (JWT, RFC 7519): who signed one, and for whom. Times are looked at for each head."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from stageout.overlay.http.claims import Issuer, Subject, held, judge
from stageout.overlay.http.signing import thumbprint
from stageout.overlay.rules.rights import BadToken

#: The one algorithm of each kind of key. Nothing symmetric: who verifies such a token can make one.
_ALGORITHMS = {("OKP", "Ed25519"): "EdDSA", ("EC", "P-256"): "ES256", ("RSA", ""): "RS256"}
_MOST_CHARS = 12 * 1024
_MOST_KEPT = 4096
_LEAST_RSA_BITS = 2048
#: Claims that this module's callers look at themselves.
_UNCHECKED: Any = {
    "verify_aud": False, "verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_iss": False,
    "verify_sub": False, "verify_jti": False,
}  # fmt: skip
_REQUIRING: Any = {**_UNCHECKED, "require": ["iss", "sub", "aud", "exp", "nbf", "iat"]}


class Access:
    """The issuers of one router, and the tokens that were verified.

    :param audiences: one of which a token is for. :param own: users' keys by their names, with their prefixes.
    :param issuers: by ``iss``: prefix and JSON Web Key Set. :param routers: names of keys that custodians have.
    """

    def __init__(
        self,
        audiences: frozenset[str],
        own: Mapping[str, tuple[str, str]],
        issuers: Mapping[str, tuple[str, Any]],
        routers: frozenset[str] = frozenset(),
    ) -> None:
        self.audiences, self._own, self._issuers, self.routers = audiences, dict(own), dict(issuers), routers
        self._known: dict[bytes, Subject] = {}
        self._prints = {name: thumbprint(public) for name, (public, _) in self._own.items()}

    def __bool__(self) -> bool:
        return bool(self._own or self._issuers)

    def subject(self, token: str) -> Subject:
        """Return whose token it is; its times are not looked at. :raises BadToken: it gives no right here."""
        found = self.chain(token)
        if found.holder_key and not found.delegated:
            raise BadToken("the token is bound to a key (cnf): send one that this key has signed, with this one inside")
        return found

    def chain(self, token: str) -> Subject:
        """Return the subject of a token that comes beside a signature: its holder's key need not have signed it, too.

        :raises BadToken: it gives no right here.
        """
        place = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(place)
        if known is None:
            known = self._verified(token)
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[place] = known
        return known

    def takes(self, subject: Subject, other: Access) -> bool:
        """Tell whether a subject that ``other`` has verified counts here, too. Its issuer may have more keys."""
        name = subject.token.issuer
        if name not in self._issuers or name not in other._issuers:
            return name in self._own and self._own[name] == other._own.get(name)
        (prefix, keys), (before, known) = self._issuers[name], other._issuers[name]
        return prefix == before and all(key in keys["keys"] for key in known["keys"])

    def authority(self, subject: Subject) -> tuple[str, str]:
        """Return who issued a subject's token, a key by its thumbprint, and the prefix of that."""
        issuer = subject.token.issuer
        if subject.token.is_own:
            return self._prints[issuer], self._own[issuer][1]
        return issuer, self._issuers[issuer][0]

    def key(self, print_of_it: str) -> tuple[str, str] | None:
        """Return the public key and the prefix of a user by its thumbprint, None for one that is not known."""
        return next((self._own[name] for name, one in self._prints.items() if one == print_of_it), None)

    def _verified(self, token: str) -> Subject:
        import jwt  # as of h11

        if len(token) > _MOST_CHARS:
            raise BadToken("the token is too long")
        try:
            header = jwt.get_unverified_header(token)
            said = jwt.decode(token, options={"verify_signature": False})
            if "delegated" in said:
                return self._held(header, said, token)
            issuer, key, algorithm = self._key(header, said)
            claims = jwt.decode(
                token, key, algorithms=[algorithm],
                options=_REQUIRING,
            )  # fmt: skip
        except (jwt.InvalidTokenError, jwt.PyJWTError) as problem:
            raise BadToken(f"the token cannot be used: {str(problem)[:200]}") from None
        except (ValueError, TypeError, RecursionError, KeyError):
            raise BadToken("the token cannot be used") from None
        return judge(claims, issuer, self.audiences)

    def _held(self, header: Mapping[str, Any], said: Mapping[str, Any], token: str) -> Subject:
        """Return the subject of a token that its holder signed. :raises BadToken: another key did."""
        import jwt

        bound = self.chain(str(said["delegated"]))
        if "crit" in header or not bound.holder_key or bound.delegated:
            raise BadToken("the token inside is not bound to a key")
        key = _public({"kty": "OKP", "crv": "Ed25519", "x": bound.holder_key.partition(":")[2]}, "EdDSA")
        claims = jwt.decode(token, key, algorithms=["EdDSA"], options=_UNCHECKED)
        return held(claims, bound, self.audiences)

    def _key(self, header: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[Issuer, Any, str]:
        """Return who claims to have signed a token, and the key with its algorithm. :raises BadToken: nobody known."""
        name, algorithm = said.get("iss"), str(header.get("alg"))
        if "crit" in header or algorithm not in _ALGORITHMS.values():
            raise BadToken("a token is signed with EdDSA, ES256 or RS256")
        if isinstance(name, str) and name in self._issuers:
            prefix, keys = self._issuers[name]
            for one in _candidates(keys, header.get("kid")):
                kind = str(one.get("kty")), str(one.get("crv", ""))
                if _ALGORITHMS.get(kind) == algorithm and one.get("alg", algorithm) == algorithm:
                    return Issuer(name, prefix), _public(one, algorithm), algorithm
            raise BadToken("no key of the token's issuer that fits is known here")
        if isinstance(name, str) and name in self._own and algorithm == "EdDSA":
            public, prefix = self._own[name]
            coordinate = public.partition(":")[2]
            found = _public({"kty": "OKP", "crv": "Ed25519", "x": coordinate}, "EdDSA")
            return Issuer(name, prefix, is_own=True), found, "EdDSA"
        raise BadToken("the issuer of the token is not known here")


def _candidates(keys: Any, kid: object) -> list[dict[str, Any]]:
    listed = [one for one in keys.get("keys", ()) if isinstance(one, dict) and one.get("use", "sig") == "sig"]
    named = [one for one in listed if kid is not None and one.get("kid") == kid]
    return named or ([listed[0]] if kid is None and len(listed) == 1 else [])


def _public(key: dict[str, Any], algorithm: str) -> Any:
    from jwt.api_jwk import PyJWK

    found = PyJWK(key, algorithm).key
    if getattr(found, "key_size", _LEAST_RSA_BITS) < _LEAST_RSA_BITS and algorithm == "RS256":
        raise BadToken(f"a key of less than {_LEAST_RSA_BITS} bits is not taken")
    return found


def token_of(authorization: str) -> str:
    """Return the token of an Authorization field: of ``Bearer``, or the password of ``Basic``; "" for none."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode("ascii").partition(":")[2]
    except ValueError:  # of base64, or of characters
        return ""
