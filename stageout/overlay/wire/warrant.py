"""Warrants: what lets one router write one file at another in the name of somebody else. See docs/developer/wire.md.

A warrant is a text, ``BODY.SIGNATURE``: base64url of a JSON object that names the file, the router that may bring it
and the store that it is for, signed by who commands the copy: with the shared key by which that store knows him
(HMAC-SHA-256), or as the holder of a capability (Ed25519). Another holder can do nothing with it, and the router that
it names can do nothing with it but write this file there, once.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stageout.core.signing import SigningKey
from stageout.overlay.wire.fields import MAX_NUMBER, MAX_PATH_BYTES
from stageout.overlay.wire.messages import Open, Operation

KIND = "OverlayWarrant"
_OPENED = ("origin", "seq", "path", "size_bytes", "expires")
_PUBLISHED = (*_OPENED, "mode", "absent", "generation")


class BadWarrant(ValueError):
    """A text is no warrant, or not for what is asked; the words are for who commanded the copy."""


@dataclass(frozen=True)
class Warrant:
    """One file that one router may bring.

    :param key: name of the key that it is signed with, "" for the holder of a capability. :param bearer: name of the
        key by which the store knows the router that may use it. :param store: epoch of the store that it is for.
    """

    key: str
    bearer: str
    store: str
    origin: str
    seq: int
    path: str
    size_bytes: int
    expires: int
    mode: int
    absent: bool = False
    generation: int = -1


def write(warrant: Warrant, signer: bytes | SigningKey) -> str:
    """The text of a warrant. :param signer: the shared key, or that of a capability's holder."""
    body = json.dumps(asdict(warrant), separators=(",", ":"))
    signature = signer.sign(KIND, body) if isinstance(signer, SigningKey) else keyed(signer, body)
    return f"{base64.urlsafe_b64encode(body.encode()).decode()}.{signature}"


def read(text: str) -> tuple[Warrant, str, str]:
    """A warrant, its body and its signature, which the caller checks. :raises BadWarrant: it is none."""
    encoded, _, signature = text.partition(".")
    try:
        body = base64.b64decode(encoded, altchars=b"-_", validate=True).decode()
        return _warrant(json.loads(body)), body, signature
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadWarrant("the warrant of this copy is damaged: command it again") from None


def keyed(secret: bytes, body: str) -> str:
    """The proof that the writer of a body has a shared key."""
    return hmac.new(secret, f"stageout {KIND}\n{body}".encode(), "sha256").hexdigest()


def check(warrant: Warrant, message: Open | Operation, bearer: str, store: str) -> None:
    """Tell whether a warrant is for what is asked here, by whom it is asked. :raises BadWarrant: it is not."""
    if warrant.bearer != bearer:
        raise BadWarrant(f"the warrant of this copy is for the router {warrant.bearer!r}, not for {bearer!r}")
    if warrant.store != store:
        raise BadWarrant("the warrant of this copy is for another router, or its records are new: command it again")
    if isinstance(message, Operation) and (message.kind != "publish" or message.priority or message.after):
        raise BadWarrant("a warrant is for one new file, and for nothing else")
    names = _PUBLISHED if isinstance(message, Operation) else _OPENED
    other = [name for name in names if getattr(message, name) != getattr(warrant, name)]
    if other or message.terminal:
        raise BadWarrant(f"the warrant of this copy is for another {', '.join(other) or 'terminal'}")


def _warrant(facts: Any) -> Warrant:
    """:raises ValueError: a field is of another kind or out of its range."""
    if not isinstance(facts, Mapping):
        raise ValueError
    found = Warrant(**{item.name: facts[item.name] for item in fields(Warrant)})
    texts = (found.key, found.bearer, found.store, found.origin, found.path)
    numbers = (found.seq, found.size_bytes, found.expires, found.mode, found.generation)
    if not all(isinstance(text, str) and len(text) <= MAX_PATH_BYTES for text in texts):
        raise ValueError
    if not all(type(number) is int and -1 <= number <= MAX_NUMBER for number in numbers):
        raise ValueError
    if type(found.absent) is not bool:
        raise ValueError
    return found
