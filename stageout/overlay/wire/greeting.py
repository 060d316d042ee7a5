"""The greeting as the side that connects sees it: what it offers, and whether the answer proves the key. No I/O."""

from __future__ import annotations

import hmac
import os
import time

from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.frames import BadFrame
from stageout.overlay.wire.messages import Hello, Prove, Welcome


class WrongKey(BadFrame):
    """The side that was connected to does not have the key."""


#: Digests of blocks that nobody can find other data for; others are faster, and find accidents only.
SAFE_DIGESTS = ("blake2b-128",)


def offer(node: str, key_name: str, digests: tuple[str, ...] = ()) -> Hello:
    """HELLO of a party, with a nonce of its own. :param digests: that it wants, best first; () for all that it has."""
    checksums, digests = tuple(frames.checksums()), digests or tuple(frames.digests())
    return Hello(node, os.urandom(16).hex(), checksums, digests, int(time.time()), key_name)


def accept(hello: Hello, welcome: Welcome, secret: bytes) -> Prove:
    """The answer to WELCOME.

    :raises BadFrame: it chose what was not offered. :raises WrongKey: its proof is not one.
    """
    if welcome.checksum not in hello.checksums or welcome.digest not in hello.digests:
        raise BadFrame("the router chose a checksum that was not offered")
    right = messages.proof(secret, "welcome", hello, welcome)
    if not welcome.proof.isascii() or not hmac.compare_digest(welcome.proof, right):
        raise WrongKey(f"the router does not have the key {hello.key!r} with this secret: compare both sides' files")
    return Prove(messages.proof(secret, "hello", hello, welcome))
