"""Directories that a custodian is to make, where nobody waits for that."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import islice

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import outcomes
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.wire.messages import Custody, Operation, Result
from stageout.overlay.wire.route import Route
from stageout.wire.deposits import EXPIRES_AFTER_S

#: Said before the first answer is read.
_TOGETHER = 8
_TRIES = 3
_AGAIN_S = 1.0


def deposit_directories(
    gateway: Gateway,
    paths: Sequence[str],
    *,
    terminal: str,
    expires_after_s: float = EXPIRES_AFTER_S,
    routes: Sequence[Route] = ((),),
) -> tuple[str, dict[str, TransferFailure]]:
    """Have a custodian make directories at a terminal, with those above them; one that is there stays as it is.

    On return those without a failure are durable at the custodian as operations, or made.

    :param gateway: the custodian. :param paths: below the terminal's root, each once. :param routes: to the custodian.
    :param expires_after_s: the time after which nobody tries to make them any more.
    :returns: the origin, whose numbers 1, 2, ... are the paths in order, and failures by path.
    :raises TransferFailure: the custodian cannot be reached; some of them may be made.
    """
    expires, origin = int(time.time() + expires_after_s), os.urandom(16).hex()
    waiting = {
        seq: Operation(
            origin, seq, "mkdir", path, expires, parents=True, mode=0o755, terminal=terminal, release="custody",
            may_exist=True,
        )
        for seq, path in enumerate(paths, 1)
    }  # fmt: skip
    failures: dict[str, TransferFailure] = {}
    for left in reversed(range(_TRIES * len(routes))):
        try:
            with Channel(gateway, routes[left % len(routes)]) as channel:
                _say(channel, waiting, failures)
            break
        except TransferFailure as failure:
            if failure.kind not in outcomes.RESUMABLE or not left:
                raise
            time.sleep(_AGAIN_S)
    return origin, failures


def _say(channel: Channel, waiting: dict[int, Operation], failures: dict[str, TransferFailure]) -> None:
    """Until all that wait are answered."""
    while waiting:
        said = set(islice(waiting, _TOGETHER))
        for seq in said:
            channel.send(waiting[seq])
        while said:
            answer = channel.receive()
            if not isinstance(answer, (Custody, Result)):
                raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where CUSTODY was due")
            said.discard(answer.seq)
            operation = waiting.pop(answer.seq, None)  # none: its result, behind its CUSTODY
            if operation is not None and isinstance(answer, Result):
                failure = outcomes.failure(answer, operation.path, channel.gateway.server)
                failures.update({operation.path: failure} if failure else {})
