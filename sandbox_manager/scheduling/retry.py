"""Retry decisions for files: from the table of error classes, never from the text of a message.

A fault of the node, and a failure to reach the server at all, say nothing about the file. Such attempts are
*excused*: they do not count against ``STAGEOUT_ATTEMPTS``, only the give-up time ends them. The circuit breaker of a
server that was not reached opens (``scheduling/breaker.py``), so that one file probes it now and then instead of all
waiting files together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox_manager.rules import RetryRules
from sandbox_manager.scheduling.breaker import PROBE_LONGEST_S
from stageout.core.errors import UNREACHABLE, Advice, ErrorClass
from stageout.core.pauses import growing_s
from stageout.core.states import FileState
from stageout.model.file import StoredFile
from stageout.movers.results import Failure

_CREDENTIAL_WAIT_S = 300.0
#: Attempts with a name that does not exist although the resolver answers.
_NAME_ATTEMPTS = 3


@dataclass(frozen=True)
class Verdict:
    """The decision on a file: WAITING until ``next_attempt`` (wall clock), or FAILED."""

    state: FileState
    next_attempt: int
    excused: bool
    message: str


@dataclass
class BatchOutcome:
    """The decisions on the files of a batch.

    :param lost: gone from the spool, and their sandboxes with them.
    :param tried: some of them say something of the server.
    :param unreachable: not one of these got an answer from it. :param retry_after_s: that it asked for.
    """

    delivered: list[StoredFile] = field(default_factory=list)
    waiting: list[StoredFile] = field(default_factory=list)
    failed: list[StoredFile] = field(default_factory=list)
    lost: list[StoredFile] = field(default_factory=list)
    handed_over: list[StoredFile] = field(default_factory=list)
    delivered_bytes: int = 0
    tried: bool = False
    unreachable: bool = False
    retry_after_s: float = 0.0

    @property
    def all(self) -> list[StoredFile]:
        """Every result."""
        return [*self.delivered, *self.handed_over, *self.waiting, *self.failed, *self.lost]


def decide_retry(
    rules: RetryRules,
    failure: Failure,
    attempts: int,
    excused: int,
    due_since: float,
    now: float,
    spread: Callable[[], float] = lambda: random.uniform(0.8, 1.2),
    renewable: bool = False,
    unknown_name: bool = False,
) -> Verdict:
    """Decide about a file that just failed.

    :param attempts: made before this one. :param excused: of those.
    :param due_since: wall clock from which the time to give up counts. :param now: wall clock.
    :param spread: factor that keeps many files from coming back at the same moment.
    :param renewable: its credentials are in custody: a new one may come, and attempts until then do not count. Without
        them nothing can be renewed, so a refusal is final.
    :param unknown_name: a name that does not exist is the owner's matter (``scheduling/names.py``).
    """
    waits_for_one = renewable and failure.kind.advice is Advice.NEEDS_CREDENTIAL
    if not failure.kind.retryable and not waits_for_one:
        return Verdict(FileState.FAILED, 0, False, failure.message)
    # One that is repeated without a wait must come to an end by its number.
    is_of_node = not failure.blames_destination and not failure.at_once
    is_unknown = unknown_name and failure.kind is ErrorClass.NAME_NOT_RESOLVED
    is_excused = (failure.kind in UNREACHABLE and not is_unknown) or waits_for_one or is_of_node
    counted = attempts - excused + (0 if is_excused else 1)
    if is_unknown and counted >= _NAME_ATTEMPTS:
        why = f"other names resolve on this node; gave up after {counted} attempts"
        return Verdict(FileState.FAILED, 0, is_excused, f"{failure.message} ({why})")
    if rules.attempts and counted >= rules.attempts:
        return Verdict(FileState.FAILED, 0, is_excused, f"{failure.message} (gave up after {counted} attempts)")
    max_delay_s = PROBE_LONGEST_S if failure.kind in UNREACHABLE else rules.max_delay_s
    wait_s = max(min(backoff_s(rules, attempts), max_delay_s) * spread(), failure.retry_after_s)
    if waits_for_one:
        wait_s = max(wait_s, _CREDENTIAL_WAIT_S)
    if failure.at_once:
        wait_s = 0.0
    limit_s = max(rules.delivery_timeout_s, rules.credential_timeout_s) if waits_for_one else rules.delivery_timeout_s
    last_chance = due_since + limit_s
    if now >= last_chance:
        hours = limit_s / 3600
        return Verdict(FileState.FAILED, 0, is_excused, f"{failure.message} (gave up after {hours:.3g} hours)")
    return Verdict(FileState.WAITING, int(min(now + wait_s, max(last_chance, now + 1))), is_excused, failure.message)


def backoff_s(rules: RetryRules, attempts: int) -> float:
    """Wait after so many earlier attempts: doubles from ``initial_delay_s`` up to ``max_delay_s``."""
    return growing_s(rules.initial_delay_s, rules.max_delay_s, attempts + 1)
