"""Bounded pool of threads that make pages and lists, so that a slow one holds up no other answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Busy(Exception):
    """Too many readers wait for something that takes long."""


class Work:
    """The pool. Equal questions at the same time have one answer.

    :param threads: that work at the same time. :param most: questions that are worked on or wait.
    """

    def __init__(self, threads: int = 2, most: int = 64) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(threads, "page")
        self._running: dict[Hashable, asyncio.Future[Any]] = {}

    async def do(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, or raise its exception. A reader who leaves ends it for no other one.

        :raises Busy: too many questions wait.
        """
        found = self._running.get(key)
        if found is None:
            if len(self._running) >= self._most:
                raise Busy
            found = self._running[key] = asyncio.get_running_loop().run_in_executor(self._pool, make)
            found.add_done_callback(lambda done: self._forget(key, done))
        return cast(T, await asyncio.shield(found))

    def _forget(self, key: Hashable, done: asyncio.Future[Any]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # all its readers may have left

    def close(self) -> None:
        """End the pool. Questions that wait have no answer."""
        self._pool.shutdown(wait=False, cancel_futures=True)
