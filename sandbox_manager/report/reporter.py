"""The manager's own ads: the report to the agents, and the figures for the slot ads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sandbox_manager.custody import queries
from sandbox_manager.custody.ledger import get_meta, set_meta
from sandbox_manager.custody.spool import Spool
from sandbox_manager.delivery.handover import written
from sandbox_manager.intake.admission import LEAST_FREE_BYTES
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report.collector import Collector
from sandbox_manager.report.drain import jobs_at_risk
from sandbox_manager.report.flows import flow_reports
from sandbox_manager.rules import last_attempt_at
from stageout import __version__
from stageout.condor.bindings import CondorError
from stageout.core import durable, log
from stageout.core.clock import Clock
from stageout.core.config import Settings
from stageout.core.signing import SigningKey
from stageout.core.states import FileState, State
from stageout.core.units import MB
from stageout.model.file import StoredFile
from stageout.model.sandbox import SENDABLE, Destination, Sandbox
from stageout.movers.schemes import shown_url
from stageout.wire.custody import (
    BUSY_REPORT_INTERVAL_S,
    FILES_SHOWN,
    SERVERS_SHOWN,
    EncodedSandbox,
    FileReport,
    RefusalReport,
    Report,
    SandboxReport,
    encoded,
    report_ad,
)
from stageout.wire.deposits import Receipt

_NUMBERS_AT_ONCE = 1000
_FILES_IN_ALL = 1000
_DIGEST_CHARS = 160
_LEAST_INTERVAL_S = 1.0
_AGAIN_S = 10.0
_STATE_INTERVAL_S = 5.0
#: Free bytes of the spool's filesystem below which the node takes no new jobs: enough for the hand-offs of those that
#: run. It takes jobs again when twice as many are free.
_LOW_FREE_BYTES = 4 * LEAST_FREE_BYTES
#: A smaller filesystem never has the room at which a node takes jobs again.
_USABLE_BYTES = 2 * _LOW_FREE_BYTES
_HYSTERESIS_PERCENT = 20.0
_HEARTBEAT_S = 30
_PAUSE_PER_REPORT = 10
#: States of output whose owner waits for it. Access points must soon notice that its node is gone.
_WAITING = SENDABLE | {State.ACCEPTED}
#: Seconds that a hand-over waits at most for the report about it.
_TELL_S = 5.0
_PAUSED = "paused by its owner, `stageout resume` goes on"
#: Shortest time that the collector keeps the last report. A longer lease makes it longer. An access point that was
#: away for a shorter time still reads what became of its output.
_LAST_WORD_S = 7200
_LAST_WORD_MOST_S = 30 * 86400
STATE_FILE = "state.json"
#: States after which no file of the sandbox may arrive any more.
_GIVEN_UP = (State.LOST, State.SUPERSEDED, State.CANCELLED)
#: States in which the access point records the files that do not arrive.
_DROPPED = frozenset({State.LOST, State.CANCELLED})
_WORDS = {
    FileState.MOVING: State.MOVING, FileState.DELIVERED: State.DELIVERED, FileState.FAILED: State.FAILED,
    FileState.HANDED_OVER: State.HANDED_OVER,
}  # fmt: skip


def file_report(row: StoredFile, sandbox: Sandbox, destinations: Mapping[int, Destination]) -> FileReport:
    """Report one file as people see it."""
    state = _WORDS.get(row.state)
    if state is None:
        state = State.RETRY_WAIT if row.attempts and row.state is FileState.WAITING else sandbox.state
    place = destinations.get(row.destination)
    is_gone = row.state is FileState.DELIVERED
    facts = row.facts if is_gone or row.state is FileState.MOVING else replace(row.facts, began_at=0)
    return FileReport(
        name=row.name, url=shown_url(row.url), size_bytes=row.size_bytes, state=str(state),
        plugin=place.plugin.rpartition("/")[2] if place else "", attempts=row.attempts, error_code=row.error_code,
        error=row.error, next_attempt_at=_next_attempt(row, sandbox),
        verified=row.verified, excused=row.excused, digest=_shown_digest(row.proof) if is_gone else "",
        of_node=row.of_node, **vars(facts),
    )  # fmt: skip


def _shown_digest(text: str) -> str:
    """Return the first pairs that have room in a report. A plugin may have written anything."""
    return text if len(text) <= _DIGEST_CHARS else text[: _DIGEST_CHARS + 1].rpartition(" ")[0]


def _next_attempt(row: StoredFile, sandbox: Sandbox) -> int:
    return row.next_attempt if row.state is FileState.WAITING and not _stands_still(sandbox) else 0


def _stands_still(sandbox: Sandbox) -> bool:
    """Tell whether its owner has paused a sandbox that would otherwise go on."""
    return sandbox.paused and (sandbox.state in SENDABLE or sandbox.state is State.ACCEPTED)


def _reason(sandbox: Sandbox) -> str:
    if not _stands_still(sandbox):
        return sandbox.reason
    return _PAUSED + (f"; before that: {sandbox.reason}" if sandbox.reason else "")


def sandbox_report(
    sandbox: Sandbox,
    attempts_limit: int,
    files: Sequence[FileReport],
    begun: tuple[str, ...] = (),
    only_here: int = 0,
    gives_up_at: int = 0,
) -> SandboxReport:
    """Report one sandbox as agents and people see it.

    :param begun: receipts of what custodians may have. :param only_here: files left that are in none of them.
    """
    may_be_away = bool(begun) and (sandbox.state in _GIVEN_UP or sandbox.state in SENDABLE)
    return SandboxReport(
        job=sandbox.run.job, number=sandbox.run.number, owner=sandbox.owner, state=str(sandbox.state),
        change=sandbox.change, reason=_reason(sandbox), error_code=sandbox.error_code,
        tickets=sandbox.tickets or sandbox.named_tickets, files_total=sandbox.files_total,
        files_left=sandbox.files_left, bytes_total=sandbox.bytes_total,
        bytes_left=sandbox.bytes_left, attempts=sandbox.attempts,
        attempts_limit=attempts_limit, excused=sandbox.excused,
        next_attempt_at=0 if _stands_still(sandbox) else sandbox.next_attempt_at,
        accepted_at=sandbox.accepted_at, data_slot=sandbox.slot_name, files=tuple(files),
        custody=begun if may_be_away else sandbox.custody, holdings=sandbox.holdings,
        files_only_here=only_here if may_be_away and sandbox.state in SENDABLE else 0,
        files_dropped=sandbox.files_dropped if sandbox.state in _DROPPED else 0,
        bytes_dropped=sandbox.bytes_dropped if sandbox.state in _DROPPED else 0,
        group=sandbox.group, confirmed_at=sandbox.confirmed_at, ended_at=sandbox.ended_at,
        paused=int(_stands_still(sandbox)), refused=sandbox.refused, gives_up_at=gives_up_at,
        fallback=sandbox.fallback, fallback_note=sandbox.fallback_note,
        failing_since=sandbox.failing_since,
    )  # fmt: skip


@dataclass(frozen=True)
class _Shown:
    """A sandbox as it was last reported. :param files: number of files with details."""

    __slots__ = ("change", "encoded", "files")
    change: int
    files: int
    encoded: EncodedSandbox


class Reporter:
    """Publisher of the report, on a change at most once a second, and every STAGEOUT_REPORT_INTERVAL.

    Figures, and the report itself while the collector refuses it, go into ``run/state.json`` for the startd cron.

    :param owner_uid: who may read that file (the startd's user); -1: nobody else. :param key: signs the reports.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spool: Spool,
        collector: Collector,
        clock: Clock,
        settings: Settings,
        owner_uid: int,
        key: SigningKey,
        handoffs: Callable[[], dict[str, Any]] = dict,
        refusals: Iterable[RefusalReport] = (),
    ) -> None:
        self._pipeline = pipeline
        self._spool = spool
        self._collector = collector
        self._clock = clock
        self._interval_s = settings.number("STAGEOUT_REPORT_INTERVAL")
        self._high = settings.number("STAGEOUT_SPOOL_HIGH_PERCENT")
        self._low = max(0.0, self._high - _HYSTERESIS_PERCENT)
        self._owner_uid = owner_uid
        self._key = key
        self._shown: dict[int, _Shown] = {}
        self._number = 0
        self._numbers_end = 0
        self._full_since = 0
        self._made_s = clock.monotonic_s()
        self._refusal: str | None = None
        self._leaving = False
        self._handoffs, self._refusals = handoffs, refusals
        self._publishing = asyncio.Lock()
        self._requested = self._published_request = 0
        self._began_s = self._built_in_s = 0.0

    def leave(self) -> None:
        """From now on every report may be the last, and the startd that would carry it may be gone already."""
        self._leaving = True
        self._pipeline.store.changed.set()

    async def run(self) -> None:
        """Report until cancelled."""
        changed = self._pipeline.store.changed
        last_s = float("-inf")
        while True:
            if changed.is_set() or self._clock.monotonic_s() - last_s >= self._next_in_s():
                changed.clear()
                await self.publish()
                last_s = self._clock.monotonic_s()
                await self._pause(self._pause_s())
            else:
                self.write_state(None)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), min(_STATE_INTERVAL_S, self._next_in_s()))

    async def _pause(self, left_s: float) -> None:
        """Make no report for this time, even if sandboxes change. The figures for the slots do not pause."""
        while left_s > _STATE_INTERVAL_S:
            await asyncio.sleep(_STATE_INTERVAL_S)
            self.write_state(None)
            left_s -= _STATE_INTERVAL_S
        await asyncio.sleep(left_s)

    def _next_in_s(self) -> float:
        """Return the seconds after a report in which the next one is due, even if nothing changes."""
        interval_s = self._pipeline.scheduler.leases.interval_s(self._interval_s)
        states = self._pipeline.store.registry.states
        if any(states[state] for state in _WAITING):
            interval_s = min(interval_s, BUSY_REPORT_INTERVAL_S)
        return min(interval_s, _AGAIN_S) if self._pipeline.admission.report_problem else interval_s

    def _pause_s(self) -> float:
        """Return the seconds after a report in which no change causes another.

        With very many sandboxes a report costs more: hand-offs must not wait for reports. How long the collector took
        does not count, or the queue would not hear of this node long after an outage. Building may also take long
        because the disk is slow, so the pause never puts off the report that is due anyway.
        """
        return max(_LEAST_INTERVAL_S, min(_PAUSE_PER_REPORT * self._built_in_s, self._next_in_s()))

    async def tell(self) -> None:
        """Publish what is in the ledger now; of many who ask this at once, one does it for all. Waits 5 s at most."""
        self._requested += 1
        work = asyncio.get_running_loop().create_task(self.publish(self._requested))
        await asyncio.wait({work}, timeout=_TELL_S)

    async def publish(self, wanted: int = 0) -> None:
        """Build and publish one report now. A collector that refuses or is away is no error.

        :param wanted: of :meth:`tell`: nothing is to be done when a report that began after it is out.
        """
        async with self._publishing:
            if not wanted or self._published_request < wanted:
                asked = self._requested
                await self._publish()
                self._published_request = asked

    async def _publish(self) -> None:
        self._began_s = self._clock.monotonic_s()
        try:
            ad = await self._report()
            if self._leaving:
                longest_s = math.ceil(min(self._pipeline.scheduler.leases.longest_s, _LAST_WORD_MOST_S))
                ad.update(self.figures(), ClassAdLifetime=max(_LAST_WORD_S, longest_s))
        except Exception as problem:  # whatever it is: without reports nothing is sent
            self._note(repr(problem))
            log.error(
                "report-failed", problem=repr(problem), again_in_s=_AGAIN_S, advice="hand-offs are refused meanwhile"
            )
            self.write_state(None)
            return
        finally:
            self._built_in_s = self._clock.monotonic_s() - self._began_s
        self._note("")
        try:
            with durable.step("report-advertise"):
                await self._collector.advertise(ad)
            self._tell(None)
        except (CondorError, OSError) as problem:
            self._tell(str(problem))
        if self._refusal is not None and self._leaving:
            await self._publish_apart(ad)
        self.write_state(ad if self._refusal is not None else None)

    def _note(self, problem: str) -> None:
        """Remember whether the last report could be made. Nothing is taken over without reports."""
        self._pipeline.admission.note_report(problem)
        if not problem:
            self._made_s = self._clock.monotonic_s()

    def facts(self) -> Mapping[str, Any]:
        """Return the reporter's state for the control socket."""
        return {"ReportProblem": self._pipeline.admission.report_problem, "ReportAge": int(self.age_s)}

    @property
    def age_s(self) -> float:
        """Seconds since the last report was made."""
        return self._clock.monotonic_s() - self._made_s

    def _begun(self, sandboxes: Iterable[Sandbox]) -> dict[int, Mapping[int, Receipt]]:
        """Return the files of these sandboxes that custodians may hold now. A writer may change it meanwhile."""
        target = self._pipeline.runner.hand_over_to
        return {sandbox.id: target.begun(sandbox.id) for sandbox in sandboxes} if target else {}

    async def _publish_apart(self, ad: Mapping[str, Any]) -> None:
        try:
            with durable.step("report-last"):
                await self._collector.advertise_apart(ad)
        except (CondorError, OSError) as problem:
            log.error("last-report-failed", problem=problem)

    def _tell(self, refusal: str | None) -> None:
        if refusal != self._refusal:
            if refusal is None:
                log.event("report-route-changed", to="collector")
            else:
                log.warn("report-route-changed", to="slot ads", reason=refusal)
        self._refusal = refusal

    async def _report(self) -> dict[str, Any]:
        number = await self._next_number()
        await self._pipeline.runner.plugins_ended()
        self._began_s = self._clock.monotonic_s()  # the wait for plugins does not count as work
        pipeline, leases = self._pipeline, self._pipeline.scheduler.leases
        lease_s = leases.reported(number)
        sandboxes = sorted(
            pipeline.store.registry.by_id.values(), key=lambda sandbox: (sandbox.files_left == 0, -sandbox.error_code)
        )
        encoded = await self._sandboxes(sandboxes)
        figures = self.figures()
        report = Report(
            manager=pipeline.manager.name,
            key=pipeline.manager.key,
            number=number,
            sent_at=int(self._clock.wall_s()),
            acknowledged=dict(pipeline.store.acknowledged),
            bytes_at_risk=pipeline.store.registry.bytes_at_risk,
            sandboxes=(),
            servers=tuple(pipeline.scheduler.breakers.troubles()[:SERVERS_SHOWN]),
            unleased=leases.unleased(),
            ends_in_s=leases.ends_in_s,
            flows=tuple(flow_reports(pipeline)),
            cpu_slots=pipeline.rules.limits.cpus,
            data_slots=self._positions,
            spool_bytes=pipeline.admission.used_bytes,
            spool_limit_bytes=pipeline.admission.quota_bytes,
            refusals=tuple(self._refusals),
            interval_s=math.ceil(self._next_in_s()),
            lease_s=lease_s,
            version=__version__,
            handoffs=figures.get("StageOutHandoffs", 0),
            handoffs_refused=figures.get("StageOutSynchronous", {}),
            full_since=self._full_since,
        )
        return report_ad(report, self._key, encoded)

    async def _sandboxes(self, sandboxes: Sequence[Sandbox]) -> list[EncodedSandbox]:
        room = _FILES_IN_ALL
        wanted: dict[int, int] = {}
        for sandbox in sandboxes:
            known = self._shown.get(sandbox.id)
            share = known.files if known and known.change == sandbox.change else min(FILES_SHOWN, room)
            if not known or known.change != sandbox.change:
                wanted[sandbox.id] = share
            room = max(0, room - min(share, sandbox.files_total + sandbox.files_dropped))
        given_up = {sandbox.id for sandbox in sandboxes if sandbox.state in _DROPPED}
        files = await self._pipeline.store.ledger.read(
            lambda db: {
                sandbox: _some_files(db, sandbox, limit, sandbox in given_up) for sandbox, limit in wanted.items()
            }
        )
        begun = self._begun(sandbox for sandbox in sandboxes if sandbox.id in wanted)
        only_here = await self._only_here(begun)
        rules = self._pipeline.rules.retry
        places = self._pipeline.store.registry.destinations
        fresh: dict[int, _Shown] = {}
        for sandbox in sandboxes:
            if sandbox.id in wanted:
                rows = [file_report(row, sandbox, places) for row in files[sandbox.id]]
                receipts = written(begun.get(sandbox.id, {}))
                report = sandbox_report(
                    sandbox,
                    attempts_limit=rules.attempts,
                    files=rows,
                    begun=receipts,
                    only_here=only_here.get(sandbox.id, 0),
                    gives_up_at=last_attempt_at(sandbox, rules),
                )
                fresh[sandbox.id] = _Shown(sandbox.change, len(rows), encoded(report))
            else:
                fresh[sandbox.id] = self._shown[sandbox.id]
        self._shown = fresh
        return [item.encoded for item in fresh.values()]

    async def _only_here(self, begun: Mapping[int, Mapping[int, Receipt]]) -> dict[int, int]:
        """Count the files that were not handed over, of a sandbox that may have been handed over in part."""
        target = self._pipeline.runner.hand_over_to
        some = {sandbox: numbers for sandbox, numbers in begun.items() if numbers}
        if target is None or not some:
            return {}
        return await self._pipeline.store.ledger.read(
            lambda db: {sandbox: target.only_here(queries.left_files(db, sandbox), some[sandbox]) for sandbox in some}
        )

    async def _next_number(self) -> int:
        if self._number >= self._numbers_end:
            end = await self._pipeline.store.ledger.write(
                lambda db: _reserve_numbers(db, int(self._clock.wall_s() * 1000)), "report-number"
            )
            self._number, self._numbers_end = end - _NUMBERS_AT_ONCE, end
        self._number += 1
        return self._number

    # ---- figures for the slot ads ------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return the attributes for the slot ads."""
        admission = self._pipeline.admission
        used, quota = admission.used_bytes, max(1, admission.quota_bytes)
        free = self._spool.free_bytes()
        has_room = self._has_room(100 * admission.movable_bytes / quota, free)
        self._full_since = 0 if has_room else self._full_since or int(self._clock.wall_s())
        takes_work = has_room and not self._leaving and not admission.report_problem and admission.end.fits
        places = self._positions
        return {
            "StageOutManager": self._pipeline.manager.name,
            "StageOutDataSlots": places,
            "StageOutDataSlotsFree": max(0, places - admission.positions_used),
            "StageOutSpoolMB": used // MB,
            "StageOutSpoolFreeMB": max(0, min(quota - used, free)) // MB,
            "StageOutBytesAtRisk": self._pipeline.store.registry.bytes_at_risk,
            "StageOutAccept": takes_work,
            "StageOutHeartbeat": int(self._clock.wall_s() // _HEARTBEAT_S * _HEARTBEAT_S),
            **self._handoffs(),
            **self._pilot_figures(),
        }

    @property
    def _positions(self) -> int:
        """Return the sandboxes that the data slots of the node take."""
        limits = self._pipeline.rules.limits
        return (limits.active + limits.depth) * limits.cpus

    def _has_room(self, percent: float, free_bytes: int) -> bool:
        """Tell whether the node takes new jobs, with hysteresis. :param percent: fullness of the spool.

        A filesystem that is too small for any output keeps no job away: deliveries make no room on it.
        """
        if self._spool.total_bytes() < _USABLE_BYTES:
            return True
        if not self._full_since:
            return percent < self._high and free_bytes >= _LOW_FREE_BYTES
        return percent <= self._low and free_bytes >= 2 * _LOW_FREE_BYTES

    def _pilot_figures(self) -> dict[str, Any]:
        """Return the further figures for the operator of a pilot."""
        if not self._pipeline.rules.is_pilot:
            return {}
        sandboxes = self._pipeline.store.registry.by_id.values()
        return {"StageOutDraining": self._leaving, "StageOutJobsAtRisk": jobs_at_risk(sandboxes)}

    def write_state(self, ad: Mapping[str, Any] | None) -> None:
        """Write ``run/state.json``. Not durable: it is written anew at every start.

        :param ad: the report's ad while the collector does not take it; None leaves what is there.
        """
        path = self._spool.root / "run" / STATE_FILE
        report = {name: ad[name] for name in ad if name.startswith("StageOut")} if ad else {}
        if ad is None and self._refusal is not None:
            report = _read_report(path)
        try:
            _replace(path, json.dumps({"figures": self.figures(), "report": report}), self._owner_uid)
        except OSError as problem:
            log.warn("state-write-failed", problem=problem)


def _some_files(db: sqlite3.Connection, sandbox: int, limit: int, with_dropped: bool) -> list[StoredFile]:
    """Choose files for the report. A sandbox whose files cannot be read is reported without them: others go on."""
    try:
        return queries.files_in_trouble_first(db, sandbox, limit, with_dropped)
    except (sqlite3.DatabaseError, ValueError, TypeError) as problem:
        log.error(
            "ledger-read-failed", sandbox=sandbox, problem=problem, advice="see whether the disk of the spool is sound"
        )
        return []


def _reserve_numbers(db: sqlite3.Connection, wall_ms: int) -> int:
    """Reserve the next numbers and return their end: a restored ledger must not repeat numbers that were used."""
    end = max(int(get_meta(db, "report_number", "0")), wall_ms) + _NUMBERS_AT_ONCE
    set_meta(db, "report_number", str(end))
    return end


def _read_report(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(durable.read_file(path))["report"]
    except (OSError, ValueError, KeyError):
        return {}
    return found


def _replace(path: Path, text: str, uid: int) -> None:
    aside = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = durable.disk.open(aside, flags, 0o600)
    try:
        if os.geteuid() == 0 and uid >= 0:
            durable.disk.fchown(descriptor, uid, -1)
        durable.write_all(descriptor, text.encode("utf-8"))
    finally:
        durable.disk.close(descriptor)
    durable.disk.replace(aside, path)
