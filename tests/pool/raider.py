"""The hostile user of ``make storm`` and ``make chaos``: he forges something all the time, and must reach nothing."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stageout.core.states import State
from tests.harness.destination import Destination
from tests.harness.pool.errors import PoolError
from tests.pool.conftest import Site
from tests.pool.hostile import FORGED_RUN, FORGERIES, PROJECTION, WAYS, Attacker, Victim
from tests.pool.storm_jobs import Workload

#: Ways that take a moment only, so that a storm goes on meanwhile.
_RAIDS = ("edit, idle", "edit, held", "edit, removed", "edit, released", "submit, procs", "submit, factory", "chirp")
_OTHERS = 'StageOutGuard =?= true && Owner != "{user}" && (JobStatus == 4 || JobStatus == 2)'
#: Jobs of the hostile user in the queue after which he removes all of them.
_MOST_JOBS = 60
#: Words of lines about a job -> its owner's act that leads to them. Without that it was a forged id.
_MARKS = {
    "action=cancel": "rm", "action=redirect": "redirect", "files-redirected": "redirect",
    "action=pause": "", f"run {FORGED_RUN} of the job": "",
}  # fmt: skip
_JOB_IN_LINE = re.compile(r" job=[^# ]+#([0-9.]+)[# ]")


@dataclass
class Raider:
    """The hostile user in a storm: again and again he forges something of a job of the others that he finds.

    :param honest: the jobs of the others. :param interval_s: seconds between two attacks.
    :ivar raids: how often, by way.
    """

    site: Site
    loot: Destination
    honest: Workload
    seed: int
    user: str = "carol"
    interval_s: float = 2.0
    raids: Counter[str] = field(default_factory=Counter)
    _next_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._attacker = Attacker(self.site, self.loot, self.user, copies=5)

    def is_due(self) -> bool:
        """Tell whether it is time for the next attack."""
        return time.monotonic() >= self._next_s

    def strike(self) -> None:
        """Attack one job of the others. A daemon may be down: then nothing happens."""
        with contextlib.suppress(PoolError):
            found = self.site.pool.jobs(_OTHERS.format(user=self.user), PROJECTION)
            if found:
                self._clean_up()
                way = self._random.choice(_RAIDS)
                victim = Victim.of(self._random.choice(found))
                WAYS[way].act(self._attacker, {self._random.choice([*FORGERIES]): victim})
                self.raids[way] += 1
        self._next_s = time.monotonic() + self.interval_s

    def _clean_up(self) -> None:
        if len(self.site.pool.jobs(f'Owner == "{self.user}"', ["ProcId"])) > _MOST_JOBS:
            self.stop()

    def stop(self) -> None:
        """Remove all his jobs, those that stay in the queue as removed ones, too."""
        for options in ((), ("-forcex",)):
            self.site.pool.ap.run(["condor_rm", *options, self.user], check=False)

    def wrong(self, history: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return what he has reached, a line each: read, cancelled or superseded output of the others.

        :param history: ads of the jobs that have left the queue, by id.
        """
        asked = {str(job): job.asked for job in self.honest.jobs}
        found = [f"{path} on the server of {self.user} is another user's output" for path in self._stolen()]
        for job, acts in asked.items():
            past = history.get(job, {})
            state, starts = past.get("StageOutState"), past.get("NumShadowStarts") or 0
            if (state == State.CANCELLED and "rm" not in acts) or starts >= FORGED_RUN:
                found.append(f"{job}: StageOutState {state}, NumShadowStarts {starts}")
        for node, log in (
            (self.site.pool.ap, "ScheddAgentLog"),
            *((ep, "SandboxManagerLog") for ep in self.site.pool.eps),
        ):
            lines = (node.log(f"{log}.old") + node.log(log)).splitlines()
            for mark, act in _MARKS.items():
                found += [line for line in lines if mark in line and act not in asked.get(_job_of(line), {act})]
        return found

    def _stolen(self) -> list[str]:
        wrote = self.honest.digests()
        paths = (path for path in (self.loot.home / "files").rglob("*") if path.is_file())
        return [path.name for path in paths if hashlib.sha256(path.read_bytes()).hexdigest() in wrote]

    def summary(self) -> str:
        """One line with what he did, and what the nodes and the agent said to it."""
        lines = (line for node in self.site.pool.eps for line in node.log("SandboxManagerLog").splitlines())
        refused = sum("handoff-refused" in line and "its GlobalJobId says" in line for line in lines)
        return f"{sum(self.raids.values())} attacks of {self.user}, {refused} hand-offs of these jobs refused"


def _job_of(line: str) -> str:
    found = _JOB_IN_LINE.search(line)
    return found[1] if found else ""
