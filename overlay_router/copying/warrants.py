"""Whether a router may write a file here for somebody else: his right is judged, not that of the router."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from overlay_router.peers.keys import Key
from overlay_router.peers.rights import Rights, outside
from stageout.overlay.wire import capability, warrant
from stageout.overlay.wire.capability import BadCapability
from stageout.overlay.wire.messages import Open, Operation
from stageout.overlay.wire.warrant import BadWarrant, Warrant


def refusal(
    message: Open | Operation, bearer: Key, keys: Mapping[str, Key], rights: Rights, store: str, now: int
) -> str:
    """Return why a router may not write this with the warrant that it shows, "" if it may.

    :param bearer: key of the router. :param keys: by name. :param store: epoch of the store here.
    """
    try:
        found, body, signature = warrant.read(message.warrant)
        warrant.check(found, message, bearer.name, store)
        if message.capability:
            signed = warrant.KIND, body, signature
            capability.allow(message, rights.issuers, rights.address, now, signed=signed)
            return ""
    except (BadWarrant, BadCapability) as problem:
        return str(problem)
    if rights.insists:
        return "this router takes nothing without a capability: command the copy with one"
    return _keyed(found, body, signature, keys)


def _keyed(found: Warrant, body: str, signature: str, keys: Mapping[str, Key]) -> str:
    key = keys.get(found.key) if signature.isascii() else None
    if key is None or not hmac.compare_digest(signature, warrant.keyed(key.secret, body)):
        return f"the warrant of this copy was not signed with a key {found.key!r} that is known here"
    return "" if key.allows(found.path) else outside(key, found.path)
