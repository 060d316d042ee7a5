"""Orders to managers: numbers that are never used twice, sheets that are repeated until acknowledged."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import NamedTuple

from schedd_agent.model import Send, custodian, key_of, name_of
from stageout.core import log
from stageout.core.durable import read_file, write_file
from stageout.wire.custody import AD_LIFETIME_S, Action, Order, OrderSheet

REFRESH_S = AD_LIFETIME_S / 3


class Key(NamedTuple):
    """The key of an order; two orders with the same key are the same order. :param manager: custodian."""

    manager: str
    job: str
    action: Action
    run: int


class Numbers:
    """Order numbers that only grow, over restarts too.

    Whoever loses the file begins a new series: managers have acknowledged numbers of the old one, and would take lower
    numbers for orders that were carried out long ago.

    :param path: file with the first number that was never used, and the name of the series.
    :param wall_s: where the file is missing, numbers start at this time in milliseconds.
    """

    def __init__(self, path: Path, wall_s: float) -> None:
        self._path = path
        try:
            number, series = read_file(path).split()
            self._next, self.series = int(number), series.decode("ascii")
        except (FileNotFoundError, ValueError):
            self._next, self.series = int(wall_s * 1000), secrets.token_hex(4)

    def take(self, count: int) -> range:
        """The next numbers. On return it is on the disk that they are used. :raises OSError: it cannot be stored."""
        taken = range(self._next, self._next + count)
        write_file("agent-number", self._path, f"{taken.stop} {self.series}\n".encode())
        self._next = taken.stop
        return taken


class Book:
    """Orders that are open, and those that were acknowledged since the agent started.

    :param agent: name of the agent. :param lease_s: for which managers may send after a report of theirs was made.
    """

    def __init__(self, agent: str, numbers: Numbers, lease_s: float = 0.0) -> None:
        self._agent = agent
        self.lease_s = lease_s
        self._numbers = numbers
        self._open: dict[Key, Order] = {}
        self._done: dict[str, dict[Key, int]] = {}
        self._acknowledged: dict[str, int] = {}
        self._changed: set[str] = set()
        self._published: dict[str, float] = {}

    def add(self, orders: Iterable[tuple[str, Send]]) -> list[tuple[str, Send]]:
        """Take orders about jobs, but those that are open or done; returns the new ones.

        :raises OSError: their numbers cannot be stored; no order was taken.
        """
        new = [(job, send) for job, send in orders if self._is_new(job, send)]
        for number, (job, send) in zip(self._numbers.take(len(new)) if new else (), new):
            order = Order(number, send.action, job, send.run, send.tickets, send.files, send.priority)
            self._open[Key(send.manager, job, send.action, send.run)] = order
            self._changed.add(send.manager)
        return new

    def _is_new(self, job: str, send: Send) -> bool:
        key = Key(send.manager, job, send.action, send.run)
        known = self._open.get(key)
        same = known is not None and (known.tickets, known.files) == (send.tickets, send.files)
        return not same and key not in self._done.get(job, ())

    def acknowledged(self, manager: str, number: int) -> list[Key]:
        """The manager carried out all orders up to this number; returns those that were open.

        Orders above it are not done, even if an earlier report acknowledged them: the manager has an older ledger now.
        """
        found = [key for key, order in self._open.items() if key.manager == manager and order.number <= number]
        if number < self._acknowledged.get(manager, 0):
            self._undo(manager, number)
        self._acknowledged[manager] = number
        for key in found:
            self._done.setdefault(key.job, {})[key] = self._open.pop(key).number
            self._changed.add(manager)
        return found

    def _undo(self, manager: str, number: int) -> None:
        log.warn("orders-forgotten", manager=name_of(manager), last=number, advice="was an old ledger put back there?")
        for keys in self._done.values():
            for key in [key for key, done in keys.items() if key.manager == manager and done > number]:
                del keys[key]

    def done(self, job: str) -> frozenset[tuple[str, Action, int]]:
        """Acknowledged orders about a job: (manager, action, run)."""
        return frozenset((key.manager, key.action, key.run) for key in self._done.get(job, ()))

    def again(self, job: str) -> None:
        """Requests of the owner may be ordered again: the last one has been cleared."""
        requests = (Action.RETRY, Action.CANCEL, Action.PAUSE, Action.RESUME)
        self._done[job] = {key: at for key, at in self._done.get(job, {}).items() if key.action not in requests}

    @property
    def numbering(self) -> str:
        """The name under which managers acknowledge order numbers."""
        return OrderSheet(self._agent, "", 0, series=self._numbers.series).numbering

    def due(
        self, now_s: float, wall_s: float, heard: Mapping[str, int], busy: Set[str], unleased: Set[str] = frozenset()
    ) -> list[OrderSheet]:
        """Sheets to publish now: changed ones, and others before their ads or the managers' leases expire.

        :param heard: manager -> number of its newest report. :param busy: managers that hold output.
        :param unleased: managers that send nothing until they get a sheet, such as after their restart.
        """
        refresh_s = min(REFRESH_S, self.lease_s / 6) if self.lease_s else REFRESH_S
        needed = {key.manager for key in self._open} | busy
        old = {name for name in needed if now_s - self._published.get(name, float("-inf")) >= refresh_s}
        return [
            self._sheet(manager, wall_s, heard.get(manager, 0)) for manager in sorted(self._changed | old | unleased)
        ]

    def published(self, sheet: OrderSheet, now_s: float) -> None:
        """The sheet is in the collector."""
        manager = custodian(sheet.manager, sheet.manager_key)
        self._changed.discard(manager)
        self._published[manager] = now_s

    def keep_only(self, jobs: set[str]) -> None:
        """Forget what was done for other jobs, and take back orders about them (nobody reports their output)."""
        self._done = {job: keys for job, keys in self._done.items() if job in jobs and keys}
        for key in [key for key in self._open if key.job not in jobs]:
            del self._open[key]
            self._changed.add(key.manager)

    @property
    def open(self) -> Mapping[Key, Order]:
        """Orders that are not acknowledged."""
        return self._open

    def _sheet(self, manager: str, wall_s: float, heard: int) -> OrderSheet:
        orders = sorted((order for key, order in self._open.items() if key.manager == manager), key=lambda o: o.number)
        series, lease_s = self._numbers.series, self.lease_s
        return OrderSheet(
            self._agent, name_of(manager), int(wall_s), tuple(orders), key_of(manager), series, heard, lease_s
        )  # fmt: skip
