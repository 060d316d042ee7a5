"""Acceptance of hand-offs: reserve room and a place, then record what the spool holds.

``intake/admission.py`` has the reasons of policy against an offer. ``record_handoff`` in ``custody/orders.py`` refuses
a run that a newer one has overtaken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_manager.custody import orders, redirects
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.custody import Custody
from sandbox_manager.intake.admission import Admission, Offer, schemes_of, servers_of
from sandbox_manager.scheduling.rates import Rates
from stageout.core import log
from stageout.core.clock import wall_now
from stageout.core.ending import outlast
from stageout.core.synchronous import Reason
from stageout.model.file import StoredFile
from stageout.model.run import Account, RunFacts
from stageout.wire.handoff import Receipt


@dataclass(frozen=True)
class Manager:
    """The identity of this manager, for receipts and reports."""

    name: str
    key: str = ""


@dataclass(frozen=True)
class Reservation:
    """Room in the spool and a place in a data slot, held for one hand-off.

    :param number: of the reservation, for :class:`Admission`. :param account: of the manager's own, that gets the
        files; None: they stay the job's user's.
    """

    number: int
    account: Account | None = None


@dataclass(frozen=True)
class Refusal:
    """A sandbox is not taken.

    :param reason: one sentence for the job's owner, with its code.
    """

    reason: Reason


@dataclass(frozen=True)
class Handoff:
    """Files that the spool holds, to be recorded.

    :param ticket: 32 hexadecimal digits. :param plugin: executable that the starter called.
    :param stored: credentials and ads that the plugin needs besides the files; None without any.
    """

    ticket: str
    facts: RunFacts
    plugin: str
    files: Sequence[StoredFile]
    reservation: Reservation
    stored: StoredCredentials | None = None

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes."""
        return sum(item.size_bytes for item in self.files)


class Acceptance:
    """Custody of what plugins hand over.

    :param rates: how long a plugin would send an offer.
    """

    def __init__(self, manager: Manager, custody: Custody, admission: Admission, rates: Rates) -> None:
        self._manager, self._custody, self._admission, self._rates = manager, custody, admission, rates
        self._store = custody.store

    def may_accept(
        self, facts: RunFacts, files: int, size_bytes: int, urls: Sequence[str], plugin: str
    ) -> Reservation | Refusal:
        """Reserve room and a place in the data slot, or say why the plugin must upload itself."""
        offer = Offer(
            facts=facts,
            files=files,
            size_bytes=size_bytes,
            schemes=schemes_of(urls),
            servers=servers_of(urls),
            plugin=plugin,
        )
        reason = self._admission.reason_against(offer)
        if reason:
            return Refusal(reason)
        number = self._admission.reserve(offer)
        return Reservation(number, self._admission.account_of(number))

    def may_copy(self, reservation: Reservation, size_bytes: int) -> float | Refusal:
        """Reserve room for a copy of a part of the offer, or return the reason against it.

        :param size_bytes: of the copied files. :returns: seconds that sending all files would take; infinity if
        unknown.
        """
        reason = self._admission.reason_against_copy(reservation.number, size_bytes)
        if reason:
            return Refusal(reason)
        offer = self._admission.reserve_copy(reservation.number, size_bytes)
        return self._rates.sending_s(offer.servers, offer.files, offer.size_bytes, self._custody.clock.wall_s())

    def unreserve(self, reservation: Reservation) -> None:
        """Drop a reservation."""
        self._admission.unreserve(reservation.number)

    async def accept(self, handoff: Handoff) -> Receipt:
        """Record a hand-off. On return ACCEPTED is on the disk; older runs of the job are superseded.

        :raises Exception: it is not recorded.
        """
        write = asyncio.ensure_future(self._record_ticket(handoff))
        await outlast(write)
        write.result()  # The record counts from here on: the files may not be taken away any more.
        held = ((item.inode, item.size_bytes) for item in handoff.files)
        self._custody.space.add(handoff.ticket, handoff.facts.owner, held)
        self.unreserve(handoff.reservation)
        self._custody.syncs.add(handoff.ticket, handoff.size_bytes)
        return Receipt(
            ticket=handoff.ticket,
            manager_name=self._manager.name,
            manager_key=self._manager.key,
            files=len(handoff.files),
            size_bytes=handoff.size_bytes,
        )

    async def _record_ticket(self, handoff: Handoff) -> None:
        now = wall_now(self._custody.clock)
        new = orders.NewHandoff(
            facts=handoff.facts,
            ticket=handoff.ticket,
            plugin=handoff.plugin,
            files=handoff.files,
            boot=self._custody.boot,
            stored=handoff.stored,
            fallback_problem=self._fallback_problem(handoff),
        )
        await self._store.write(lambda db: orders.record_handoff(db, new, now), "record-accepted")

    def _fallback_problem(self, handoff: Handoff) -> str:
        """Return why the job's fallback is ignored; "" when it is not, or when there is none."""
        facts = handoff.facts
        if not facts.fallback:
            return ""
        problem = redirects.problem_of(
            url=facts.fallback,
            plugin=handoff.plugin,
            files=handoff.files,
            held=handoff.stored,
            find_plugin=self._custody.find_plugin,
        )
        if problem:
            log.warn("fallback-ignored", job=facts.run.job, run=facts.run.number, problem=problem)
        return problem
