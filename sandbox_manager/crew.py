"""Short work for one thread, taken along in groups: each hop between the event loop and a thread costs as much as the
work itself when that is a rename or two."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _Answer(asyncio.Future[T]):
    """Waiting for it cannot be broken off: a task that is cancelled meanwhile goes on when the work is done."""

    def cancel(self, msg: Any = None) -> bool:
        """Not now; the task tries again when it goes on."""
        return False


class _Job:
    """A call, and what came of it."""

    __slots__ = ("answer", "error", "result", "work")

    def __init__(self, work: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self.work = work
        self.answer = answer
        self.result: Any = None
        self.error: Exception | None = None

    def do(self) -> None:
        """In the thread."""
        try:
            self.result = self.work()
        except Exception as problem:
            self.error = problem

    def tell(self) -> None:
        """In the loop."""
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.result)


class Crew:
    """An executor that runs calls in their order. Use from one event loop.

    :param executor: of one thread.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._jobs: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._is_called = self._is_told = False

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """The answer of ``work``, or what it raises. Who waits for it is cancelled only when the work is done."""
        loop = asyncio.get_running_loop()
        answer: _Answer[T] = _Answer(loop=loop)
        self._jobs.append(_Job(work, answer))
        if not self._is_called:
            self._is_called = True
            loop.run_in_executor(self._executor, self._work, loop)
        return answer

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_called = False  # before looking: whoever comes from now on calls again
        while self._jobs:
            job = self._jobs.popleft()
            job.do()
            self._done.append(job)
            if not self._is_told:
                self._is_told = True
                loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_told = False
        while self._done:
            self._done.popleft().tell()
