"""The facts that the order for a delivery has about an operation, its data and the records of the next hop."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from overlay_router.custodians.custodian import Custodian
from overlay_router.custodians.spool import Begun, Held
from overlay_router.local.replies import Reply
from overlay_router.peers.origins import as_handed_on
from overlay_router.rules.states import Outcome, Result
from stageout.overlay.wire.messages import Open, Operation
from stageout.overlay.wire.route import next_hop

Digested = tuple[int, bytes]


@dataclass(frozen=True)
class Facts:
    """The facts of an operation for its order.

    :param blocks: with their digests, those that are here. :param passed: those that only the next hop has.
    :param said_to: the next hop's records that it may have been said to before; None: it was not.
    :param store: those that it may be said to now, as is recorded. :param is_late: it has expired: it is asked about.
    :param low: as of :func:`settled_before`.
    """

    file: str
    blocks: list[Digested]
    passed: list[Digested]
    operation: Operation
    said_to: str | None
    store: str | None
    is_late: bool
    low: int = 0


def facts_of(custodian: Custodian, held: Held, known: str | None, now: float) -> Facts | list[Reply]:
    """Those of an order; what is to be said when there is none, because the operation has its end.

    A file that will be said to records which are known is recorded as said to them; else the process that delivers asks
    for that when it has met them (:func:`may_say`).

    :param known: the records that the next hop had the last time. :param now: Unix time in seconds.
    """
    operation = held.operation
    if not custodian.has(held):
        return []
    after = before(custodian, operation)
    if after is None:
        return custodian.settle(held.key, Result(Outcome.FAILED, "dependency"))
    said_to = store = custodian.said.to(held.key)
    is_late = custodian.said.is_asked_about(held, now)
    is_sent = not (held.stands_by(now) or is_late or held.damaged or held.key in custodian.cancelled)
    if said_to is None and held.tid and is_sent:
        store = known
    if store is not None:
        custodian.said.say(held.key, store)
    file = "" if held.damaged else custodian.file(held)
    low = settled_before(custodian, operation)
    return Facts(file, *custodian.blocks(held), replace(operation, after=after), said_to, store, is_late, low)


def before(custodian: Custodian, operation: Operation) -> tuple[int, ...] | None:
    """Of ``after``, what has no end that is recorded here: a terminal that has lost its records knows of none.

    None: one of them has failed, so this one fails. The text that its origin has signed stands as it is.
    """
    known = {seq: custodian.result(operation.origin, seq) for seq in operation.after}
    if any(one is not None and one.outcome == "failed" for one in known.values()):
        return None
    return tuple(seq for seq, one in known.items() if one is None or operation.capability)


def settled_before(custodian: Custodian, operation: Operation) -> int:
    """The number up to which all of its origin have their end here, with some that a signed operation waits for.

    A terminal that knows nothing of these would have it wait until it expires. 0: nothing can be said of them.
    """
    origin, after = operation.origin, operation.after if operation.capability else ()
    low = max((seq for seq in after if custodian.result(origin, seq) is not None), default=0)
    first = min(custodian.settled_up_to(origin), low) + 1
    return low if all(custodian.result(origin, seq) is not None for seq in range(first, low)) else 0


def may_say(custodian: Custodian, held: Held, store: str) -> bool:
    """Tell whether an operation may be said to these records, which is recorded then: it is in custody still."""
    if custodian.has(held):
        custodian.said.say(held.key, store)
        return True
    return False


def onward(operation: Operation, sender: str) -> Operation:
    """As the next hop hears it."""
    terminal, said = next_hop(operation.terminal)[1], as_handed_on(operation, sender)
    return replace(said, terminal=terminal, release="delivered", tid=0, standby_s=0, copies=1)


def opening_of(asked: Open | None, sender: str) -> str:
    """The OPEN of its sender as the next hop hears it, as JSON; "" without one."""
    if asked is None:
        return ""
    terminal, said = next_hop(asked.terminal)[1], as_handed_on(asked, sender)
    return json.dumps(asdict(replace(said, terminal=terminal, standby_s=0, release="delivered")))


def named(blocks: Iterable[Digested]) -> list[list[Any]]:
    """Blocks as they are written into an order."""
    return [[block, digest.hex()] for block, digest in blocks]


def hop_of(message: Open | Operation | Begun) -> str:
    """Address of the next hop."""
    return next_hop(message.terminal)[0]
