"""One batch: the files before and after a plugin's call, what its answers mean, where that leaves the sandboxes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_manager import lookups, records
from sandbox_manager.breaker import Breakers
from sandbox_manager.credentials import HeldSurroundings
from sandbox_manager.handover import deposits_of, for_these
from sandbox_manager.ledger import DamagedText
from sandbox_manager.lookups import FileRow
from sandbox_manager.planner import BatchPlan
from sandbox_manager.records import FileResult
from sandbox_manager.retry import SILENT, UNREACHABLE, RetryRules, judge
from sandbox_manager.sandbox import ACTIVE, Destination, FileState
from sandbox_manager.spool import HeldFile, Spool
from stageout.core import log
from stageout.core.classads import ClassAd, ClassAdSyntaxError, parse_ad
from stageout.core.errors import Advice, ErrorClass
from stageout.core.states import State
from stageout.movers.mover import Batch, Cargo, Equipment, StoppableMover, Stopped
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.results import CUSTODY, Answer, Delivered, Failure, Gone, InCustody
from stageout.movers.schemes import method_of

_JOBS_NAMED = 3
_IN_DOUBT = Failure(
    ErrorClass.UNKNOWN,
    "a name of the file came or went while it was sent, so nothing proves that it stayed as it was; it is sent again "
    "by itself",
    at_once=True,
)


@dataclass(frozen=True)
class OfTheSpool(Failure):
    """A failure that says nothing of the server."""


@dataclass(frozen=True)
class Vanished(OfTheSpool):
    """The spool has not the file any more, or the ledger not what belongs to it: nobody can deliver it."""


_CHANGED = OfTheSpool(
    ErrorClass.SOURCE_CHANGED, "the file was changed after the job had ended, so it is not what the job made"
)


class BatchRun:
    """A batch on its way. :meth:`run` blocks and belongs into a thread.

    :param directory: work directory to make. :param lifetime_s: limit of the plugin's call.
    :param settings: for its environment.
    :ivar began_s: monotonic time of its start. :ivar answered: its server has answered another batch since then.
    :ivar state_bytes: of the quota, that plugins of its user keep for their next call.
    :param held: what all the files are sent with, None for nothing. :param now: wall clock.
    """

    def __init__(
        self,
        spool: Spool,
        table: PluginsTable,
        destination: Destination,
        user: tuple[int, int],
        files: Sequence[FileRow],
        directory: Path,
        lifetime_s: float,
        settings: Mapping[str, str],
        held: HeldSurroundings | None = None,
        now: float = 0.0,
    ) -> None:
        self.asked = False
        self.began_s = 0.0
        self.answered = False
        self.state_bytes = 0
        self._held = held
        self._now = now
        self.sandboxes = frozenset(item.sandbox for item in files)
        self.jobs: dict[str, int] = {}  # job -> its sandbox, as the pipeline knows them
        self._spool = spool
        self._plugin = table.find(destination.plugin, destination.scheme)
        self.destination = destination
        self._user = user
        self._files = files
        self._directory = directory
        self._lifetime_s = lifetime_s
        self._settings = settings
        self._mover = StoppableMover()

    def stop(self) -> None:
        """Kill the plugin; :meth:`run` then raises Stopped. From any thread."""
        self._mover.stop()

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
            return [Failure(ErrorClass.PLUGIN_BROKEN, text)] * len(files)
        try:
            equipment = self._equipment()
        except OSError as problem:
            text = f"the spool has lost a credential: {problem.strerror}"
            return [Failure(ErrorClass.CREDENTIAL_MISSING, text)] * len(files)
        except ClassAdSyntaxError:
            text = "the ledger's record of the job's ad is damaged: its disk may be failing"
            return [Vanished(ErrorClass.LOCAL_FILE, text)] * len(files)
        ended = self._held.expired(self._now) if self._held else None
        if ended is not None:
            text = f"{ended.shown} ended at {utc(ended.expires_at)}"
            return [Failure(ErrorClass.CREDENTIAL_EXPIRED, text)] * len(files)
        settings = {**for_these(self._settings, whole), "STAGEOUT_STATE_DIR": str(self._spool.state_of(*self._user))}
        cargo = tuple(
            Cargo(self._spool.path(item.ticket, item.position), item.url, item.name, item.size_bytes, deposit)
            for item, deposit in zip(files, deposits_of(settings, len(files)))
        )
        group = self._spool.group_of(*self._user)
        batch = Batch(self._directory, self._plugin, *self._user, cargo, self._lifetime_s, equipment, settings, group)
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

    def _problem(self, item: FileRow) -> Failure | None:
        """Return the difference between a file and its state at acceptance; None when there is none."""
        if isinstance(item.url, DamagedText):
            return Vanished(
                ErrorClass.LOCAL_FILE, f"the ledger's record of {item.name} is damaged: its disk may be failing"
            )
        try:
            return None if self._spool.unchanged(item.ticket, _held(item)) else _CHANGED
        except FileNotFoundError:
            text = "is gone from the spool: it was deleted there, or its disk is damaged"
            return Vanished(ErrorClass.LOCAL_FILE, f"{item.name} {text}")
        except OSError as problem:
            return OfTheSpool(ErrorClass.UNKNOWN, f"the spool cannot be read: {problem.strerror}")

    def _change_mark(self, item: FileRow) -> tuple[int, int]:
        try:
            return self._spool.change_mark(item.ticket, item.position)
        except OSError:
            return -1, -1

    def _if_unchanged(self, item: FileRow, before: tuple[int, int], answer: Answer) -> Answer:
        """The plugin's answer, if what it sent is what was accepted; in doubt the file is sent again."""
        after = self._change_mark(item)
        problem = self._problem(item)
        if problem is not None:
            return problem
        if after != before and after[1] == before[1]:
            return _CHANGED
        return _IN_DOUBT if after != before and isinstance(answer, (Delivered, InCustody)) else answer


def _held(item: FileRow) -> HeldFile:
    return HeldFile(
        item.position, item.url, item.name, item.size_bytes, item.mtime_ns, item.inode
    )  # fmt: skip


def job_names(jobs: Iterable[str]) -> str:
    """Return the jobs of a batch, for plugins that tell them to a service."""
    names = list(dict.fromkeys(jobs))
    more = f" and {len(names) - _JOBS_NAMED} more" if len(names) > _JOBS_NAMED else ""
    return " ".join(names[:_JOBS_NAMED]) + more


def utc(wall_s: float) -> str:
    """A wall clock for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))


@dataclass
class Judged:
    """The decisions on the files of a batch.

    :param lost: gone from the spool, and their sandboxes with them.
    :param tried: some of them say something of the server.
    :param unreachable: not one of these got an answer from it. :param retry_after_s: that it asked for.
    """

    delivered: list[FileResult] = field(default_factory=list)
    waiting: list[FileResult] = field(default_factory=list)
    failed: list[FileResult] = field(default_factory=list)
    lost: list[FileResult] = field(default_factory=list)
    handed_over: list[FileResult] = field(default_factory=list)
    delivered_bytes: int = 0
    tried: bool = False
    unreachable: bool = False
    retry_after_s: float = 0.0

    @property
    def all(self) -> list[FileResult]:
        """Every result."""
        return [*self.delivered, *self.handed_over, *self.waiting, *self.failed, *self.lost]


def judge_batch(
    files: Sequence[FileRow],
    answers: Sequence[Answer],
    rules: RetryRules,
    due_since: Callable[[int], float],
    now: float,
    renewable: bool = False,
    answered: bool = False,
) -> Judged:
    """Decide about every file of a batch that has ended.

    :param due_since: wall clock from which the time to give up counts, by sandbox. :param now: wall clock.
    :param renewable: the files are sent with credentials in custody.
    :param answered: their server has answered another batch meanwhile, so a silence says nothing about it.
    """
    judged = Judged()
    for item, answer in zip(files, answers):
        if isinstance(answer, InCustody):
            judged.handed_over.append(delivered_result(item, answer))
            continue
        if isinstance(answer, Delivered):
            judged.delivered.append(delivered_result(item, answer))
            judged.delivered_bytes += item.size_bytes
            continue
        verdict = judge(rules, answer, item.attempts - 1, item.excused, due_since(item.sandbox), now,
                        renewable=renewable)  # fmt: skip
        result = FileResult(
            item.ticket_id, item.position, verdict.state, verdict.next_attempt, answer.kind.code, verdict.message,
            excused=verdict.excused,
        )  # fmt: skip
        if isinstance(answer, Vanished):
            judged.lost.append(result)
            continue
        (judged.failed if verdict.state is FileState.FAILED else judged.waiting).append(result)
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    tried = [answer for answer in answers if not isinstance(answer, OfTheSpool)]
    judged.tried = bool(tried)
    away = UNREACHABLE if answered else SILENT
    judged.unreachable = judged.tried and all(isinstance(one, Failure) and one.kind in away for one in tried)
    judged.retry_after_s = max((item.retry_after_s for item in failures), default=0.0)
    return judged


def delivered_result(item: FileRow, answer: Gone) -> FileResult:
    """Return the record of a file that has arrived, or is in custody elsewhere."""
    if isinstance(answer, InCustody):
        return FileResult(
            item.ticket_id, item.position, FileState.HANDED_OVER, verified=CUSTODY, digest=answer.receipt
        )  # fmt: skip
    return FileResult(
        item.ticket_id, item.position, FileState.DELIVERED, verified=answer.verified, digest=answer.digest
    )  # fmt: skip


def mind_breaker(breakers: Breakers, server: str, judged: Judged) -> bool:
    """Tell a server's breaker what a batch saw. True when a server that was away has come back."""
    if not judged.tried:
        return False
    if not judged.unreachable:
        back = breakers.reached(server)
        if back:
            log.event("breaker", server=server, circuit="closed")
        return back
    reason = next(one.error for one in judged.waiting + judged.failed if ErrorClass.from_code(one.error_code) in SILENT)
    if breakers.unreachable(server, reason, judged.retry_after_s):
        probe_in_s = round(breakers.opens_in_s(server))
        log.warn("breaker", server=server, circuit="open", reason=reason, probe_in_s=probe_in_s)
    return False


def record_arrived(
    db: sqlite3.Connection, files: Sequence[FileRow], delivered: Mapping[int, Gone],
    is_open: Callable[[int], bool], limit: int, now: int,
) -> set[int]:  # fmt: skip
    """Record what of a stopped batch has arrived, and where that leaves its sandboxes. Returns those.

    :param delivered: by index in ``files``. :param is_open: and ``limit`` as of :func:`settle`.
    """
    records.record_results(db, [delivered_result(files[index], answer) for index, answer in delivered.items()])
    sandboxes = {files[index].sandbox for index in delivered}
    for sandbox in sandboxes:
        settle(db, sandbox, is_open, limit, now)
    return sandboxes


def lose(db: sqlite3.Connection, files: Sequence[FileRow], judged: Judged, now: int) -> None:
    """Sandboxes of which the spool has lost a file are LOST: what of them is still on its way is dropped.

    :param files: of the batch.
    """
    owners = {(item.ticket_id, item.position): item for item in files}
    for result in judged.lost:
        item = owners[result.ticket_id, result.position]
        if records.state_of(db, item.sandbox) is State.MOVING:
            log.error("lost", sandbox=item.sandbox, ticket=item.ticket, file=item.position, reason=result.error,
                      advice="who deletes files in the spool, or is its disk failing?")  # fmt: skip
            records.end(db, item.sandbox, State.LOST, now, result.error, result.error_code)


def settle(db: sqlite3.Connection, sandbox: int, is_open: Callable[[int], bool], limit: int, now: int) -> None:
    """Put a sandbox into the state that its files ask for, after some of them were judged.

    :param is_open: may files be sent to this destination now? :param limit: of attempts, 0 without one.
    """
    box = lookups.sandbox(db, sandbox)
    if box is None or box.state is not State.MOVING:
        return
    if box.moving:
        records.touch(db, sandbox)
        return
    if not box.waiting and not box.failed:
        if box.custody:
            records.set_state(db, sandbox, State.HANDED_OVER, now, f"in custody of {_custodians(box.custody)}")
        else:
            records.end(db, sandbox, State.DELIVERED, now)
        return
    worst = lookups.first_error(db, sandbox)
    reason, code = (worst.error, worst.error_code) if worst else ("", 0)
    if not box.waiting:
        records.end(db, sandbox, State.FAILED, now, reason, code)
    elif any(part.ready_at <= now and is_open(part.destination) for part in box.waiting) and not box.paused:
        # Its turn comes again; meanwhile the place in the data slot is free for others.
        records.set_state(db, sandbox, State.LEASED, now)
        records.set_state(db, sandbox, State.CONFIRMED, now, reason, code)
    else:
        text = _waits_for(reason, code)
        records.set_state(db, sandbox, State.RETRY_WAIT, now, text, code)


def _custodians(receipts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text.split(" ")[0] for text in receipts))


def _waits_for(reason: str, code: int) -> str:
    """Return the reason without the number of the attempt, for which reports have a field of its own."""
    if code and ErrorClass.from_code(code).advice is Advice.NEEDS_CREDENTIAL:
        return f"needs credential: {reason}"
    return reason or "waits for the server"


def take(db: sqlite3.Connection, batch: BatchPlan, batch_bytes: int, now: int) -> tuple[list[FileRow], list[int]]:
    """Files that the batch moves, MOVING from now on, and the sandboxes that were looked at.

    :param batch_bytes: after so many no further file is taken.
    """
    taken: list[FileRow] = []
    looked_at: list[int] = []
    room = batch_bytes
    for part in batch.parts:
        state = records.state_of(db, part.sandbox)
        if state not in ACTIVE or (taken and room <= 0):
            continue
        files = records.take_files(db, part.sandbox, batch.destination, now, part.files, max(room, 0))
        room -= sum(item.size_bytes for item in files)
        taken.extend(files)
        if files and state is State.LEASED:
            records.set_state(db, part.sandbox, State.MOVING, now)
        looked_at.append(part.sandbox)
    return taken, looked_at


def give_back(
    db: sqlite3.Connection, batch: BatchPlan, is_open: Callable[[int], bool], attempts_limit: int, now: int
) -> Iterator[int]:
    """Let undecided files of a batch wait again. Yield the sandboxes that changed.

    :param is_open: whether files may be sent to a destination now.
    """
    for part in batch.parts:
        if records.moving_back(db, part.sandbox, batch.destination):
            settle(db, part.sandbox, is_open, attempts_limit, now)
            yield part.sandbox
        elif records.unlease(db, part.sandbox, now):
            yield part.sandbox
