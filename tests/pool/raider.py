"""The hostile user of ``make storm`` and ``make chaos``: he forges something all the time, and must reach nothing."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stageout.core.states import State
from tests.harness.destination import Destination
from tests.harness.pool import Submission
from tests.harness.pool.errors import PoolError
from tests.pool.conftest import Site
from tests.pool.hostile import FORGED_RUN, FORGERIES, PROJECTION, WAYS, Attacker, Victim

#: Ways that take a moment only, so that a storm goes on meanwhile.
_RAIDS = ("edit, idle", "edit, held", "edit, removed", "edit, released", "submit, procs", "submit, factory", "chirp")
_OTHERS = 'StageOutGuard =?= true && Owner != "{user}" && (JobStatus == 4 || JobStatus == 2)'
#: Jobs of the hostile user in the queue after which he removes all of them.
_MOST_JOBS = 60
#: Words of lines about a job that nothing but a forged id leads to: in a storm nobody gives up output.
_MARKS = ("action=cancel", "action=redirect", "action=pause", f"run {FORGED_RUN} of the job", "files-redirected")
_JOB_IN_LINE = re.compile(r" job=[^# ]+#([0-9.]+)[# ]")


@dataclass
class Raider:
    """The hostile user in a storm: again and again he forges something of a job of the others that he finds.

    :param honest: the jobs that the storm has submitted. :param interval_s: seconds between two attacks.
    :ivar raids: how often, by way.
    """

    site: Site
    loot: Destination
    honest: Sequence[Submission]
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

    def wrong(self) -> list[str]:
        """Return what he has reached, a line each: read, cancelled or superseded output of the others."""
        names = {str(job) for job in self.honest}
        found = [f"{path} on the server of {self.user} is another user's output" for path in self._stolen()]
        for job in names:
            past: Mapping[str, Any] = self.site.pool.history(job) or {}
            state, starts = past.get("StageOutState"), past.get("NumShadowStarts") or 0
            if state == State.CANCELLED or starts >= FORGED_RUN:
                found.append(f"{job}: StageOutState {state}, NumShadowStarts {starts}")
        for node, log in (
            (self.site.pool.ap, "ScheddAgentLog"),
            *((ep, "SandboxManagerLog") for ep in self.site.pool.eps),
        ):
            lines = (node.log(f"{log}.old") + node.log(log)).splitlines()
            found += [line for line in lines if any(mark in line for mark in _MARKS) and _job_of(line) in names]
        return found

    def _stolen(self) -> list[str]:
        wrote = {digest for job in self.honest for digest in self.site.wrote(job).values()}
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
