"""The end of a pilot: send what can still be sent, then say of the rest that it is lost.

A pilot's spool goes away with it, so nothing goes on at a next start. Output that is not delivered when the
grace ends is LOST in the ledger before the report, and is never sent again. Its jobs run again elsewhere at once,
instead of waiting for the end of the access point's lease for this manager.
"""

from __future__ import annotations

import asyncio
import heapq
import sqlite3
from collections.abc import Iterable

from sandbox_manager.custody import queries, updates
from sandbox_manager.delivery.handover import DrainTarget
from sandbox_manager.pipeline import Pipeline
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.states import FREED, State
from stageout.model.sandbox import SENDABLE, Sandbox

REASON = "the pilot ended before the output could be delivered"
_LAST_WORDS_S = 10.0
_LOOK_S = 0.2
_TELL_S = 10.0
_NAMED = 50
#: Share of the remaining time in which files go to their own destinations. Then the custodian gets the rest.
_OWN_SHARE = 1 / 3


class Drain:
    """One drain. :meth:`run` while orders are still read and reports still made.

    :param grace_s: from now until the last report must be out. :param router: custodian that takes what cannot be
        delivered in time, or several with commas between, "" without one. :param key: public key that reports are
        signed with. :param copies: custodians that must have a file before it may be freed.
    """

    def __init__(
        self, pipeline: Pipeline, clock: Clock, grace_s: float, router: str = "", key: str = "", copies: int = 1
    ) -> None:
        self._pipeline = pipeline
        self._clock = clock
        sending_s = max(0.0, grace_s - min(_LAST_WORDS_S, grace_s / 3))
        self._until_s = clock.monotonic_s() + sending_s
        self._end = clock.wall_s() + sending_s
        self._is_cut_short = False
        pipeline.scheduler.leases.end_in(sending_s)
        self._drain_target = DrainTarget(",".join(router.replace(",", " ").split()), key, copies) if router else None
        self._hand_over_s = clock.monotonic_s() + sending_s * _OWN_SHARE

    def cut_short(self) -> None:
        """Send nothing more: the rest of the grace was taken back."""
        self._is_cut_short = True

    async def run(self) -> None:
        """Drain the node. On return nothing is sent any more, and what was not delivered is LOST in the ledger."""
        pipeline = self._pipeline
        if self._drain_target is not None:
            self._drain_target.remember(await pipeline.store.ledger.read(queries.begun_hand_over))
        await self._all_due()
        told_s = float("-inf")
        while self._unfinished() and not self._is_over:
            if self._clock.monotonic_s() - told_s >= _TELL_S:
                told_s = self._clock.monotonic_s()
                pipeline.store.registry.order_anew(self.deadline)
                self._log_endangered()
            await self._hand_over_late_output()
            await asyncio.sleep(_LOOK_S)
        await pipeline.scheduler.stop_sending(0.0)
        # The reports about lost output carry its receipts, those of an earlier start too.
        pipeline.runner.tell_of(self._drain_target)
        lost = await self._mark_lost()
        for sandbox in lost:
            log.error(
                "sandbox-lost",
                job=sandbox.run.job,
                run=sandbox.run.number,
                owner=sandbox.owner,
                bytes=sandbox.bytes_left,
                reason=_reason(sandbox),
            )
        away = [sandbox for sandbox in pipeline.store.registry.by_id.values() if sandbox.state is State.HANDED_OVER]
        log.event(
            "pilot-drained",
            lost=len(lost),
            lost_bytes=sum(sandbox.bytes_left for sandbox in lost),
            handed_over=len(away),
        )

    @property
    def _is_over(self) -> bool:
        return self._is_cut_short or self._clock.monotonic_s() >= self._until_s

    async def _hand_over_late_output(self) -> None:
        """Give to the custodian what cannot arrive in time, as soon as that is seen; after some time all the rest."""
        if self._drain_target is None or self._pipeline.runner.hand_over_to is not None:
            return
        late = any(self.deadline(sandbox) == float("inf") for sandbox in self._remaining() if sandbox.state in SENDABLE)
        if late or self._clock.monotonic_s() >= self._hand_over_s:
            log.warn(
                "handover-started", router=self._drain_target.router, bytes=self._pipeline.store.registry.bytes_at_risk
            )
            others = [sandbox for sandbox in self._remaining() if not self._accepts_all(sandbox, self._drain_target)]
            if others:
                log.warn(
                    "output-stranded", jobs=jobs_at_risk(others), reason="only overlay:// output can be handed over"
                )
            self._pipeline.runner.hand_over(self._drain_target)
            self._pipeline.store.registry.order_anew(self.deadline)
            await self._all_due()

    def _accepts_all(self, sandbox: Sandbox, target: DrainTarget) -> bool:
        destinations = self._pipeline.store.registry.destinations
        return all(target.accepts(destinations[part.destination]) for part in sandbox.waiting)

    def _remaining(self) -> list[Sandbox]:
        """Return the sandboxes that end with the pilot; those that a custodian holds do not."""
        sandboxes = self._pipeline.store.registry.by_id.values()
        return [
            sandbox for sandbox in sandboxes if sandbox.state not in FREED and sandbox.state is not State.HANDED_OVER
        ]

    def _unfinished(self) -> bool:
        """Tell whether waiting may still help any sandbox."""
        return any(
            sandbox.state in SENDABLE or sandbox.state is State.ACCEPTED
            for sandbox in self._remaining()
            if not sandbox.paused
        )

    def deadline(self, sandbox: Sandbox) -> float:
        """Return the end (wall clock) for all that can still arrive before it; the rest goes behind, as if in time."""
        target = self._pipeline.runner.hand_over_to
        if target is not None and self._accepts_all(sandbox, target):
            return self._end  # the custodian is near: all of it has time, the most urgent goes first
        left_s = self._until_s - self._clock.monotonic_s()
        destinations, throughput = self._pipeline.store.registry.destinations, self._pipeline.scheduler.throughput
        rates = (
            (part.size_bytes, throughput.bytes_per_s(destinations[part.destination].server)) for part in sandbox.waiting
        )
        needs_s = max((size_bytes / rate for size_bytes, rate in rates if rate > 0), default=0.0)
        return self._end if needs_s <= left_s else float("inf")

    async def _all_due(self) -> None:
        """Make every waiting file due now."""
        sandboxes = [sandbox.id for sandbox in self._remaining() if sandbox.state in SENDABLE]
        await self._pipeline.store.write(lambda db: updates.due_now(db, sandboxes, int(self._clock.wall_s())))

    async def _mark_lost(self) -> list[Sandbox]:
        """Give up what is left; nothing of it is running. On return it is on the disk. Returns it as it was."""
        lost, now = self._remaining(), int(self._clock.wall_s())

        def change(db: sqlite3.Connection) -> Iterable[int]:
            for sandbox in lost:
                updates.end(db, sandbox=sandbox.id, new=State.LOST, now=now, reason=_reason(sandbox))
                yield sandbox.id

        await self._pipeline.store.write(change, "record-lost")
        return lost

    def _log_endangered(self) -> None:
        left_s = self._until_s - self._clock.monotonic_s()
        log.warn("output-endangered", bytes=self._pipeline.store.registry.bytes_at_risk,
                 jobs=jobs_at_risk(self._remaining()),
                 left_s=round(left_s, 1))  # fmt: skip


def _reason(sandbox: Sandbox) -> str:
    """Write the reason, with what had been in the way: the next run may meet it too."""
    in_the_way = sandbox.reason if sandbox.error_code else ""
    return f"{REASON}; before that: {in_the_way}" if in_the_way else REASON


def jobs_at_risk(sandboxes: Iterable[Sandbox]) -> str:
    """List ``SCHEDD#CLUSTER.PROC=BYTES`` of undelivered sandboxes, most bytes first; the rest as a number."""
    left = [sandbox for sandbox in sandboxes if sandbox.state not in FREED]
    first = heapq.nlargest(_NAMED, left, key=lambda sandbox: sandbox.bytes_left)
    named = [f"{sandbox.run.schedd}#{sandbox.run.job_id}={sandbox.bytes_left}" for sandbox in first]
    return " ".join([*named, *([f"+{len(left) - _NAMED}"] if len(left) > _NAMED else [])])
