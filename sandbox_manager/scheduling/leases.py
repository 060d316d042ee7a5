"""The time until which this manager may send the output that an access point confirmed.

An agent that hears nothing of a manager for STAGEOUT_LEASE gives its output up and lets the job run again. So a manager
that the agent cannot hear must have stopped by then, or old output could arrive after new. The agent names the report
of the manager that it has read. For a while after the making of *that* report the manager may send. No clocks are
compared: the time between the two counts against the manager, however long the messages took.

A node that never comes back gives itself a shorter lease. Its reports promise it, and the agent of a report waits no
longer. The administrator's ``STAGEOUT_NEVER_RETURNS`` says so. It is evaluated in the machine's ad, as the startd of
this node has it, without what jobs can write into that ad.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox_manager.custody.ledger import get_meta, set_meta
from sandbox_manager.rules import Rules
from stageout.core import log
from stageout.core.clock import Clock

_META = "lease_s:"
_REPORTS_KEPT = 2000
#: For plugins that are ending, and for the last report.
_PLUGINS_END_S = 30.0


@dataclass
class Leases:
    """The leases of all access points. A new manager has none until an agent acknowledges its first report.

    A schedd whose agent asks for no lease needs none.

    :param clock: its monotonic one counts. :param asleep_s: seconds for which that stood still with the machine, and
        the access points' did not. :param own_s: the most that the next report promises; 0: what the agents allow.
    """

    clock: Clock
    asleep_s: Callable[[], float] = lambda: 0.0
    own_s: int = 0
    _promised_s: int = 0
    _made_s: dict[int, float] = field(default_factory=dict)
    _lease_s: dict[str, float] = field(default_factory=dict)
    _until_s: dict[str, float] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _reported: tuple[str, ...] = ()
    _ends_s: float = float("inf")

    def load(self, db: sqlite3.Connection) -> None:
        """Read which access points want leases (at start)."""
        rows = db.execute("SELECT name, value FROM meta WHERE name LIKE ?", (f"{_META}%",))
        self._lease_s = {name[len(_META) :]: float(value) for name, value in rows}

    def promise(self, own_s: int) -> bool:
        """Promise this lease in the next report; 0: what the agents allow. Return whether that is another one."""
        is_other, self.own_s = own_s != self.own_s, own_s
        return is_other

    def reported(self, number: int) -> int:
        """Note that a report with this number is being made. Return the lease that it promises; 0 for none.

        With another promise, words about earlier reports give no lease any more: the agent may have read this one.
        """
        now_s = self._now_s()
        if self.own_s != self._promised_s:
            self._promised_s = self.own_s
            self._made_s.clear()
            ends_s = now_s + self._bounded(float("inf"))
            self._until_s = {schedd: min(until_s, ends_s) for schedd, until_s in self._until_s.items()}
        self._made_s[number] = now_s
        while len(self._made_s) > _REPORTS_KEPT:
            del self._made_s[next(iter(self._made_s))]
        return self._promised_s

    def _bounded(self, lease_s: float) -> float:
        """Return a lease that an agent gives, bounded by what the reports promise."""
        return min(lease_s, self._promised_s or lease_s)

    def want(self, db: sqlite3.Connection, schedd: str, lease_s: float) -> None:
        """Record the lease that an agent wants, before output that it confirms is sent."""
        if get_meta(db, _META + schedd, "0.0") != str(lease_s):
            set_meta(db, _META + schedd, str(lease_s))

    def mark_read(self, schedd: str, number: int, lease_s: float) -> None:
        """Record that the agent has read this report, and that its orders are carried out."""
        self._lease_s[schedd] = lease_s
        made_s = self._made_s.get(number)
        if made_s is not None:
            self._until_s[schedd] = max(made_s + self._bounded(lease_s), self._until_s.get(schedd, float("-inf")))

    def end_in(self, limit_s: float) -> None:
        """Stop sending after this time, with or without a lease. Access points rely on it."""
        self._ends_s = self._now_s() + limit_s

    @property
    def ends_in_s(self) -> int:
        """Return the seconds left for sending, with the time that plugins take to end; 0 without an end."""
        if self._ends_s == float("inf"):
            return 0
        return math.ceil(max(0.0, self._ends_s - self._now_s()) + _PLUGINS_END_S)

    @property
    def longest_s(self) -> float:
        """Return the longest lease that an access point asked for; 0 without any."""
        return max(self._lease_s.values(), default=0.0)

    def holds(self, schedd: str) -> bool:
        """Tell whether output of this access point's jobs may be sent now."""
        if self._now_s() >= self._ends_s:
            return False
        if not self._lease_s.get(schedd):
            return True
        holds = self._now_s() < self._until_s.get(schedd, float("-inf"))
        if holds and schedd in self._ended:
            self._ended.discard(schedd)
            log.event("lease-renewed", schedd=schedd)
        elif not holds and schedd not in self._ended:
            self._ended.add(schedd)
            log.warn("lease-expired", schedd=schedd, advice="nothing is sent until its agent hears this manager again")
        return holds

    def unleased(self) -> tuple[str, ...]:
        """Remember what is :meth:`missing` now, as the report says."""
        self._reported = self.missing()
        return self._reported

    def missing(self) -> tuple[str, ...]:
        """Schedds whose agents want leases and have given none that still counts."""
        now_s = self._now_s()
        wanted = (schedd for schedd, lease_s in self._lease_s.items() if lease_s)
        return tuple(sorted(one for one in wanted if now_s >= self._until_s.get(one, float("-inf"))))

    def changed(self) -> bool:
        """Tell whether the last report is wrong about that."""
        reported_before = self._reported
        return self.unleased() != reported_before

    def interval_s(self, usual_s: float, share: float = 1 / 4) -> float:
        """Seconds between two reports, so that no lease ends while all is well. :param share: of the shortest lease."""
        return min([usual_s, *(self._bounded(lease_s) * share for lease_s in self._lease_s.values() if lease_s)])

    def _now_s(self) -> float:
        return self.clock.monotonic_s() + self.asleep_s()


_LITERALS = {"true": True, "false": False}
_INTERVAL_S = 60.0
#: The startd starts with the manager, and may answer a little later.
_AGAIN_S = 5.0


class OwnLease:
    """The keeper of :attr:`Leases.own_s`.

    :param evaluate: evaluates an expression in the machine's ad; it blocks. :param changed: called after a change.
    """

    def __init__(
        self, leases: Leases, rules: Callable[[], Rules], evaluate: Callable[[str], object], changed: Callable[[], None]
    ) -> None:
        self._leases, self._rules, self._evaluate, self._changed = leases, rules, evaluate, changed
        self._problem = ""
        self._set_own(_LITERALS.get(rules().never_returns.lower(), False))

    async def run(self) -> None:
        """Look until cancelled, because the machine's ad may change."""
        while True:
            await self.refresh()
            await asyncio.sleep(_AGAIN_S if self._problem else _INTERVAL_S)

    async def refresh(self) -> None:
        """Evaluate the expression. While the startd does not answer, the last value counts."""
        expression = self._rules().never_returns
        value = _LITERALS.get(expression.lower())
        if value is None:
            try:
                found = await asyncio.get_running_loop().run_in_executor(None, self._evaluate, expression)
            except Exception as problem:
                self._tell(str(problem) or type(problem).__name__)
                return
            value = found is True or (type(found) in (int, float) and found != 0)
        self._tell("")
        self._set_own(value)

    def _set_own(self, never_returns: bool) -> None:
        own_s = self._rules().short_lease_s if never_returns else 0
        if self._leases.promise(own_s):
            log.event("own-lease-changed", seconds=own_s)
            self._changed()

    def _tell(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.warn(
                "machine-query-failed", problem=problem, own_lease_s=self._leases.own_s,
                advice="see whether the startd answers and STAGEOUT_NEVER_RETURNS is a ClassAd expression",
            )  # fmt: skip
        self._problem = problem
