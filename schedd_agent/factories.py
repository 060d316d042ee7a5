"""Limits of factories: a job that waits for its output takes no place of ``max_materialize``.

The schedd makes new jobs of a factory while its cluster has fewer than ``JobMaterializeLimit`` jobs in the queue,
completed ones included (``JobMaterializeTimerCallback`` in HTCondor's ``qmgmt.cpp``). The agent raises that limit by
the number of jobs that have ended and wait. The raised limit is an expression. It holds until the factory has made the
jobs for the free places. After that it equals the owner's limit, whether the agent runs or not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from stageout.core import log
from stageout.core.errors import StageoutError
from stageout.model.job import Job

_RAISED = re.compile(r"\(?JobMaterializeNextProcId < (\d+)\)? \? (\d+) : (\d+)")
#: For an edit of a cluster the schedd searches its whole queue. So the agent waits until one part in twenty is free.
_PART_FREE = 20


@dataclass(frozen=True)
class MaterializeLimit:
    """JobMaterializeLimit of a cluster.

    :param own: the owner's limit, in jobs.
    :param raised: the limit while the factory has made fewer than ``until`` jobs.
    """

    own: int
    until: int = 0
    raised: int = 0

    def __str__(self) -> str:
        """Return the attribute's text."""
        if not self.until:
            return str(self.own)
        return f"JobMaterializeNextProcId < {self.until} ? {self.raised} : {self.own}"


def read_limit(text: str) -> MaterializeLimit | None:
    """Read the attribute's text. Return None for an owner's expression, which the agent does not change."""
    if text.isdigit():
        return MaterializeLimit(int(text))
    found = _RAISED.fullmatch(text)
    if not found:
        return None
    until, raised, own = map(int, found.groups())
    return MaterializeLimit(own, until, raised)


@dataclass(frozen=True)
class Factory:
    """A cluster whose jobs the schedd makes one after the other.

    :param made: number of jobs made so far. :param total: number of all jobs, 0 when unknown.
    """

    cluster: int
    limit: MaterializeLimit
    made: int
    total: int = 0
    is_paused: bool = False

    @property
    def ends(self) -> bool:
        """Tell whether the limit has no effect: none is set, or the factory can make all its jobs."""
        return self.limit.own <= 0 or 0 < self.total <= max(self.made, self.limit.own)


def limit_for(factory: Factory, waiting: int, active: int) -> MaterializeLimit:
    """Return the limit that a factory should have now.

    :param waiting: its jobs that wait for their output. :param active: all others in the queue.
    """
    own = MaterializeLimit(factory.limit.own)
    if factory.ends or factory.is_paused or not waiting:
        return own
    free = own.own - active
    if free <= 0 or free * _PART_FREE < own.own:
        return factory.limit if factory.limit.until <= factory.made else own
    return MaterializeLimit(own.own, factory.made + free, own.own + waiting)


class FactoryQueue(Protocol):
    """The calls to a schedd that factories need. All block, and raise :class:`schedd_agent.queue.QueueError`."""

    def factories(self) -> list[Factory]:
        """Return all factories in the queue whose limit can be raised."""

    def procs(self, clusters: Collection[int]) -> list[tuple[int, int]]:
        """Return cluster and process of each job of these clusters."""

    def set_limit(self, cluster: int, limit: str) -> None:
        """Change the JobMaterializeLimit of a cluster's own ad. On return it is in the schedd's log."""


class FactoryLimits:
    """The limits of one schedd's factories."""

    def __init__(self, queue: FactoryQueue) -> None:
        self._queue = queue
        self._has_raised = True  # an earlier agent may have raised one
        self._refused: set[int] = set()

    def follow(self, jobs: Iterable[Job]) -> None:
        """Adapt all limits to the jobs in the queue.

        :param jobs: jobs in the queue, with all that wait for output. :raises QueueError: the schedd does not answer.
        """
        waiting = {(job.cluster, job.proc) for job in jobs if job.waits_in_factory}
        if not waiting and not self._has_raised:
            return
        clusters = {cluster for cluster, _ in waiting}
        factories = [one for one in self._queue.factories() if one.limit.until or one.cluster in clusters]
        self._has_raised = any(one.limit.until for one in factories)
        open_ones = {one.cluster for one in factories if one.cluster in clusters and not one.ends}
        procs = self._queue.procs(open_ones) if open_ones else []
        active = Counter(cluster for cluster, proc in procs if (cluster, proc) not in waiting)
        self._refused &= {one.cluster for one in factories}
        waits = Counter(cluster for cluster, _ in waiting)
        for one in factories:
            self._change(one, limit_for(one, waits[one.cluster], active[one.cluster]))

    def _change(self, factory: Factory, limit: MaterializeLimit) -> None:
        if limit == factory.limit:
            return
        self._has_raised = self._has_raised or limit.until > 0
        try:
            self._queue.set_limit(factory.cluster, str(limit))
        except StageoutError as problem:
            if factory.cluster not in self._refused:
                log.warn("factory-limit-refused", cluster=factory.cluster, limit=limit, problem=problem)
            self._refused.add(factory.cluster)
            return
        log.event("factory-limit-changed", cluster=factory.cluster, limit=limit)
