"""Seconds without reports of managers, counted only while the agent could receive them. Uses the monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from stageout.model.run import name_of
from stageout.wire.custody import AD_LIFETIME_S, JobKey

#: Seconds after a restart of the collector in which every manager publishes again. A manager with output for an agent
#: does so several times in that agent's lease.
SETTLE_S = float(AD_LIFETIME_S)

_NAMES_KEPT = 10_000
OWN_POOL = ""
"""Name of the agent's own pool."""
#: Pool -> seconds for which the agent has watched it.
WatchedSeconds = Mapping[str, float]
T = TypeVar("T")


@dataclass
class _PoolLiveness:
    watched_s: float = 0.0
    last_look: float | None = None
    collector_age_s: float = 0.0
    settled_at_s: float = float("-inf")

    def record_snapshot(self, now_s: float, collector_age_s: float | None, hole_s: float, settle_s: float) -> None:
        if collector_age_s is None:  # its ad has expired, which is no restart
            collector_age_s = self.collector_age_s
        if collector_age_s < self.collector_age_s:
            self.settled_at_s = now_s + settle_s
        elif self.last_look is not None and now_s - self.last_look <= hole_s:
            self.watched_s += max(0.0, now_s - max(self.last_look, self.settled_at_s))
        self.last_look, self.collector_age_s = now_s, collector_age_s


class LivenessTracker:
    """Watched time of each pool, and the last sign of each manager in it.

    Silence of a manager is evidence only while its reports could have arrived. So watched time runs from one answer of
    the collector to the next. Time round a failed or late query, or after a restart of the collector, is not counted.
    Such a gap does not reset the count: a collector that fails now and then must not postpone a loss for ever.

    Each pool has its own watched time. The silence of a manager is measured in the pools that have reported it.

    :param hole_s: seconds between two answers that count as a gap. :param lease_s: silence that counts as a loss.
    """

    def __init__(self, hole_s: float, lease_s: float = float("inf")) -> None:
        self._hole_s = hole_s
        self._lease_s = lease_s
        self._pools: dict[str, _PoolLiveness] = {OWN_POOL: _PoolLiveness()}
        self._pools_of: dict[str, frozenset[str]] = {}
        self._seen_jobs: dict[tuple[str, JobKey], WatchedSeconds] = {}
        self._managers: dict[str, WatchedSeconds] = {}
        self._waiting: dict[tuple[JobKey, int], WatchedSeconds] = {}
        self._disputed: dict[str, WatchedSeconds] = {}
        self._ends: dict[str, tuple[int, WatchedSeconds, float]] = {}

    def set_lease(self, lease_s: float) -> None:
        """Take over a changed lease."""
        self._lease_s = lease_s

    def record_snapshot(
        self,
        now_s: float,
        collector_age_s: float | None,
        shown: Iterable[tuple[str, JobKey]],
        managers: Iterable[str] = (),
        pool: str = OWN_POOL,
    ) -> None:
        """Record an answer of a collector.

        :param collector_age_s: seconds since the collector's start. A smaller value means that it lost all ads,
            None says nothing.
        :param shown: (manager's identity, job) of every sandbox in the reports. :param managers: identities of all
            managers that have a report. :param pool: the collector's pool.
        """
        found = self._pools.setdefault(pool, _PoolLiveness())
        found.record_snapshot(now_s, collector_age_s, self._hole_s, min(SETTLE_S, self._lease_s))
        moment = self._moment()
        for key in shown:
            self._seen_jobs[key] = moment
        managers = list(managers)
        _remember(self._managers, managers, moment)
        for name in map(name_of, managers):
            _remember(self._pools_of, [name], self._pools_of.get(name, frozenset()) | {pool})

    def _moment(self) -> WatchedSeconds:
        return {name: pool.watched_s for name, pool in self._pools.items()}

    def _since(self, moment: WatchedSeconds, pools: Iterable[str] = ()) -> float:
        """Return the watched seconds since then, the least of all pools. :param pools: pools to use, none for all."""
        names = [name for name in pools if name in self._pools] or self._pools
        return min(self._pools[name].watched_s - moment.get(name, 0.0) for name in names)

    def _pools_for(self, manager: str, has_flocked: bool = True) -> Iterable[str]:
        """Return the pools that reported a manager. Without any: all, or the own one if the job never flocked."""
        return self._pools_of.get(name_of(manager)) or (() if has_flocked else (OWN_POOL,))

    def record_announced_end(self, manager: str, number: int, ends_in_s: float) -> None:
        """Record the end that a report announces. :param number: the report's. :param ends_in_s: 0 for none."""
        if not ends_in_s:
            self._ends.pop(manager, None)
        elif self._ends.get(manager, (0, 0.0))[0] != number:
            self._ends[manager] = number, self._moment(), ends_in_s
            while len(self._ends) > _NAMES_KEPT:
                del self._ends[next(iter(self._ends))]

    def has_ended(self, manager: str) -> bool:
        """Tell whether a manager's announced end has passed without a newer report. :param manager: its identity.

        Time counts from the answer that held the announcement, so the manager has ended by any clock.
        """
        found = self._ends.get(manager)
        return found is not None and self._since(found[1], self._pools_for(manager)) >= found[2]

    def restart_silence(self, names: Iterable[str]) -> None:
        """Start the silence of these managers anew, because several keys sign in their names."""
        _remember(self._disputed, names, self._moment())

    def record_failure(self, pool: str = OWN_POOL) -> None:
        """Record that a pool's collector did not answer."""
        self._pools.setdefault(pool, _PoolLiveness()).last_look = None

    def start_waiting(self, job: JobKey, run: int) -> None:
        """Record that a run waits for reports. Only the first call counts."""
        self._waiting.setdefault((job, run), self._moment())

    def waited_s(self, job: JobKey, run: int, has_flocked: bool = True) -> float:
        """Return the watched seconds for which a run has waited. :param has_flocked: it was in another pool."""
        waiting = self._waiting.get((job, run), self._moment())
        return self._since(waiting, () if has_flocked else (OWN_POOL,))

    def absent_s(self, manager: str, job: JobKey, run: int, has_flocked: bool = True) -> float:
        """Return the watched seconds without a report of the job's output. :param manager: an identity."""
        waiting = self._waiting.get((job, run), self._moment())
        heard = self._seen_jobs.get((manager, job), {}), self._disputed.get(name_of(manager), {})
        pools = self._pools_for(manager, has_flocked)
        return min(self._since(moment, pools) for moment in (waiting, *heard))

    def silent_s(self, manager: str) -> float:
        """Return the watched seconds without any report of a manager. :param manager: its identity."""
        heard = self._managers.get(manager, {}), self._disputed.get(name_of(manager), {})
        return min(self._since(moment, self._pools_for(manager)) for moment in heard)

    def keep_only(self, jobs: Set[JobKey]) -> None:
        """Forget all but these jobs."""
        self._waiting = {key: at for key, at in self._waiting.items() if key[0] in jobs}
        self._seen_jobs = {key: at for key, at in self._seen_jobs.items() if key[1] in jobs}


def _remember(notes: dict[str, T], names: Iterable[str], note: T) -> None:
    """Keep a note for each name. Delete the oldest notes when there are too many."""
    for name in names:
        notes.pop(name, None)
        notes[name] = note
    while len(notes) > _NAMES_KEPT:
        del notes[next(iter(notes))]
