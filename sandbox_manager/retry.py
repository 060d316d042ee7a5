"""Retry decisions for files: from the table of error classes, never from the text of a message.

A failure to reach the server at all says nothing about the file. Such attempts are *excused*: they do not count
against ``STAGEOUT_ATTEMPTS``, only the give-up time ends them; and the server's circuit breaker opens (``breaker.py``),
so that one file probes it now and then instead of all waiting files together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sandbox_manager.breaker import PROBE_LONGEST_S
from sandbox_manager.sandbox import FileState
from stageout.core.errors import Advice, ErrorClass
from stageout.core.pauses import growing_s
from stageout.movers.results import Failure

#: The server was not reached, or it takes nothing now: no file's fault.
UNREACHABLE = frozenset(
    {
        ErrorClass.NAME_NOT_RESOLVED,
        ErrorClass.NAME_LOOKUP_FAILED,
        ErrorClass.CONNECT_FAILED,
        ErrorClass.SERVER_BUSY,
        ErrorClass.THROTTLED,
    }
)
#: The server said nothing for so long that the file was given up. It is away when it answered nobody meanwhile; else
#: the fault may be the file's, so each attempt counts.
SILENT = UNREACHABLE | {ErrorClass.TIMED_OUT, ErrorClass.STALLED, ErrorClass.DEADLINE}
_CREDENTIAL_WAIT_S = 300.0


@dataclass(frozen=True)
class RetryRules:
    """The knobs of the schedule; durations in seconds.

    :param attempts: that count, of one file; 0 without a limit. :param first_s: wait before the second attempt.
    :param longest_s: most between two attempts.
    :param give_up_s: after acceptance, or after the last `stageout retry`.
    :param credential_s: likewise, of a file whose credential in custody has ended: it waits for a new one.
    """

    attempts: int
    first_s: float
    longest_s: float
    give_up_s: float
    credential_s: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The decision on a file: WAITING until ``next_attempt`` (wall clock), or FAILED."""

    state: FileState
    next_attempt: int
    excused: bool
    message: str


def judge(
    rules: RetryRules,
    failure: Failure,
    attempts: int,
    excused: int,
    due_since: float,
    now: float,
    spread: Callable[[], float] = lambda: random.uniform(0.8, 1.2),
    renewable: bool = False,
) -> Verdict:
    """Decide about a file that just failed.

    :param attempts: made before this one. :param excused: of those.
    :param due_since: wall clock from which the time to give up counts. :param now: wall clock.
    :param spread: factor that keeps many files from coming back at the same moment.
    :param renewable: its credentials are in custody: a new one may come, and attempts until then do not count. Without
        them nothing can be renewed, so a refusal is final.
    """
    waits_for_one = renewable and failure.kind.advice is Advice.NEEDS_CREDENTIAL
    if not failure.kind.retryable and not waits_for_one:
        return Verdict(FileState.FAILED, 0, False, failure.message)
    is_excused = failure.kind in UNREACHABLE or waits_for_one
    counted = attempts - excused + (0 if is_excused else 1)
    if rules.attempts and counted >= rules.attempts:
        return Verdict(FileState.FAILED, 0, is_excused, f"{failure.message} (gave up after {attempts + 1} attempts)")
    longest_s = PROBE_LONGEST_S if failure.kind in UNREACHABLE else rules.longest_s
    wait_s = max(min(backoff_s(rules, attempts), longest_s) * spread(), failure.retry_after_s)
    if waits_for_one:
        wait_s = max(wait_s, _CREDENTIAL_WAIT_S)
    if failure.at_once:
        wait_s = 0.0
    limit_s = max(rules.give_up_s, rules.credential_s) if waits_for_one else rules.give_up_s
    last_chance = due_since + limit_s
    if now >= last_chance:
        hours = limit_s / 3600
        return Verdict(FileState.FAILED, 0, is_excused, f"{failure.message} (gave up after {hours:.3g} hours)")
    return Verdict(FileState.WAITING, int(min(now + wait_s, max(last_chance, now + 1))), is_excused, failure.message)


def backoff_s(rules: RetryRules, attempts: int) -> float:
    """Wait after so many earlier attempts: doubles from ``first_s`` up to ``longest_s``."""
    return growing_s(rules.first_s, rules.longest_s, attempts + 1)
