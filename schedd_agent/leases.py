"""The silence of managers, counted only while the agent could have heard them. Fed with the monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from schedd_agent.model import name_of
from stageout.wire.custody import AD_LIFETIME_S

#: After a restart of the collector every manager has published again within this time.
SETTLE_S = float(AD_LIFETIME_S)

_NAMES_KEPT = 10_000
OWN_POOL = ""
"""The agent's own pool among those that it looks at."""
#: Seconds of view of each pool.
Moment = Mapping[str, float]
T = TypeVar("T")


@dataclass
class _PoolView:
    seen_s: float = 0.0
    last_look: float | None = None
    collector_age_s: float = 0.0
    settled_at_s: float = float("-inf")

    def looked(self, now_s: float, collector_age_s: float, hole_s: float) -> None:
        if collector_age_s < self.collector_age_s:
            self.settled_at_s = now_s + SETTLE_S
        elif self.last_look is not None and now_s - self.last_look <= hole_s:
            self.seen_s += max(0.0, now_s - max(self.last_look, self.settled_at_s))
        self.last_look, self.collector_age_s = now_s, collector_age_s


class View:
    """The time in which the agent could have heard of managers, and the last sight of each in the collector.

    Silence counts as evidence only while agent and collector could have been heard. Time is counted from one good look
    to the next; what lies round a failed or late look, or after a restart of the collector, is not counted, and takes
    nothing away from what was: a collector that stumbles now and then does not postpone a loss for ever.

    Each pool has its own time. The silence of a manager counts by the pools that have shown it.

    :param hole_s: seconds between two looks that make a hole.
    """

    def __init__(self, hole_s: float) -> None:
        self._hole_s = hole_s
        self._pools: dict[str, _PoolView] = {OWN_POOL: _PoolView()}
        self._pools_of: dict[str, frozenset[str]] = {}
        self._shown: dict[tuple[str, str], Moment] = {}
        self._managers: dict[str, Moment] = {}
        self._waiting: dict[tuple[str, int], Moment] = {}
        self._disputed: dict[str, Moment] = {}
        self._ends: dict[str, tuple[int, Moment, float]] = {}

    def looked(
        self,
        now_s: float,
        collector_age_s: float,
        shown: Iterable[tuple[str, str]],
        managers: Iterable[str] = (),
        pool: str = OWN_POOL,
    ) -> None:
        """The collector answered.

        :param collector_age_s: for how long it has been up: a smaller value means that it had forgotten all ads.
        :param shown: (custodian, job) of every sandbox in the reports. :param managers: custodians with a report there.
        :param pool: whose collector it is.
        """
        self._pools.setdefault(pool, _PoolView()).looked(now_s, collector_age_s, self._hole_s)
        moment = self._moment()
        for key in shown:
            self._shown[key] = moment
        managers = list(managers)
        _remember(self._managers, managers, moment)
        for name in map(name_of, managers):
            _remember(self._pools_of, [name], self._pools_of.get(name, frozenset()) | {pool})

    def _moment(self) -> Moment:
        return {name: pool.seen_s for name, pool in self._pools.items()}

    def _since(self, moment: Moment, pools: Iterable[str] = ()) -> float:
        """Seconds of view since then, in the pool that has the fewest. :param pools: of these; none: of all."""
        names = [name for name in pools if name in self._pools] or self._pools
        return min(self._pools[name].seen_s - moment.get(name, 0.0) for name in names)

    def _pools_for(self, manager: str, has_flocked: bool = True) -> Iterable[str]:
        """Pools that have shown a manager. Where none has, it may be in any, or for a job that never flocked here."""
        return self._pools_of.get(name_of(manager)) or (() if has_flocked else (OWN_POOL,))

    def ending(self, manager: str, number: int, ends_in_s: float) -> None:
        """Note the end that a manager's newest report tells. :param number: its number. :param ends_in_s: 0: none."""
        if not ends_in_s:
            self._ends.pop(manager, None)
        elif self._ends.get(manager, (0, 0.0))[0] != number:
            self._ends[manager] = number, self._moment(), ends_in_s
            while len(self._ends) > _NAMES_KEPT:
                del self._ends[next(iter(self._ends))]

    def has_ended(self, manager: str) -> bool:
        """Tell whether a manager's (custodian's) announced end has passed, and nothing came after it.

        Time is counted from the look that found its word, so it has ended before by any clock.
        """
        found = self._ends.get(manager)
        return found is not None and self._since(found[1], self._pools_for(manager)) >= found[2]

    def disputed(self, names: Iterable[str]) -> None:
        """Others speak in the names of these managers now: their silence begins anew."""
        _remember(self._disputed, names, self._moment())

    def failed(self, pool: str = OWN_POOL) -> None:
        """The pool's collector did not answer."""
        self._pools.setdefault(pool, _PoolView()).last_look = None

    def waiting(self, job: str, run: int) -> None:
        """This run waits for news (first call counts)."""
        self._waiting.setdefault((job, run), self._moment())

    def waited_s(self, job: str, run: int, has_flocked: bool = True) -> float:
        """Seconds of view for which the run has waited. :param has_flocked: the run was in another pool."""
        waiting = self._waiting.get((job, run), self._moment())
        return self._since(waiting, () if has_flocked else (OWN_POOL,))

    def absent_s(self, manager: str, job: str, run: int, has_flocked: bool = True) -> float:
        """Seconds of view in which the manager (custodian) has not shown output of the job."""
        waiting = self._waiting.get((job, run), self._moment())
        heard = self._shown.get((manager, job), {}), self._disputed.get(name_of(manager), {})
        pools = self._pools_for(manager, has_flocked)
        return min(self._since(moment, pools) for moment in (waiting, *heard))

    def silent_s(self, manager: str) -> float:
        """Seconds of view without a report of the manager (custodian)."""
        heard = self._managers.get(manager, {}), self._disputed.get(name_of(manager), {})
        return min(self._since(moment, self._pools_for(manager)) for moment in heard)

    def keep_only(self, jobs: set[str]) -> None:
        """Forget all but these jobs."""
        self._waiting = {key: at for key, at in self._waiting.items() if key[0] in jobs}
        self._shown = {key: at for key, at in self._shown.items() if key[1] in jobs}


def _remember(notes: dict[str, T], names: Iterable[str], note: T) -> None:
    """Keep a note for each name; the oldest are forgotten when there are too many."""
    for name in names:
        notes.pop(name, None)
        notes[name] = note
    while len(notes) > _NAMES_KEPT:
        del notes[next(iter(notes))]
