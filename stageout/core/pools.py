"""Threads that wait for work, in a process that may have no more of them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from stageout.core.threads import NO_MORE, NoThread

T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Threads for work that must not be done twice.

    Work that finds no thread is refused: a ThreadPoolExecutor would keep it, and do it when nobody waits for it any
    more.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submit a call, as the base class does. :raises NoThread: no thread can be started now."""
        answer = Future[T]()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as problem:  # the exception is in the future
                answer.set_exception(problem)
            else:
                answer.set_result(result)

        try:
            super().submit(work)
        except RuntimeError as problem:
            if answer.cancel():  # else one of the others has just taken it
                raise NoThread(errno.EAGAIN, NO_MORE) from problem
        return answer
