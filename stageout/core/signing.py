"""Ed25519 keys of the daemons: who wrote a report or an order, and that nobody changed it since.

A public key is the text ``ed25519:`` and 43 characters of base64url; a signature is base64url. The signature covers the
kind of message and its exact text, so that no message can be shown as one of another kind. ``cryptography`` is imported
only where a key is used: plugins never load it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stageout.core.errors import StageoutError, is_disk_full

_SCHEME = "ed25519:"
_VOUCH = "StageOutSuccessor"
_VOUCHES_KEPT = 8


class BadSignature(Exception):
    """A signature is missing, malformed or not of this key; the text says which."""


class KeyUnusable(StageoutError):
    """A key file cannot be used; the text says what to do."""


class Vouch(NamedTuple):
    """The word of an old key for its successor."""

    old: str
    new: str
    signature: str


class SigningKey:
    """A private key with what its predecessors said for it.

    :param private: 32 bytes. :param vouches: oldest first, each for the next.
    """

    def __init__(self, private: bytes, vouches: Iterable[Vouch] = ()) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._private = private
        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.vouches = tuple(vouches)
        self.public = _SCHEME + _text(self._key.public_key().public_bytes_raw())

    @property
    def private(self) -> str:
        """The private key as text, for :func:`key_of`."""
        return _text(self._private)

    def sign(self, kind: str, text: str) -> str:
        """Sign a message. :param kind: of message, such as the MyType of its ad."""
        return _text(self.sign_bytes(_signed_bytes(kind, text)))

    def sign_bytes(self, data: bytes) -> bytes:
        """Sign bytes whose form keeps uses apart by itself, as that of a JWS with a type."""
        return self._key.sign(data)

    def successor(self) -> SigningKey:
        """Make a new key, and vouch for it with this one."""
        new = _new_private()
        vouch = Vouch(self.public, SigningKey(new).public, "")
        vouch = vouch._replace(signature=self.sign(_VOUCH, vouch.new))
        return SigningKey(new, [*self.vouches, vouch][-_VOUCHES_KEPT:])

    def store(self, label: str, path: Path) -> None:
        """Replace the key file, for its owner alone. On return it is on the disk. :raises OSError: it is not."""
        from stageout.core import durable  # with a database, and all that: who only sends a file stores no key

        facts = {"private": _text(self._private), "vouches": [list(vouch) for vouch in self.vouches]}
        durable.write_file(label, path, json.dumps(facts).encode("ascii"), 0o600)


def new_key() -> SigningKey:
    """Make a key that is kept nowhere. :raises KeyUnusable: ``cryptography`` is not installed."""
    try:
        return SigningKey(_new_private())
    except ImportError:
        raise _no_cryptography() from None


def key_of(private: str) -> SigningKey:
    """Read the key in a text of :attr:`SigningKey.private`. :raises KeyUnusable: the text is no key."""
    try:
        return SigningKey(_bytes(private))
    except ImportError:
        raise _no_cryptography() from None
    except ValueError:
        raise KeyUnusable("a private key is damaged: ask for another") from None


def load_key(path: Path) -> SigningKey | None:
    """Load the key in a file. Return None where there is no file.

    :raises KeyUnusable: it cannot be read, is readable by others, or is no key.
    """
    from stageout.core import durable

    try:
        mode = durable.disk.stat(path).st_mode
        facts = json.loads(durable.read_file(path))
        key = SigningKey(_bytes(facts["private"]), [Vouch(*map(str, row)) for row in facts["vouches"]])
    except FileNotFoundError:
        return None
    except ImportError:
        raise _no_cryptography() from None
    except PermissionError:
        raise KeyUnusable(f"the key {path} is not for this user to read: run this as its owner, or as root") from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise KeyUnusable(f"the key {path} cannot be used ({problem}); put it back from a backup, or remove it: "
                        "a new one is then made, see docs/administrator/security.md, \"Keys\"") from None  # fmt: skip
    if mode & 0o077:
        raise KeyUnusable(
            f"the key {path} can be read by others (mode {mode & 0o777:04o}): chmod 600 it, or replace it"
        )
    return key


def load_or_make_key(label: str, path: Path) -> SigningKey:
    """Load the key in a file, or make it at the first start. On return it is on the disk.

    :param label: of the durable step. :raises KeyUnusable: it cannot be read, made or stored.
    """
    key = load_key(path)
    if key is None:
        try:
            key = SigningKey(_new_private())
            key.store(label, path)
        except ImportError:
            raise _no_cryptography() from None
        except OSError as problem:
            error = KeyUnusable(f"the key {path} cannot be stored: {problem}; make room and allow it")
            error.is_temporary = is_disk_full(problem)
            raise error from None
    return key


def check(kind: str, text: str, signature: str, public: str) -> None:
    """Check that this key signed this message. :raises BadSignature: it did not."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not signature:
        raise BadSignature("it is not signed")
    try:
        if not public.startswith(_SCHEME):
            raise ValueError
        key = Ed25519PublicKey.from_public_bytes(_bytes(public[len(_SCHEME) :]))
        key.verify(_bytes(signature), _signed_bytes(kind, text))
    except (ValueError, binascii.Error):
        raise BadSignature(f"its signature or key {public[:60]!r} is malformed") from None
    except InvalidSignature:
        raise BadSignature(f"its signature is not that of {public}") from None


def succeeds(new: str, old: str, vouches: Iterable[Vouch]) -> bool:
    """Tell whether a chain of vouches leads from ``old`` to ``new``."""
    at = old
    for vouch in vouches:
        if vouch.old == at:
            try:
                check(_VOUCH, vouch.new, vouch.signature, vouch.old)
            except BadSignature:
                return False
            at = vouch.new
    return at == new


def _new_private() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


def _signed_bytes(kind: str, text: str) -> bytes:
    return f"stageout {kind}\n{text}".encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def _no_cryptography() -> KeyUnusable:
    return KeyUnusable("what is signed needs the Python package cryptography: install it (pip, dnf, apt)")
