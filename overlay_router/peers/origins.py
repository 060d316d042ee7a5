"""Owners of origins: the same digits said with two keys are two origins.

A peer can therefore do nothing about operations that came with another key: neither read their results, nor cancel or
settle them, nor have an operation of the same number executed in their place. The first router on the way of an
operation makes its identity out of key and digits (:func:`known_as`). Custodians hand that identity on, and a router
takes it as it is from the key of another router: so an operation that comes by several custodians is one operation.

An operation with a capability belongs to the holder, who has signed its digits: its identity is made out of his public
key and these digits. So it is one operation whoever brings it, and executed once. Custodians hand it on under the
digits themselves. STATUS, CANCEL and LOW are not signed; :mod:`overlay_router.peers.brought` knows which operations a
peer means by them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, TypeVar, cast

from overlay_router.peers.keys import Key
from stageout.overlay.wire.capability import holder_of
from stageout.overlay.wire.messages import Message, Open, Operation, Pack

M = TypeVar("M", bound=Message)
S = TypeVar("S", Open, Operation, Pack)
_DIGEST_BYTES = 16
#: More than the digits that any peer can say (:func:`stageout.overlay.wire.fields.is_origin`).
_SIGNED_BYTES = 20


def known_as(key: Key, origin: str) -> str:
    """Return the 32 digits under which a router knows an origin that somebody names with that key."""
    if key.is_router:
        return origin
    return hashlib.blake2b(f"{key.name}/{origin}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def signed_as(capability: str, origin: str) -> str:
    """Return the 40 digits under which a router knows an origin of a holder. :param capability: was checked."""
    name = f"{holder_of(capability)}/{origin}"
    return hashlib.blake2b(name.encode(), digest_size=_SIGNED_BYTES).hexdigest()


def is_signed(known: str) -> bool:
    """Tell whether an origin, as this router knows it, is that of a holder of a capability."""
    return len(known) == 2 * _SIGNED_BYTES


def as_known(message: M, key: Key) -> M:
    """Return a message that was said with that key, as this router knows its origin."""
    return with_origin(message, _known(message, key))


def _known(message: Message, key: Key) -> str:
    if isinstance(message, (Open, Operation, Pack)) and message.capability:
        return signed_as(message.capability, message.origin)
    return known_as(key, message.origin)  # type: ignore[union-attr]


def with_origin(message: M, origin: str) -> M:
    """Return a message about another origin."""
    changed: Any = message
    return cast("M", replace(changed, origin=origin))


def said_as(sender: str) -> str:
    """Return the origin as a sender (``KEY/ORIGIN``) says it."""
    return sender.rpartition("/")[2]


def as_said(message: M, sender: str) -> M:
    """Return a message for a peer (``KEY/ORIGIN``), with the origin as that says it."""
    known = getattr(message, "origin", "")
    return message if known in ("", said_as(sender)) else with_origin(message, said_as(sender))


def as_handed_on(message: S, sender: str) -> S:
    """Return what ``sender`` has brought as the next router is to hear it."""
    return with_origin(message, said_as(sender)) if message.capability else message


def owner_of(capability: str, sender: str) -> str:
    """The holder of the capability of an operation; without one the name of the key that brought it.

    :param capability: was checked. :param sender: ``KEY/ORIGIN``.
    """
    return holder_of(capability) if capability else sender.partition("/")[0]


def same_owner(known: str, sender: str, peer: str) -> bool:
    """Tell whether two peers (``KEY/ORIGIN``) bring an operation for the same owner.

    :param known: origin of the operation, as this router knows it.
    """
    return is_signed(known) or sender.partition("/")[0] == peer.partition("/")[0]
