"""Directories in the spool that no record needs: what a hand-off left that could not be undone when it failed."""

from __future__ import annotations

from collections.abc import Collection

from sandbox_manager.spool import Spool
from stageout.core import log


class Strays:
    """Finds and removes them while the manager runs; at its start :meth:`Spool.remove_strays` does."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._before: frozenset[str] = frozenset()

    def collect(self, known: Collection[str]) -> list[str]:
        """Remove what no record needs, and did not at the last call either: a hand-off may be on its way to its record.

        Blocks. :param known: tickets with a record. :returns: what was removed.
        """
        strays = frozenset(self._spool.directories()).difference(known)
        removed = []
        for ticket in sorted(strays & self._before):
            try:
                self._spool.release(ticket)
            except OSError as problem:
                log.warn("stray-left", ticket=ticket, problem=problem)
            else:
                removed.append(ticket)
        self._before = strays
        if removed:
            log.event("strays", removed=len(removed))
        return removed
