"""Waiting for sockets and pipes, however many a daemon has open."""

from __future__ import annotations

import select
from collections.abc import Iterable

_DAY_S = 86400.0


def readable(descriptors: Iterable[int], within_s: float) -> list[int]:
    """Return the sockets that become readable within so many seconds (at most a day).

    ``select.select`` does the same, but not for descriptors from 1024 on, which a busy daemon has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(min(within_s, _DAY_S) * 1000)]
