"""Data slots: places for sandboxes, bound to CPU slots. Pure: no clock, no I/O.

Each CPU slot has a data slot: a number of active places for each server, and a depth of waiting ones. A sandbox takes
an active place when a batch with its files starts and gives it back when the batch ends. One that waits for a time, or
for a server that cannot be reached or does not answer, has no place at all: a dead destination blocks nobody's slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from sandbox_manager.rules import Limits
from sandbox_manager.scheduling.breaker import Flow
from stageout.model.sandbox import Destination, Occupant, SlotKey


def most_per_owner(limit: int) -> int:
    """Return an owner's part of a limit: all but one, so that the next owner need not wait for an end."""
    return max(1, limit - 1)


class SlotUsage:
    """Active places that are taken, by server: output for one that does not answer holds up none for another.

    :param occupants: with how many sandboxes are alike.
    """

    def __init__(
        self, occupants: Iterable[tuple[Occupant, int]], destinations: Mapping[int, Destination], limits: Limits
    ) -> None:
        self._limits = limits
        self._active: Counter[tuple[SlotKey, str]] = Counter()
        self._active_parents: Counter[tuple[tuple[str, int], str]] = Counter()
        self._active_owners: Counter[tuple[tuple[str, int], str, str]] = Counter()
        for one, count in occupants:
            for server in {destinations[number].server for number in one.sent_to}:
                self.activate(one.slot, one.owner, server, count)

    def activate(self, slot: SlotKey, owner: str, server: str, count: int = 1) -> None:
        """Active places are taken."""
        self._active[slot, server] += count
        self._active_parents[slot.parent, server] += count
        self._active_owners[slot.parent, owner, server] += count

    def has_active(self, slot: SlotKey, owner: str, server: str) -> bool:
        """Tell whether a sandbox of this owner may take an active place. An owner's first never waits for others."""
        if not self._active_owners[slot.parent, owner, server]:
            return True
        whole = self._active_parents[slot.parent, server] < self._limits.active * max(1, self._limits.cpus)
        return self._active[slot, server] < self._limits.active and (whole or not slot.dslot_id)


def positions_free(slot: SlotKey, owner: str, taken: Iterable[tuple[SlotKey, str, int]], limits: Limits) -> int:
    """Places left in a data slot for an owner; always one for whom none is taken yet, so that others' waiting
    output never makes somebody's first upload synchronous.

    :param taken: places of any kind in this data slot and its siblings: slot, owner, how many.
    """
    here = of_all = of_owner = 0
    for other, by, count in taken:
        of_all += count
        if other == slot:
            here += count
        if by == owner:
            of_owner += count
    each = limits.active + limits.depth
    free = each - here
    if slot.dslot_id:
        free = min(free, each * max(1, limits.cpus) - of_all)
    return max(0 if of_owner else 1, free)


def is_stuck(one: Occupant, destinations: Mapping[int, Destination], flow: Callable[[str], Flow]) -> bool:
    """Return whether a sandbox has no place, because it waits for its owner or only for unreachable or silent servers.

    A server whose probe is due is still away.
    """
    if not one.may_stick:
        return False
    return one.paused or all(flow(destinations[number].server) is not Flow.ALL for number in one.destinations)
