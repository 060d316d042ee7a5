"""The order of fetches: a pure rule, without clock or tasks.

A plugin may take hours for one file, so places are not only divided among those who wait now: some are kept for who
comes later.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Wish:
    """One fetch that is wanted.

    :param target: where it comes from. :param keys: names of the keys that want it, each as often as it was asked.
    :ivar key: the one in whose place it runs.
    """

    target: Hashable
    keys: list[str] = field(default_factory=list)
    key: str = ""


class Turns:
    """Wishes that wait, and those that run.

    - No more than ``most`` run at once, and of one target no more than ``most - 1`` (of one place: one).
    - A key that has some places, of all or of a target's, gets another one only while more than these are free there.
      So none ever has more than half of them, rounded up, and who has none gets the first that is free.
    - Of those that may begin it is that of the key with the fewest places; of these the key whose last turn is the
      longest ago; and of one key the oldest.
    - A wish that several keys have begins as soon as one of them may, in its place.

    :param most: places.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[Wish, None] = {}
        self._running: dict[Wish, None] = {}
        self._last_turn: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def ask(self, wish: Wish) -> None:
        """It waits for its turn, behind what the same keys have asked for."""
        self._waiting[wish] = None

    def next(self) -> Wish | None:
        """The one that begins now and runs until it is left; None while none may."""
        places, free = Counter(one.key for one in self._running), self._most - len(self._running)
        of_target, there = (
            Counter(one.target for one in self._running), Counter((one.key, one.target) for one in self._running),
        )  # fmt: skip
        may = [
            (places[key], self._last_turn.get(key, 0), number, key, wish)
            for number, wish in enumerate(self._waiting)
            for key in wish.keys
            if places[key] < free and there[key, wish.target] < max(1, self._most - 1) - of_target[wish.target]
        ]
        if not may:
            return None
        *_, key, wish = min(may, key=lambda one: one[:3])
        del self._waiting[wish]
        self._running[wish], wish.key = None, key
        self._last_turn[key] = next(self._numbers)
        return wish

    def leave(self, wish: Wish) -> None:
        """It has ended, or nobody wants it any more."""
        self._waiting.pop(wish, None)
        self._running.pop(wish, None)
        wanting = {key for one in self._waiting for key in one.keys} | {one.key for one in self._running}
        self._last_turn = {key: turn for key, turn in self._last_turn.items() if key in wanting}
