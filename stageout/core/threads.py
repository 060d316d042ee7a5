"""Threads of a process that may have no more of them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

#: Advice for a process at its limit of threads.
NO_MORE = "this process has as many threads as it may: allow it more (TasksMax of the unit, ulimit -u), or memory"


class NoThread(OSError):
    """A thread could not be started; its errno is EAGAIN."""


def started(target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a thread that does not keep the process from ending. :raises NoThread: no thread can be started now."""
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise NoThread(errno.EAGAIN, NO_MORE) from None
    return thread
