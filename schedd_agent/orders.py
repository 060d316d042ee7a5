"""Orders to managers, with numbers that are never used twice, on sheets that are repeated until acknowledged."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from schedd_agent.model import SendOrder
from stageout.core import log
from stageout.core.durable import read_file, write_file
from stageout.model.run import key_of, manager_identity, name_of
from stageout.wire.custody import AD_LIFETIME_S, Action, JobKey, Order, OrderSheet
from stageout.wire.owner_requests import Verb

REFRESH_S = AD_LIFETIME_S / 3


class OrderKey(NamedTuple):
    """The key of an order. Two orders with one key are the same order.

    :param manager: an identity. :param request: of the owner, for a redirect.
    """

    manager: str
    job: JobKey
    action: Action
    run: int
    request: str = ""


def _key(job: JobKey, send: SendOrder) -> OrderKey:
    return OrderKey(manager=send.manager, job=job, action=send.action, run=send.run, request=send.request)


class OrderNumbers:
    """Order numbers that only grow, also over restarts.

    Without its file the agent begins a new series. Managers have acknowledged numbers of the old series, and would take
    lower numbers for orders that they carried out before.

    :param path: file with the next unused number and the name of the series.
    :param wall_s: wall clock. Without the file, numbers start at this time in milliseconds.
    """

    def __init__(self, path: Path, wall_s: float) -> None:
        self._path = path
        try:
            number, series = read_file(path).split()
            self._next, self.series = int(number), series.decode("ascii")
        except (FileNotFoundError, ValueError):
            self._next, self.series = int(wall_s * 1000), secrets.token_hex(4)

    def take(self, count: int) -> range:
        """Return the next numbers. The disk shows them as used on return. :raises OSError: the disk refuses it."""
        taken = range(self._next, self._next + count)
        write_file("agent-number", self._path, f"{taken.stop} {self.series}\n".encode())
        self._next = taken.stop
        return taken


class OrderOutbox:
    """Orders that managers have not acknowledged, and those acknowledged since the agent's start.

    :param agent: name of the agent. :param lease_s: seconds for which a manager may send after a report.
    """

    def __init__(self, agent: str, numbers: OrderNumbers, lease_s: float = 0.0) -> None:
        self._agent = agent
        self._lease_s = lease_s
        self._numbers = numbers
        self._open: dict[OrderKey, Order] = {}
        self._done: dict[JobKey, dict[OrderKey, int]] = {}
        self._acknowledged: dict[str, int] = {}
        self._changed: set[str] = set()
        self._published: dict[str, float] = {}

    def set_lease(self, lease_s: float) -> None:
        """Take over a changed lease."""
        self._lease_s = lease_s

    def add(self, orders: Iterable[tuple[JobKey, SendOrder]]) -> list[tuple[JobKey, SendOrder]]:
        """Add orders about jobs, except those that are open or done. Return the new ones.

        :raises OSError: their numbers cannot be stored. No order was added.
        """
        new = [(job, send) for job, send in orders if self.is_new(job, send)]
        for number, (job, send) in zip(self._numbers.take(len(new)) if new else (), new):
            order = Order(
                number=number,
                action=send.action,
                job=job.name,
                run_number=send.run,
                tickets=send.tickets,
                files=send.files,
                priority=send.priority,
                request=send.request,
                new_url=send.new_url,
                only_file=send.only_file,
                owner=job.owner,
            )
            self._open[_key(job, send)] = order
            self._changed.add(send.manager)
        return new

    def is_new(self, job: JobKey, send: SendOrder) -> bool:
        """Tell whether :meth:`add` would add an order."""
        key = _key(job, send)
        known = self._open.get(key)
        same = known is not None and (known.tickets, known.files) == (send.tickets, send.files)
        return not same and key not in self._done.get(job, ())

    def acknowledged(self, manager: str, number: int) -> list[OrderKey]:
        """Close all orders up to a number that a manager acknowledged. Return those that were open.

        Orders above it are not done, even if an earlier report acknowledged them: the manager's ledger is older now.
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

    def done(self, job: JobKey) -> frozenset[tuple[str, Action, int]]:
        """Return the acknowledged orders about a job: (manager, action, run)."""
        return frozenset((key.manager, key.action, key.run) for key in self._done.get(job, ()))

    def requests_done(self, job: JobKey) -> frozenset[tuple[str, int, str]]:
        """Return the acknowledged redirects of a job: (manager, run, request)."""
        return frozenset((key.manager, key.run, key.request) for key in self._done.get(job, ()) if key.request)

    def allow_again(self, job: JobKey) -> None:
        """Allow new orders for the owner's requests, after the last request was cleared.

        An open redirect is dropped: its request is gone, and the next one may name another URL.
        """
        requests = {Action(verb.value) for verb in Verb}
        self._done[job] = {key: at for key, at in self._done.get(job, {}).items() if key.action not in requests}
        for key in [key for key in self._open if key.job == job and key.request]:
            del self._open[key]
            self._changed.add(key.manager)

    @property
    def numbering(self) -> str:
        """Return the name under which managers acknowledge order numbers."""
        return OrderSheet(self._agent, "", 0, series=self._numbers.series).numbering

    def due(
        self, now_s: float, wall_s: float, heard: Mapping[str, int], busy: Set[str], unleased: Set[str] = frozenset(),
        promised_s: Mapping[str, int] = MappingProxyType({}),
    ) -> list[OrderSheet]:  # fmt: skip
        """Return the sheets to publish now: changed ones, and those whose ads or leases would expire.

        Managers are identities.

        :param heard: manager -> number of its newest report. :param busy: managers that hold output.
        :param unleased: managers that send nothing before they get a sheet, for example after a restart.
        :param promised_s: manager -> lease that it gives itself, of those that do.
        """
        needed = {key.manager for key in self._open} | busy

        def is_old(manager: str) -> bool:
            leases_s = [lease_s for lease_s in (self._lease_s, promised_s.get(manager, 0)) if lease_s]
            refresh_s = min([REFRESH_S, *(lease_s / 6 for lease_s in leases_s)])
            return now_s - self._published.get(manager, float("-inf")) >= refresh_s

        old = set(filter(is_old, needed))
        return [
            self._sheet(manager, wall_s, heard.get(manager, 0)) for manager in sorted(self._changed | old | unleased)
        ]

    def published(self, sheet: OrderSheet, now_s: float) -> None:
        """Record that the collector has a sheet."""
        manager = manager_identity(sheet.manager, sheet.manager_key)
        self._changed.discard(manager)
        self._published[manager] = now_s

    def keep_only(self, jobs: Set[JobKey]) -> None:
        """Delete orders about all other jobs, because no manager reports their output."""
        self._done = {job: keys for job, keys in self._done.items() if job in jobs and keys}
        for key in [key for key in self._open if key.job not in jobs]:
            del self._open[key]
            self._changed.add(key.manager)

    @property
    def open(self) -> Mapping[OrderKey, Order]:
        """Return the orders that are not acknowledged."""
        return self._open

    def _sheet(self, manager: str, wall_s: float, heard: int) -> OrderSheet:
        orders = sorted((order for key, order in self._open.items() if key.manager == manager), key=lambda o: o.number)
        series, lease_s = self._numbers.series, self._lease_s
        return OrderSheet(
            agent=self._agent,
            manager=name_of(manager),
            sent_at=int(wall_s),
            orders=tuple(orders),
            manager_key=key_of(manager),
            series=series,
            heard=heard,
            lease_s=lease_s,
        )
