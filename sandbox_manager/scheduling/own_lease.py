"""The lease that this node gives itself, because nobody waits long for one that never comes back.

``STAGEOUT_NEVER_RETURNS`` is the administrator's. It is evaluated in the machine's ad, as the startd of this node has
it, without what jobs can write into that ad.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sandbox_manager.rules import Rules
from sandbox_manager.scheduling.leases import Leases
from stageout.core import log

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
        self._take(_LITERALS.get(rules().never_returns.lower(), False))

    async def run(self) -> None:
        """Look until cancelled, because the machine's ad may change."""
        while True:
            await self.look()
            await asyncio.sleep(_AGAIN_S if self._problem else _INTERVAL_S)

    async def look(self) -> None:
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
        self._take(value)

    def _take(self, never_returns: bool) -> None:
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
