"""A process that has as many files open as a busy daemon."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

#: From this number on ``select(2)`` takes no descriptor.
_TOO_MANY_FOR_SELECT = 1024


@contextmanager
def many_open() -> Iterator[None]:
    """A descriptor that is opened within has a number that ``select(2)`` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * _TOO_MANY_FOR_SELECT)), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        last = -1
        while last < _TOO_MANY_FOR_SELECT:
            last = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, last)
        yield
