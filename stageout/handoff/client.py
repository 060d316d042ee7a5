"""The offer of a job's output to the sandbox manager of this node, while the job's slot waits.

Therefore it imports nothing and waits for nothing unless a manager has run here. Every error is returned as an answer,
never raised: the plugin then uploads by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stageout.handoff.place import Place, find

if TYPE_CHECKING:
    from stageout.handoff.connection import ManagerConnection
    from stageout.handoff.links import Source
    from stageout.wire.handoff import TransferContext

_ACCEPT_S = 30.0
#: Number of files that extend every limit by one second.
_FILES_PER_S = 1000


class Offer:
    """The outcome of an offer.

    :param accepted: the manager has custody: success may be reported. :param reason: why not, one sentence.
    :param receipt: attributes for ``DeveloperData.StageOutReceipt``, empty when not accepted.
    :param code: of the reason (:mod:`stageout.core.synchronous`), "" where there is none.
    """

    __slots__ = ("accepted", "code", "reason", "receipt")

    def __init__(self, accepted: bool, reason: str, receipt: Mapping[str, Any], code: str = "") -> None:
        self.accepted = accepted
        self.reason = reason
        self.receipt: Mapping[str, str | int] = receipt
        self.code = code


class Carried:
    """The data that accompanies the files.

    :param context: for the offer. :param contents: contents of its credentials, in their order.
    """

    __slots__ = ("contents", "context")

    def __init__(self, context: TransferContext, contents: Sequence[bytes]) -> None:
        self.context = context
        self.contents = contents


def offer(requests: Sequence[tuple[str, str]], plugin: str, carried: Carried | None = None) -> Offer:
    """Try to hand off all files of one upload call, or none.

    When the answer is ``accepted``, the manager's record (ACCEPTED) is durable.

    :param requests: (URL, absolute local path) of each file. :param plugin: path of the plugin executable.
    :param carried: data that the plugin will need in addition to the files.
    """
    if "STAGEOUT_MOVER" in os.environ:
        return Offer(False, "this is the sandbox manager's own transfer", {})
    try:
        where = find(requests[0][1]) if requests else None
        if where is None:
            return Offer(False, "there is no sandbox manager for this execute directory", {}, "NoManager")
        return Offer(True, "", _hand_off(where, requests, plugin, carried))
    except Exception as problem:
        reason = str(problem) or f"the hand-off failed: {type(problem).__name__}"
        return Offer(False, reason, {}, getattr(problem, "code", ""))


def _hand_off(
    where: Place, requests: Sequence[tuple[str, str]], plugin: str, carried: Carried | None
) -> Mapping[str, Any]:
    from stageout.handoff import connection, links
    from stageout.wire import handoff as wire

    manager = connection.ManagerConnection(where)
    try:
        found = links.sources([path for _, path in requests], where.scratch)
        files = [wire.OfferedFile(url, path, item.size_bytes) for (url, path), item in zip(requests, found)]
        manager.extend(len(files) / _FILES_PER_S / 10)
        context = carried.context if carried else wire.TransferContext()
        go = manager.ask(list(wire.offer_frames(files, plugin, context)), "go")
        bring(manager, found, str(go["directory"]))
        links.write_credentials(carried.contents if carried else (), str(go["directory"]))
        manager.limit(_ACCEPT_S + len(files) / _FILES_PER_S, "it accepted the files")
        accepted = manager.ask([{"op": "linked", "files": len(files)}], "accepted")
        return wire.accepted_receipt(accepted).as_attributes()
    finally:
        manager.close()


def bring(manager: ManagerConnection, found: Sequence[Source], directory: str) -> None:
    """Move the files into the manager's directory, each step within a time limit, so that a hanging disk frees the
    slot.

    :raises stageout.handoff.connection.HandoffRefused: a step takes too long, or the manager has no room.
    :raises OSError: as links.bring.
    """
    from stageout.handoff import links
    from stageout.handoff.connection import HandoffRefused

    limit_s = _ACCEPT_S + len(found) / _FILES_PER_S
    latest_s = time.monotonic() + limit_s

    def progress() -> None:
        if time.monotonic() > latest_s:
            raise HandoffRefused(f"the files could not be linked within {limit_s:.0f} s", "ManagerSlow")
        manager.tell({"op": "linking"})

    rest = links.bring(found, directory, progress)
    if rest:
        _copy(manager, found, rest, directory)


def _copy(manager: ManagerConnection, found: Sequence[Source], positions: Sequence[int], directory: str) -> None:
    """Copy the files that cannot be linked, if the manager has room, within its time limit."""
    from stageout.handoff import links

    manager.limit(_ACCEPT_S, "it made room for a copy")
    go = manager.ask([{"op": "copy", "size_bytes": sum(found[item].size_bytes for item in positions)}], "go")
    try:
        links.copy(found, positions, directory, float(go["within_s"]), lambda: manager.tell({"op": "linking"}))
    except links.TooSlow:
        manager.ask([{"op": "too-slow"}], "refuse")  # raises the answer's reason
