"""One batch: the files before and after a plugin's call, what its answers mean, where that leaves the sandboxes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sandbox_manager.custody import queries, redirects, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.ledger import get_meta, set_meta
from sandbox_manager.custody.queries import DamagedText
from sandbox_manager.custody.redirects import FallbackRules
from sandbox_manager.custody.running import RunningBatch
from sandbox_manager.custody.spool import Spool
from sandbox_manager.rules import RetryRules
from sandbox_manager.scheduling.breaker import Breakers
from sandbox_manager.scheduling.planner import BatchPlan
from sandbox_manager.scheduling.retry import BatchOutcome, decide_retry
from sandbox_manager.transfer.handover import deposits_of, for_these
from stageout.core import log
from stageout.core.classad_parser import parse_ad
from stageout.core.classads import ClassAd, ClassAdSyntaxError
from stageout.core.errors import SILENT, UNREACHABLE, Advice, ErrorClass
from stageout.core.states import FileState, State
from stageout.core.units import count
from stageout.model.file import StoredFile
from stageout.model.sandbox import ACTIVE, Destination, Sandbox
from stageout.movers.mover import Batch, Equipment, Stopped
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.results import CUSTODY, Answer, Delivered, Failure, Gone, InCustody, SentFile
from stageout.movers.schemes import NODE_PATH, method_of
from stageout.wire.custody import JobKey

_JOBS_NAMED = 3
_ERROR_CHARS = 500
_IN_DOUBT = Failure(
    ErrorClass.UNKNOWN,
    "a name of the file came or went while it was sent, so nothing proves that it stayed as it was; it is sent again "
    "by itself",
    at_once=True,
    of_node=True,
)


@dataclass(frozen=True)
class Vanished(Failure):
    """The spool has not the file any more, or the ledger not what belongs to it: nobody can deliver it."""

    of_node: bool = True


def _of_node(kind: ErrorClass, message: str) -> Failure:
    """Return a failure that says nothing of the server: nothing was sent to it."""
    return Failure(kind, message, of_node=True)


_CHANGED = _of_node(
    ErrorClass.SOURCE_CHANGED, "the file was changed after the job had ended, so it is not what the job made"
)


class BatchRun(RunningBatch):
    """A batch on its way. :meth:`run` blocks and belongs into a thread.

    :param directory: work directory to make. :param lifetime_s: limit of the plugin's call.
    :param settings: for its environment.
    :ivar asked: the plugin was run. :ivar state_bytes: of the quota, that plugins of its user keep for their next call.
    :param held: what all the files are sent with, None for nothing. :param now: wall clock.
    """

    def __init__(
        self,
        spool: Spool,
        table: PluginsTable,
        destination: Destination,
        jobs: Mapping[JobKey, int],
        user: tuple[int, int],
        files: Sequence[StoredFile],
        directory: Path,
        lifetime_s: float,
        settings: Mapping[str, str],
        held: StoredCredentials | None = None,
        now: float = 0.0,
    ) -> None:
        super().__init__(frozenset(item.sandbox for item in files), destination, jobs)
        self.asked = False
        self.state_bytes = 0
        self.lifetime_s = lifetime_s
        self.uid = user[0]
        self._held = held
        self._now = now
        self._spool = spool
        self._plugin = table.find(destination.plugin, destination.scheme)
        self._user = user
        self._files = files
        self._directory = directory
        self._settings = settings

    def run(self) -> list[Answer]:
        """Send the files that are still what was accepted. One answer per file.

        :raises Stopped: by :meth:`stop`. :raises OSError: the work directory could not be made.
        """
        problems = [self._problem(item) for item in self._files]
        whole = [index for index, problem in enumerate(problems) if problem is None]
        before = {index: self._change_mark(self._files[index]) for index in whole}
        try:
            sent = self._call(whole) if whole else []
        except Stopped as stopped:
            delivered = {whole[at]: answer for at, answer in stopped.delivered.items()}
            told = {at: self._if_unchanged(self._files[at], before[at], answer) for at, answer in delivered.items()}
            raise Stopped(
                {at: answer for at, answer in told.items() if isinstance(answer, (Delivered, InCustody))}
            ) from None
        answers = dict(zip(whole, sent))
        return [
            problem or self._if_unchanged(self._files[index], before[index], answers[index])
            for index, problem in enumerate(problems)
        ]

    def _call(self, whole: Sequence[int]) -> list[Answer]:
        files = [self._files[index] for index in whole]
        if self._plugin is None:
            text = f"no plugin of this node moves {method_of(self.destination.scheme)} URLs any more: its administrator"
            text += " can name one in FILETRANSFER_PLUGINS"
            return [_of_node(ErrorClass.PLUGIN_BROKEN, text)] * len(files)
        try:
            equipment = self._equipment()
        except OSError as problem:
            text = f"the spool has lost a credential: {problem.strerror}"
            return [_of_node(ErrorClass.CREDENTIAL_MISSING, text)] * len(files)
        except ClassAdSyntaxError:
            text = "the ledger's record of the job's ad is damaged: its disk may be failing"
            return [Vanished(ErrorClass.LOCAL_FILE, text)] * len(files)
        ended = self._held.expired(self._now) if self._held else None
        if ended is not None:
            text = f"{ended.shown} ended at {utc(ended.expires_at)}"
            return [_of_node(ErrorClass.CREDENTIAL_EXPIRED, text)] * len(files)
        settings = {**for_these(self._settings, whole), "STAGEOUT_STATE_DIR": str(self._spool.state_of(*self._user))}
        cargo = tuple(
            SentFile(self._spool.path(item.ticket, item.position), item.url, item.name, item.size_bytes, deposit)
            for item, deposit in zip(files, deposits_of(settings, len(files)))
        )
        group = self._spool.group_of(*self._user)
        batch = Batch(self._directory, self._plugin, *self._user, cargo, self.lifetime_s, equipment, settings, group)
        self.asked = True
        try:
            return self._mover.run(batch)
        finally:
            self.state_bytes = self._spool.state.size_bytes(self._user[0])

    def _equipment(self) -> Equipment:
        held = self._held
        if held is None:
            return Equipment()
        ads = [parse_ad(text) if text else ClassAd() for text in (held.job_ad, held.plugin_data)]
        return Equipment(self._spool.safe.contents(held), *ads)

    def _problem(self, item: StoredFile) -> Failure | None:
        """Return the difference between a file and its state at acceptance; None when there is none."""
        if isinstance(item.url, DamagedText):
            return Vanished(
                ErrorClass.LOCAL_FILE, f"the ledger's record of {item.name} is damaged: its disk may be failing"
            )
        try:
            return None if self._spool.unchanged(item) else _CHANGED
        except FileNotFoundError:
            text = "is gone from the spool: it was deleted there, or its disk is damaged"
            return Vanished(ErrorClass.LOCAL_FILE, f"{item.name} {text}")
        except OSError as problem:
            return _of_node(ErrorClass.UNKNOWN, f"the spool cannot be read: {problem.strerror}")

    def _change_mark(self, item: StoredFile) -> tuple[int, int]:
        try:
            return self._spool.change_mark(item.ticket, item.position)
        except OSError:
            return -1, -1

    def _if_unchanged(self, item: StoredFile, before: tuple[int, int], answer: Answer) -> Answer:
        """Return the plugin's answer if it sent the accepted content. In doubt the file is sent again."""
        after = self._change_mark(item)
        problem = self._problem(item)
        if problem is not None:
            return problem
        if after != before and after[1] == before[1]:
            return _CHANGED
        return _IN_DOUBT if after != before and isinstance(answer, (Delivered, InCustody)) else answer


def manager_error(problem: Exception) -> Failure:
    """Return the failure of a file whose batch ended in an error of the manager, which says nothing of the server."""
    return _of_node(ErrorClass.UNKNOWN, f"the manager cannot send this file: {problem!r}"[:_ERROR_CHARS])


def job_names(jobs: Iterable[str]) -> str:
    """Return the jobs of a batch, for plugins that tell them to a service."""
    names = list(dict.fromkeys(jobs))
    more = f" and {len(names) - _JOBS_NAMED} more" if len(names) > _JOBS_NAMED else ""
    return " ".join(names[:_JOBS_NAMED]) + more


def utc(wall_s: float) -> str:
    """Format a wall clock for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))


def decide_batch(
    files: Sequence[StoredFile],
    answers: Sequence[Answer],
    rules: RetryRules,
    due_since: Callable[[int], float],
    now: float,
    renewable: bool = False,
    answered: bool = False,
    streams: int = 0,
    unknown_name: bool = False,
) -> BatchOutcome:
    """Decide about every file of a batch that has ended.

    :param due_since: wall clock from which the time to give up counts, by sandbox. :param now: wall clock.
    :param renewable: the files are sent with credentials in custody.
    :param answered: their server has answered another batch meanwhile, so a silence says nothing about it.
    :param streams: that the plugin was given for each file.
    :param unknown_name: as of :func:`decide_retry`; then it closes the server to nobody.
    """
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    tried = [answer for answer in answers if not isinstance(answer, Failure) or answer.blames_destination]
    away = (UNREACHABLE if answered else SILENT) - ({ErrorClass.NAME_NOT_RESOLVED} if unknown_name else set())
    outcome = BatchOutcome(
        delivered_bytes=sum(item.size_bytes for item, answer in zip(files, answers) if isinstance(answer, Delivered)),
        tried=bool(tried),
        unreachable=bool(tried) and all(isinstance(one, Failure) and one.kind in away for one in tried),
        retry_after_s=max((item.retry_after_s for item in failures), default=0.0),
    )
    for item, answer in zip(files, answers):
        if isinstance(answer, InCustody):
            outcome.handed_over.append(delivered_result(item, answer, now))
            continue
        if isinstance(answer, Delivered):
            outcome.delivered.append(delivered_result(item, answer, now, streams))
            continue
        verdict = decide_retry(rules, answer, item.attempts - 1, item.excused, due_since(item.sandbox), now,
                        renewable=renewable, unknown_name=unknown_name)  # fmt: skip
        result = replace(
            item, state=verdict.state, next_attempt=verdict.next_attempt, excused=item.excused + verdict.excused,
            error_code=answer.kind.code, error=verdict.message, of_node=not answer.blames_destination,
        )  # fmt: skip
        if isinstance(answer, Vanished):
            outcome.lost.append(result)
            continue
        (outcome.failed if verdict.state is FileState.FAILED else outcome.waiting).append(result)
    return outcome


def delivered_result(item: StoredFile, answer: Gone, now: float, streams: int = 0) -> StoredFile:
    """Return a file as it is now that it has arrived, or is in custody elsewhere.

    The plugin's times count only if they are within the attempt.

    :param now: wall clock. :param streams: that the plugin was given for the file.
    """
    item = replace(item, next_attempt=0, error_code=0, error="", of_node=False)
    if isinstance(answer, InCustody):
        return replace(item, state=FileState.HANDED_OVER, verified=CUSTODY, digest=answer.receipt)
    told = answer.facts
    began_at = told.began_at if item.facts.began_at <= told.began_at <= now else item.facts.began_at
    ended_at = told.ended_at if began_at <= told.ended_at <= now else int(now)
    facts = replace(told, began_at=began_at, ended_at=ended_at, streams=told.streams or streams)
    return replace(item, state=FileState.DELIVERED, verified=answer.verified, digest=answer.digest, facts=facts)


def update_breaker(breakers: Breakers, server: str, outcome: BatchOutcome) -> bool:
    """Tell a server's breaker what a batch saw. True when a server that was away has come back."""
    if not outcome.tried:
        return False
    if not outcome.unreachable:
        back = breakers.reached(server)
        if back:
            log.event("breaker-closed", server=server)
        return back
    reason = next(
        one.error
        for one in outcome.waiting + outcome.failed
        if not one.of_node and ErrorClass.from_code(one.error_code) in SILENT
    )
    if breakers.unreachable(server, reason, outcome.retry_after_s):
        probe_in_s = round(breakers.opens_in_s(server))
        log.warn("breaker-opened", server=server, reason=reason, probe_in_s=probe_in_s)
    return False


def mark_lost(db: sqlite3.Connection, outcome: BatchOutcome, now: int) -> None:
    """Sandboxes of which the spool has lost a file are LOST: what of them is still on its way is dropped."""
    for item in outcome.lost:
        if updates.state_of(db, item.sandbox) is State.MOVING:
            log.error("sandbox-lost", sandbox=item.sandbox, ticket=item.ticket, file=item.position, reason=item.error,
                      advice="who deletes files in the spool, or is its disk failing?")  # fmt: skip
            updates.end(db, item.sandbox, State.LOST, now, item.error, item.error_code)


def update_state(
    db: sqlite3.Connection, sandbox: int, is_open: Callable[[int], bool], fallback: FallbackRules, now: int
) -> None:
    """Put a sandbox into the state that its files ask for, after some of them got an outcome.

    :param is_open: may files be sent to this destination now? :param fallback: rules of its use.
    """
    box = queries.sandbox(db, sandbox)
    if box is None or box.state is not State.MOVING:
        return
    updates.note_failures(db, sandbox, now)
    if box.fallback:
        redirects.use_if_due(db, box, fallback, now)
        box = queries.sandbox(db, sandbox) or box
    if box.moving:
        updates.touch(db, sandbox)
        return
    if not box.waiting and not box.failed:
        if box.custody:
            updates.set_state(db, sandbox, State.HANDED_OVER, now, f"in custody of {_custodians(box.custody)}")
        else:
            reasons = (redirects.delivery_reason(db, box), _node_path_reason(db, box))
            updates.end(db, sandbox, State.DELIVERED, now, "; ".join(filter(None, reasons)))
        return
    worst = queries.first_error(db, sandbox)
    reason, code = (worst.error, worst.error_code) if worst else (redirects.present_reason(box), 0)
    if not box.waiting:
        updates.end(db, sandbox, State.FAILED, now, redirects.failure_reason(box, worst, reason), code)
    elif any(part.ready_at <= now and is_open(part.destination) for part in box.waiting) and not box.paused:
        # Its turn comes again; meanwhile the place in the data slot is free for others.
        updates.set_state(db, sandbox, State.CONFIRMED, now, reason, code)
    else:
        text = _waits_for(reason, code)
        updates.set_state(db, sandbox, State.RETRY_WAIT, now, text, code)


def _node_path_reason(db: sqlite3.Connection, box: Sandbox) -> str:
    """Say that delivered output is on this node; only of the first one of an owner, who may know it afterwards."""
    files = sum(
        number for scheme, number in queries.delivered_by_scheme(db, box.id).items() if method_of(scheme) == "file"
    )
    name = f"node path told {box.owner}"
    if not files or get_meta(db, name):
        return ""
    set_meta(db, name, "yes")
    node = box.slot_name.partition("@")[2] or box.slot.startd
    return f"{count(files, 'file')} delivered to the filesystem of the node {node}: {NODE_PATH}"


def _custodians(receipts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text.split(" ")[0] for text in receipts))


def _waits_for(reason: str, code: int) -> str:
    """Return the reason without the number of the attempt, for which reports have a field of its own."""
    if code and ErrorClass.from_code(code).advice is Advice.NEEDS_CREDENTIAL:
        return f"needs credential: {reason}"
    return reason or "waits for the server"


def claim_files(
    db: sqlite3.Connection, batch: BatchPlan, batch_bytes: int, now: int
) -> tuple[list[StoredFile], list[int]]:
    """Files that the batch moves, MOVING from now on, and the sandboxes that were looked at.

    :param batch_bytes: after so many no further file is taken.
    """
    taken: list[StoredFile] = []
    looked_at: list[int] = []
    room = batch_bytes
    for part in batch.parts:
        state = updates.state_of(db, part.sandbox)
        if state not in ACTIVE or (taken and room <= 0):
            continue
        files = updates.take_files(db, part.sandbox, batch.destination, now, part.files, max(room, 0))
        room -= sum(item.size_bytes for item in files)
        taken.extend(files)
        if files and state is State.LEASED:
            updates.set_state(db, part.sandbox, State.MOVING, now)
        looked_at.append(part.sandbox)
    return taken, looked_at
