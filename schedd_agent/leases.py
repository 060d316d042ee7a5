"""How long nothing was heard, counted only while the agent could have heard. Fed with the monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable

from schedd_agent.model import name_of

_NAMES_KEPT = 10_000


class View:
    """Continuity of the agent's view of the collector, and when it last showed what.

    Silence counts as evidence only in a view without holes: any failed or late look, and any restart of the
    collector, starts all leases again.

    :param hole_s: seconds between two looks that make a hole.
    """

    def __init__(self, hole_s: float) -> None:
        self._hole_s = hole_s
        self._whole_since: float = float("nan")
        self._last_look: float = float("-inf")
        self._collector_age_s: float = 0.0
        self._shown: dict[tuple[str, str], float] = {}
        self._waiting: dict[tuple[str, int], float] = {}
        self._disputed: dict[str, float] = {}

    def looked(self, now_s: float, collector_age_s: float, shown: Iterable[tuple[str, str]]) -> None:
        """The collector answered.

        :param collector_age_s: for how long it has been up: a smaller value means that it had forgotten all ads.
        :param shown: (custodian, job) of every sandbox in the reports.
        """
        if now_s - self._last_look > self._hole_s or collector_age_s < self._collector_age_s:
            self._whole_since = now_s
        self._last_look, self._collector_age_s = now_s, collector_age_s
        for key in shown:
            self._shown[key] = now_s

    def disputed(self, names: Iterable[str], now_s: float) -> None:
        """Others speak in the names of these managers now: their silence begins anew."""
        for name in names:
            self._disputed.pop(name, None)
            self._disputed[name] = now_s
        while len(self._disputed) > _NAMES_KEPT:
            del self._disputed[next(iter(self._disputed))]

    def failed(self) -> None:
        """The collector did not answer."""
        self._last_look = float("-inf")

    def waiting(self, job: str, run: int, now_s: float) -> None:
        """This run waits for news (first call counts)."""
        self._waiting.setdefault((job, run), now_s)

    def waited_s(self, job: str, run: int, now_s: float) -> float:
        """Seconds that the run has waited in a whole view."""
        return self._since(self._waiting.get((job, run), now_s), now_s)

    def absent_s(self, manager: str, job: str, run: int, now_s: float) -> float:
        """Seconds that the manager (custodian) has not shown output of the job in a whole view."""
        never = float("-inf")
        heard = max(self._shown.get((manager, job), never), self._disputed.get(name_of(manager), never))
        started = max(self._waiting.get((job, run), now_s), heard)
        return self._since(started, now_s)

    def keep_only(self, jobs: set[str]) -> None:
        """Forget all but these jobs."""
        self._waiting = {key: at for key, at in self._waiting.items() if key[0] in jobs}
        self._shown = {key: at for key, at in self._shown.items() if key[1] in jobs}

    def _since(self, started: float, now_s: float) -> float:
        if self._last_look == float("-inf"):
            return 0.0
        return max(0.0, now_s - max(started, self._whole_since))
