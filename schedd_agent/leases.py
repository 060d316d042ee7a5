"""How long nothing was heard, counted only while the agent could have heard. Fed with the monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable

from schedd_agent.model import name_of
from stageout.wire.custody import AD_LIFETIME_S

#: After a restart of the collector every manager has published again within this time.
SETTLE_S = float(AD_LIFETIME_S)

_NAMES_KEPT = 10_000


class View:
    """How long the agent could have heard of managers, and when the collector last showed what.

    Silence counts as evidence only while agent and collector could have been heard. Time is counted from one good look
    to the next; what lies round a failed or late look, or after a restart of the collector, is not counted, and takes
    nothing away from what was: a collector that stumbles now and then does not postpone a loss for ever.

    :param hole_s: seconds between two looks that make a hole.
    """

    def __init__(self, hole_s: float) -> None:
        self._hole_s = hole_s
        self._seen_s = 0.0
        self._last_look: float | None = None
        self._collector_age_s = 0.0
        self._settled_at_s = float("-inf")
        self._shown: dict[tuple[str, str], float] = {}
        self._managers: dict[str, float] = {}
        self._waiting: dict[tuple[str, int], float] = {}
        self._disputed: dict[str, float] = {}
        self._ends: dict[str, tuple[int, float]] = {}

    def looked(
        self, now_s: float, collector_age_s: float, shown: Iterable[tuple[str, str]], managers: Iterable[str] = ()
    ) -> None:
        """The collector answered.

        :param collector_age_s: for how long it has been up: a smaller value means that it had forgotten all ads.
        :param shown: (custodian, job) of every sandbox in the reports. :param managers: custodians with a report there.
        """
        if collector_age_s < self._collector_age_s:
            self._settled_at_s = now_s + SETTLE_S
        elif self._last_look is not None and now_s - self._last_look <= self._hole_s:
            self._seen_s += max(0.0, now_s - max(self._last_look, self._settled_at_s))
        self._last_look, self._collector_age_s = now_s, collector_age_s
        for key in shown:
            self._shown[key] = self._seen_s
        _remember(self._managers, managers, self._seen_s)

    def ending(self, manager: str, number: int, ends_in_s: float) -> None:
        """What a manager's newest report says of its end. :param number: of that report. :param ends_in_s: 0: none."""
        if not ends_in_s:
            self._ends.pop(manager, None)
        elif self._ends.get(manager, (0, 0.0))[0] != number:
            self._ends[manager] = number, self._seen_s + ends_in_s
            while len(self._ends) > _NAMES_KEPT:
                del self._ends[next(iter(self._ends))]

    def has_ended(self, manager: str) -> bool:
        """Whether a manager (custodian) has said when it will have ended, that is over, and nothing came after it.

        Time is counted from the look that found its word, so it has ended before by any clock.
        """
        found = self._ends.get(manager)
        return found is not None and self._seen_s >= found[1]

    def disputed(self, names: Iterable[str]) -> None:
        """Others speak in the names of these managers now: their silence begins anew."""
        _remember(self._disputed, names, self._seen_s)

    def failed(self) -> None:
        """The collector did not answer."""
        self._last_look = None

    def waiting(self, job: str, run: int) -> None:
        """This run waits for news (first call counts)."""
        self._waiting.setdefault((job, run), self._seen_s)

    def waited_s(self, job: str, run: int) -> float:
        """Seconds of view for which the run has waited."""
        return self._seen_s - self._waiting.get((job, run), self._seen_s)

    def absent_s(self, manager: str, job: str, run: int) -> float:
        """Seconds of view in which the manager (custodian) has not shown output of the job."""
        waiting = self._waiting.get((job, run), self._seen_s)
        heard = max(self._shown.get((manager, job), 0.0), self._disputed.get(name_of(manager), 0.0))
        return self._seen_s - max(waiting, heard)

    def silent_s(self, manager: str) -> float:
        """Seconds of view without a report of the manager (custodian)."""
        heard = max(self._managers.get(manager, 0.0), self._disputed.get(name_of(manager), 0.0))
        return self._seen_s - heard

    def keep_only(self, jobs: set[str]) -> None:
        """Forget all but these jobs."""
        self._waiting = {key: at for key, at in self._waiting.items() if key[0] in jobs}
        self._shown = {key: at for key, at in self._shown.items() if key[1] in jobs}


def _remember(times: dict[str, float], names: Iterable[str], seen_s: float) -> None:
    """Note a time for each name; the oldest are forgotten when there are too many."""
    for name in names:
        times.pop(name, None)
        times[name] = seen_s
    while len(times) > _NAMES_KEPT:
        del times[next(iter(times))]
