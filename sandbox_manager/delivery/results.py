"""The results of a batch: the decision about each file, the states of its sandboxes, and the totals for the metrics."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from sandbox_manager.custody import queries, redirects, updates
from sandbox_manager.custody.ledger import get_meta, set_meta
from sandbox_manager.custody.redirects import FallbackRules
from sandbox_manager.rules import RetryRules
from sandbox_manager.scheduling.breaker import Breakers
from sandbox_manager.scheduling.retry import decide_retry
from stageout.core import log
from stageout.core.errors import OF_NODE, SILENT, UNREACHABLE, Advice, ErrorClass
from stageout.core.metrics import OTHER, FairLabels, host_of
from stageout.core.states import FileState, State
from stageout.core.units import count
from stageout.model.batch import BatchOutcome
from stageout.model.file import StoredFile
from stageout.model.sandbox import Sandbox
from stageout.movers.results import CUSTODY, Answer, Delivered, Failure, Gone, InCustody
from stageout.movers.schemes import NODE_PATH, method_of

_ERROR_CHARS = 500


@dataclass(frozen=True)
class Vanished(Failure):
    """The spool has not the file any more, or the ledger not what belongs to it: nobody can deliver it."""

    of_node: bool = True


def failure_of_node(kind: ErrorClass, message: str) -> Failure:
    """Return a failure that says nothing of the server: nothing was sent to it."""
    return Failure(kind, message, of_node=True)


def manager_error(problem: Exception) -> Failure:
    """Return the failure of a file whose batch ended in an error of the manager, which says nothing of the server."""
    return failure_of_node(ErrorClass.UNKNOWN, f"the manager cannot send this file: {problem!r}"[:_ERROR_CHARS])


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
        verdict = decide_retry(
            rules,
            failure=answer,
            attempts=item.attempts - 1,
            excused=item.excused,
            due_since=due_since(item.sandbox),
            now=now,
            renewable=renewable,
            unknown_name=unknown_name,
        )
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
        return replace(item, state=FileState.HANDED_OVER, verified=CUSTODY, proof=answer.receipt)
    told = answer.facts
    began_at = told.began_at if item.facts.began_at <= told.began_at <= now else item.facts.began_at
    ended_at = told.ended_at if began_at <= told.ended_at <= now else int(now)
    facts = replace(told, began_at=began_at, ended_at=ended_at, streams=told.streams or streams)
    return replace(item, state=FileState.DELIVERED, verified=answer.verified, proof=answer.digest, facts=facts)


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
            updates.end(db, item.sandbox, State.LOST, now, reason=item.error, error_code=item.error_code)


def update_state(
    db: sqlite3.Connection, sandbox_id: int, is_open: Callable[[int], bool], fallback: FallbackRules, now: int
) -> None:
    """Put a sandbox into the state that its files ask for, after some of them got an outcome.

    :param is_open: may files be sent to this destination now? :param fallback: rules of its use.
    """
    sandbox = queries.sandbox(db, sandbox_id)
    if sandbox is None or sandbox.state is not State.MOVING:
        return
    updates.note_failures(db, sandbox_id, now)
    if sandbox.fallback:
        redirects.use_if_due(db, sandbox, fallback, now)
        sandbox = queries.sandbox(db, sandbox_id) or sandbox
    if sandbox.moving:
        updates.touch(db, sandbox_id)
        return
    if not sandbox.waiting and not sandbox.failed:
        if sandbox.custody:
            updates.set_state(
                db,
                sandbox=sandbox_id,
                new=State.HANDED_OVER,
                now=now,
                reason=f"in custody of {_custodians(sandbox.custody)}",
            )
        else:
            reasons = (redirects.delivery_reason(db, sandbox), _node_path_reason(db, sandbox))
            updates.end(db, sandbox=sandbox_id, new=State.DELIVERED, now=now, reason="; ".join(filter(None, reasons)))
        return
    worst = queries.first_error(db, sandbox_id)
    reason, code = (worst.error, worst.error_code) if worst else (redirects.present_reason(sandbox), 0)
    if not sandbox.waiting:
        updates.end(
            db,
            sandbox=sandbox_id,
            new=State.FAILED,
            now=now,
            reason=redirects.failure_reason(sandbox, worst, reason),
            error_code=code,
        )
    elif any(part.ready_at <= now and is_open(part.destination) for part in sandbox.waiting) and not sandbox.paused:
        # It is sent again later. Until then, other sandboxes can use its position in the data slot.
        updates.set_state(db, sandbox=sandbox_id, new=State.CONFIRMED, now=now, reason=reason, error_code=code)
    else:
        text = _waits_for(reason, code)
        updates.set_state(db, sandbox=sandbox_id, new=State.RETRY_WAIT, now=now, reason=text, error_code=code)


def _node_path_reason(db: sqlite3.Connection, sandbox: Sandbox) -> str:
    """Say that delivered output is on this node; only of the first one of an owner, who may know it afterwards."""
    files = sum(
        number for scheme, number in queries.delivered_by_scheme(db, sandbox.id).items() if method_of(scheme) == "file"
    )
    name = f"node path told {sandbox.owner}"
    if not files or get_meta(db, name):
        return ""
    set_meta(db, name, "yes")
    node = sandbox.slot_name.partition("@")[2] or sandbox.slot.startd
    return f"{count(files, 'file')} delivered to the filesystem of the node {node}: {NODE_PATH}"


def _custodians(receipts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text.split(" ")[0] for text in receipts))


def _waits_for(reason: str, code: int) -> str:
    """Return the reason without the number of the attempt, for which reports have a field of its own."""
    if code and ErrorClass.from_code(code).advice is Advice.NEEDS_CREDENTIAL:
        return f"needs credential: {reason}"
    return reason or "waits for the server"


DELIVERED, HANDED_OVER, NODE_FAULT = "delivered", "handed_over", "node_fault"
_RETRIED, _FAILED = "retried", "failed"
_RESULTS = (DELIVERED, HANDED_OVER, _RETRIED, _FAILED, NODE_FAULT)


class ServerTotals:
    """Attempts and bytes by server, for a bounded number of servers.

    :ivar attempts: files by label and result: :data:`DELIVERED`, :data:`HANDED_OVER`, "retried", "failed" for those
        that were given up, and :data:`NODE_FAULT` for attempts that say nothing of the server.
    """

    def __init__(self) -> None:
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.delivered_bytes: Counter[str] = Counter()
        self._labels = FairLabels(self._forget)
        self._begin(OTHER)

    def begin(self, server: str, owner: str, now_s: float) -> str:
        """Return the label of a server. Its counters exist from then on. :param now_s: monotonic clock."""
        label = self._labels.label(host_of(server), owner, now_s)
        if label not in self.delivered_bytes:
            self._begin(label)
        return label

    def add(self, server: str, owner: str, outcome: BatchOutcome, now_s: float) -> None:
        """Count a batch that a plugin has answered."""
        label = self.begin(server, owner, now_s)
        self.attempts[label, HANDED_OVER] += len(outcome.handed_over)
        self.attempts[label, _FAILED] += len(outcome.failed)
        for item in outcome.waiting:
            is_of_node = item.of_node or ErrorClass.from_code(item.error_code) in OF_NODE
            self.attempts[label, NODE_FAULT if is_of_node else _RETRIED] += 1
        self._add_delivered(label, len(outcome.delivered), outcome.delivered_bytes)

    def add_part(self, server: str, owner: str, sizes: Sequence[int], now_s: float) -> None:
        """Count what had arrived of a batch that was stopped. :param sizes: bytes of its files that arrived."""
        self._add_delivered(self.begin(server, owner, now_s), len(sizes), sum(sizes))

    def _add_delivered(self, label: str, files: int, size_bytes: int) -> None:
        self.attempts[label, DELIVERED] += files
        self.delivered_bytes[label] += size_bytes

    def _begin(self, label: str) -> None:
        """Let the counters of a label exist: Prometheus does not see an increase from nothing to one."""
        self.attempts.update(dict.fromkeys(((label, result) for result in _RESULTS), 0))
        self.delivered_bytes[label] += 0

    def _forget(self, label: str) -> None:
        del self.delivered_bytes[label]
        for result in _RESULTS:
            del self.attempts[label, result]


class TransferTotals:
    """Attempts, bytes and seconds by plugin.

    :ivar attempts: files by plugin and result: an error class, :data:`DELIVERED`, :data:`HANDED_OVER`, or
        :data:`NODE_FAULT` where the class would blame a server for a fault of the node.
    """

    def __init__(self) -> None:
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.delivered_bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def begin(self, plugin: str) -> None:
        """Let the counters of a plugin exist. :param plugin: path of the executable."""
        self.add_part(plugin, (), 0.0)

    def add(self, plugin: str, outcome: BatchOutcome, took_s: float) -> None:
        """Count a batch that a plugin has answered. :param plugin: path of the executable."""
        name = self._took(plugin, took_s)
        self.attempts[name, DELIVERED] += len(outcome.delivered)
        self.attempts[name, HANDED_OVER] += len(outcome.handed_over)
        self.delivered_bytes[name] += outcome.delivered_bytes
        for item in (*outcome.waiting, *outcome.failed):
            kind = ErrorClass.from_code(item.error_code)
            is_clear = kind in OF_NODE or not item.of_node
            self.attempts[name, kind.name.lower() if is_clear else NODE_FAULT] += 1

    def add_part(self, plugin: str, sizes: Sequence[int], took_s: float) -> None:
        """Count what had arrived of a batch that was stopped. :param sizes: bytes of its files that arrived."""
        name = self._took(plugin, took_s)
        self.attempts[name, DELIVERED] += len(sizes)
        self.delivered_bytes[name] += sum(sizes)

    def _took(self, plugin: str, took_s: float) -> str:
        name = PurePath(plugin).name
        self.seconds[name] = self.seconds.get(name, 0.0) + took_s
        return name
