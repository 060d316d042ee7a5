"""Takes hand-offs over: room and a place are reserved, what the spool holds is recorded, its sync too.

Custody, as ``intake.py`` asks for it. What is against an offer is in ``admission.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sandbox_manager import orders, records, recovery
from sandbox_manager.accounts import Account
from sandbox_manager.admission import Admission, Offer, schemes_of, slot_of
from sandbox_manager.book import Book
from sandbox_manager.identity import RunFacts
from sandbox_manager.intake import Handoff, Refusal, Refused, Reservation
from sandbox_manager.pilot_end import servers_of
from sandbox_manager.sandbox import Destination, Sandbox
from sandbox_manager.spool import HeldFile, Synced
from stageout.core.states import State
from stageout.movers.schemes import split_url
from stageout.wire.handoff import Receipt


@dataclass(frozen=True)
class Manager:
    """The identity of this manager, for receipts and reports."""

    name: str
    key: str = ""


class _Promise(Reservation):
    def __init__(self, number: int, account: Account | None) -> None:
        self.number = number
        self.account = account


class Acceptance:
    """Custody of what plugins hand over.

    :param boot: id of this boot. :param now: wall clock, seconds.
    :param follow: what a change of state brings with it (:meth:`sandbox_manager.pipeline.Pipeline.follow`).
    :param sync: brings a ticket of this size to the disk, later.
    :param sending_s: how long a plugin would send an offer, infinity where nobody knows.
    """

    def __init__(
        self,
        manager: Manager,
        book: Book,
        admission: Admission,
        boot: str,
        now: Callable[[], int],
        follow: Callable[[Iterable[Sandbox]], None],
        sync: Callable[[str, int], None],
        sending_s: Callable[[Offer], float],
    ) -> None:
        self._manager = manager
        self._book = book
        self._admission = admission
        self._boot = boot
        self._now = now
        self._follow = follow
        self._sync = sync
        self._sending_s = sending_s

    def may_accept(
        self, facts: RunFacts, files: int, size_bytes: int, urls: Sequence[str], plugin: str
    ) -> Reservation | Refusal:
        """Reserve room and a place in the data slot, or say why the plugin must upload itself."""
        offer = Offer(facts, files, size_bytes, schemes_of(urls), servers_of(urls), plugin)
        reason = self._admission.reason_against(offer)
        if reason:
            return Refusal(reason)
        number = self._admission.promise(offer)
        return _Promise(number, self._admission.account_of(number))

    def may_copy(self, reservation: Reservation, size_bytes: int) -> float | Refusal:
        """Reserve room for a copy of so much of what was reserved; seconds that sending all of it would take."""
        assert isinstance(reservation, _Promise)
        reason = self._admission.reason_against_copy(reservation.number, size_bytes)
        if reason:
            return Refusal(reason)
        return self._sending_s(self._admission.promise_copy(reservation.number, size_bytes))

    def release(self, reservation: Reservation) -> None:
        """Give back what was reserved."""
        assert isinstance(reservation, _Promise)
        self._admission.release(reservation.number)

    async def accept(self, handoff: Handoff) -> Receipt:
        """Record a hand-off. On return ACCEPTED is on the disk; older runs of the job are superseded.

        :raises Exception: it is not recorded.
        """
        write = asyncio.ensure_future(self._record_ticket(handoff))
        while not write.done():
            with contextlib.suppress(asyncio.CancelledError):  # may be said again and again
                await asyncio.wait({write})
        write.result()  # What is recorded is recorded: the files may not be taken away any more.
        held = ((item.inode, item.size_bytes) for item in handoff.files)
        self._admission.space.add(handoff.ticket, handoff.facts.owner, held)
        self.release(handoff.reservation)
        self._sync(handoff.ticket, handoff.size_bytes)
        return Receipt(
            handoff.ticket, self._manager.name, self._manager.key, len(handoff.files), handoff.size_bytes
        )  # fmt: skip

    async def _record_ticket(self, handoff: Handoff) -> None:
        facts, now = handoff.facts, self._now()
        owner = records.NewSandbox(
            facts.run, facts.owner, facts.user, facts.uid, facts.gid, facts.shared_uid, slot_of(facts),
            facts.slot_name, facts.job_prio,
        )  # fmt: skip
        held = handoff.surroundings
        digest = held.digest if held else ""
        files = [self._new_file(handoff.plugin, item, digest) for item in handoff.files]

        def change(db: sqlite3.Connection) -> Iterable[int]:
            newest = records.newest_run(db, facts.run.job)
            if newest > facts.run.number:
                raise Refused("a newer run of the job came in meanwhile", "OtherRun")
            state = records.state_of_run(db, facts.run) if newest else None
            if state not in (None, State.ACCEPTED):
                # Its plugin gave up waiting; what is decided about the run was decided without these files.
                raise Refused(f"output of this run became {state} meanwhile", "OtherRun")
            box = records.add_ticket(db, owner, handoff.ticket, handoff.plugin, files, self._boot, now)
            if held:
                records.keep_surroundings(db, held)
            if not newest:
                return [box]  # the first that is heard of this job: nothing was confirmed, nothing is older
            orders.confirm_late(db, box, now)
            return [box, *orders.supersede_older(db, facts.run, now)]

        self._follow(await self._book.write(change, "record-accepted"))

    def _new_file(self, plugin: str, held: HeldFile, surroundings: str) -> records.NewFile:
        scheme, host = split_url(held.url)
        return records.NewFile(
            held.position, held.url, held.name, held.size_bytes, held.mtime_ns, held.inode,
            Destination(plugin, scheme, host, surroundings),
        )  # fmt: skip

    async def sync_begins(self, tickets: Sequence[str]) -> None:
        """Record that the data of these tickets are about to be synced."""
        await self._book.ledger.write(lambda db: records.mark_syncing(db, tickets), "record-syncing")

    async def synced(self, synced: Synced) -> None:
        """Record which data are on the disk, and that the sandboxes of those that the disk has lost are LOST."""

        def change(db: sqlite3.Connection) -> Iterable[int]:
            records.mark_synced(db, synced.on_disk)
            return recovery.lose_tickets(db, synced.lost, self._now())

        labels = [*(["record-synced"] if synced.on_disk else ()), *(["record-lost"] if synced.lost else ())]
        self._follow(await self._book.write(change, *labels))
