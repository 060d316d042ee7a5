"""Owners of origins: the same digits said with two keys are two origins.

A peer can therefore do nothing about operations that came with another key: neither read their results, nor cancel or
settle them, nor have an operation of the same number executed in their place. The first router on the way of an
operation makes its identity out of key and digits (:func:`known_as`). Custodians hand that identity on, and a router
takes it as it is from the key of another router: so an operation that comes by several custodians is one operation.
A capability signs the digits themselves; operations with one are handed on under these.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, TypeVar, cast

from overlay_router.peers.keys import Key
from stageout.overlay.wire.messages import Message, Open, Operation, Pack

M = TypeVar("M", bound=Message)
S = TypeVar("S", Open, Operation, Pack)
_DIGEST_BYTES = 16


def known_as(key: Key, origin: str) -> str:
    """Return the 32 digits under which a router knows an origin that somebody names with that key."""
    if key.is_router:
        return origin
    return hashlib.blake2b(f"{key.name}/{origin}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def as_known(message: M, key: Key) -> M:
    """Return a message that was said with that key, as this router knows its origin."""
    return _with(message, known_as(key, message.origin))  # type: ignore[union-attr]


def said_as(sender: str) -> str:
    """Return the origin as a sender (``KEY/ORIGIN``) says it."""
    return sender.rpartition("/")[2]


def as_said(message: M, sender: str) -> M:
    """Return a message for a peer (``KEY/ORIGIN``), with the origin as that says it."""
    known = getattr(message, "origin", "")
    return message if known in ("", said_as(sender)) else _with(message, said_as(sender))


def as_handed_on(message: S, sender: str) -> S:
    """Return what ``sender`` has brought as the next router is to hear it."""
    return _with(message, said_as(sender)) if message.capability else message


def _with(message: M, origin: str) -> M:
    changed: Any = message
    return cast("M", replace(changed, origin=origin))
