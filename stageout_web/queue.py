"""The job queue: how many jobs run, and one job when a reader asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from stageout.condor.limits import SCHEDD_S
from stageout.condor.query_child import QueryChild
from stageout.core.children import module_command

#: Largest share of the time that queries of the whole queue may take, and bounds of the pause between two.
_SHARE = 0.01
_LEAST_S, _MOST_S = 5.0, 60.0
_LINE_BYTES = 1 << 20
#: A job that was looked up is not queried again for so long (s).
_REMEMBER_S = 5.0
_JOBS_REMEMBERED = 200
_MOST_WAITING = 4


class QueueError(Exception):
    """The schedd does not answer; the text says why."""


class RequestRefused(Exception):
    """The schedd has not taken a request; the text says why."""


class JobQueue(QueryChild):
    """The schedd of this machine, queried by a child process. :param clock_s: a monotonic clock."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(module_command("stageout_web.queue_child"), "schedd", QueueError, SCHEDD_S, _LINE_BYTES)
        self._clock_s = clock_s
        self._counts: Mapping[str, int] = {}
        self._counts_s = float("-inf")
        self._waiting = 0
        self._jobs: dict[tuple[int, int], tuple[float, Mapping[str, Any] | None]] = {}

    async def counts(self) -> Mapping[str, int]:
        """Return the jobs in each status, as they were some seconds ago. :raises QueueError: there is no answer."""
        start_s = self._clock_s()
        if start_s >= self._counts_s:
            self._counts_s = start_s + _LEAST_S
            self._counts = dict((await self._ask({"op": "counts"}))["counts"])
            took_s = self._clock_s() - start_s
            self._counts_s = start_s + min(_MOST_S, max(_LEAST_S, took_s / _SHARE))
        return self._counts

    async def job(self, cluster: int, proc: int) -> Mapping[str, Any] | None:
        """Return the ad of a job in the queue; None if it is not there. :raises QueueError: there is no answer."""
        now_s = self._clock_s()
        self._jobs = {key: found for key, found in self._jobs.items() if now_s - found[0] < _REMEMBER_S}
        known = self._jobs.get((cluster, proc))
        if known is None:
            if self._waiting >= _MOST_WAITING or len(self._jobs) >= _JOBS_REMEMBERED:
                raise QueueError("other readers wait for the schedd: try again in some seconds")
            self._waiting += 1
            try:
                answer = await self._ask({"op": "job", "cluster": cluster, "proc": proc})
            finally:
                self._waiting -= 1
            known = now_s, next(iter(answer["jobs"]), None)
            self._jobs[cluster, proc] = known
        return known[1]

    async def request(self, cluster: int, proc: int, run: int, user: str, request: str, by: str) -> None:
        """Write a request into the ad of a user's job, after who asked for it. On return it is in the schedd's log.

        :param run: the last one. :param by: who asks, and why; the job's log gets it, too.
        :raises RequestRefused: the job is not there in this run, has another request, or this daemon may not write.
        :raises QueueError: there is no answer, and the request may have been written.
        """
        question = {"op": "request", "cluster": cluster, "proc": proc, "run": run, "user": user, "request": request,
                    "by": by}  # fmt: skip
        answer = await self._ask(question)
        self._jobs.pop((cluster, proc), None)
        if answer["refused"]:
            raise RequestRefused(str(answer["refused"]))
