"""The user of a client: tokens and signatures by an Ed25519 key, or a bearer token in a file."""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.transfer.connection import Address

if TYPE_CHECKING:
    from stageout.core.signing import SigningKey

#: Seconds that a token of one's own lasts, and a new one is made before its end; that one for a relay lasts.
_LASTS_S, _ANEW_S, _RELAY_S = 840, 240, 60
#: Clocks that differ by less are left as they are.
_LEAST_OFF_S = 5


class Identity:
    """The proofs that a client shows to one router. May be used in several threads.

    :param router: NAME of the router. :param key: of the user, None with a bearer token. :param user: name of the
        key's line in the router's keys file. :param token: file with a bearer token, or with one that is bound to the
        key; it is read again when it ends.
    """

    def __init__(self, router: str, key: SigningKey | None = None, user: str = "", token: Path | None = None) -> None:
        self.router, self.key, self._user, self._file = router, key, user, token
        self._lock = threading.Lock()
        self._made, self._bound, self._until = "", "", 0.0
        self._ahead_s: float | None = None

    @property
    def now(self) -> float:
        """Return the time of the routers, as far as it is known."""
        return time.time() + (self._ahead_s or 0.0)

    @property
    def is_corrected(self) -> bool:
        """Tell whether the clock of this machine differs from that of the routers."""
        return bool(self._ahead_s)

    def told(self, date: str) -> None:
        """Take the Date of an answer; the first one corrects the time."""
        if self._ahead_s is not None:
            return
        from email.utils import parsedate_to_datetime

        try:
            ahead_s = parsedate_to_datetime(date).timestamp() - time.time()
        except (TypeError, ValueError):
            return
        with self._lock:
            self._ahead_s = ahead_s if abs(ahead_s) > _LEAST_OFF_S else 0.0
            if self._ahead_s:
                self._until = 0.0

    def authorization(self) -> str:
        """Return the value of the field. :raises TransferFailure: CREDENTIAL_MISSING."""
        with self._lock:
            if self.key is not None:
                if time.time() >= self._until:
                    claims: dict[str, object] = {"iat": int(self.now)}
                    if self._file is not None:
                        claims["delegated"] = self._bound = read_token(self._file)
                    self._made = self._signed(claims, self.router, _LASTS_S)
                    self._until = time.time() + _LASTS_S - _ANEW_S
            elif self._file is not None and not self._made:
                self._made = read_token(self._file)
            return f"Bearer {self._made}" if self._made else ""

    def refused(self) -> bool:
        """A router has refused the token. Return whether another one may be tried: the file has another one now, or the
        time in it was wrong.
        """
        with self._lock:
            if self.key is not None or self._file is None:
                is_wrong, self._until = self._until == 0.0 and self.key is not None, 0.0
                return is_wrong or (self._file is not None and read_token(self._file) != self._bound)
            before, self._made = self._made, read_token(self._file)
            return self._made != before

    def relay_authorization(self, relay: Address, to: Address) -> str:
        """Return the field for one connection through a relay. :raises TransferFailure: CREDENTIAL_MISSING."""
        if self.key is None:
            words = f"the relay {relay} needs a token of your own: name your key file (--key)"
            raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, words, str(relay))
        # to parts of a second: a relay refuses what was made before it started
        claims = {"iat": self.now, "jti": secrets.token_hex(16), "scope": f"relay:{to}".lower()}
        return f"Bearer {self._signed(claims, relay.host, _RELAY_S)}"

    def sign(self, kind: str, payload: bytes) -> str:
        """Sign a payload of an operation; "" without a key."""
        if self.key is None:
            return ""
        from stageout.overlay.http.signing import sign

        return sign(kind, payload, self.key)

    def _signed(self, claims: dict[str, object], audience: str, lasts_s: int) -> str:
        assert self.key is not None
        now = int(self.now)
        said = {"iss": self._user, "sub": self._user, "aud": audience, "nbf": now, "exp": now + lasts_s, **claims}
        signed = f"{_text(_json({'alg': 'EdDSA', 'typ': 'JWT'}))}.{_text(_json(said))}"
        return f"{signed}.{_text(self.key.sign_bytes(signed.encode()))}"


def read_key(path: Path) -> SigningKey | None:
    """Read a private key of ``stageout token``; None for a file that is no such key.

    :raises TransferFailure: CREDENTIAL_MISSING: it cannot be read, or others can read it.
    """
    from stageout.core.signing import KeyUnusable, key_of

    try:
        text, mode = path.read_text(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", "") or str(problem)
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"{path}: {why} (--key)") from None
    if not text.startswith("{"):
        return None
    if mode & 0o077:
        words = f"{path}: other users can read this key: chmod 600 it, or replace it"
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, words)
    try:
        return key_of(str(json.loads(text)["private"]))
    except (KeyUnusable, ValueError, KeyError, TypeError) as problem:
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"{path}: no key of 'stageout token': {problem}") from None


def read_token(path: Path) -> str:
    """Read a bearer token. :raises TransferFailure: CREDENTIAL_MISSING."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", "") or str(problem)
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"{path}: {why} (--token)") from None
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"{path}: one token stands in this file, and nothing else")
    return text


def is_bound(token: str) -> bool:
    """Tell whether a token counts only together with a key (RFC 7800). Only the router verifies it."""
    body = token.split(".")[1] if token.count(".") == 2 else ""
    try:
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except ValueError:
        return False
    return isinstance(claims, dict) and "cnf" in claims


def _json(facts: dict[str, object]) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")
