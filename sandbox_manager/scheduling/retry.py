"""Retry decisions for files: from the table of error classes, never from the text of a message.

A fault of the node, and a failure to reach the server at all, say nothing about the file. Such attempts are *excused*:
they do not count against ``STAGEOUT_ATTEMPTS``, only the give-up time ends them. The circuit breaker of a server that
was not reached opens (``scheduling/breaker.py``), so that one file probes it now and then instead of all waiting files
together.

A name in the DNS that does not exist is the matter of the file's owner, or of the node's resolver. A resolver that is
set up wrongly, or cut off, may deny all names. So a denial counts only if the resolver has found another name since it
first denied this one, and has never found this one.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sandbox_manager.rules import RetryRules
from sandbox_manager.scheduling.breaker import PROBE_LONGEST_S
from stageout.core.errors import UNREACHABLE, Advice, ErrorClass
from stageout.core.pauses import growing_s
from stageout.core.states import FileState
from stageout.movers.results import Answer, Delivered, Failure

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
    :param unknown_name: a name that does not exist is the owner's matter (:class:`NameRecord`).
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
    """Return the wait after a number of earlier attempts: it doubles from ``initial_delay_s`` up to ``max_delay_s``."""
    return growing_s(rules.initial_delay_s, rules.max_delay_s, attempts + 1)


#: Names of each kind that are remembered, the newest ones.
MOST = 1000
#: Failures that a server reports. Its name was resolved before.
_SAID = frozenset(
    {
        ErrorClass.TLS_UNTRUSTED, ErrorClass.CREDENTIAL_REFUSED, ErrorClass.PERMISSION_DENIED, ErrorClass.NOT_FOUND,
        ErrorClass.CONFLICT, ErrorClass.TOO_LARGE, ErrorClass.THROTTLED, ErrorClass.SERVER_BUSY,
        ErrorClass.SERVER_ERROR, ErrorClass.NO_SPACE_REMOTE, ErrorClass.QUOTA_EXCEEDED,
    }
)  # fmt: skip


def is_owners_matter(host: str, denied: Mapping[str, float], found: Mapping[str, float]) -> bool:
    """Tell whether the denial of a name says something of the name.

    :param denied: monotonic time of the first denial of each name. :param found: monotonic time after which each name
        was resolved last.
    """
    if host not in denied or host in found:
        return False
    return any(at_s > denied[host] for at_s in found.values())


class NameRecord:
    """The names that this node has resolved, or could not, since its manager started."""

    def __init__(self) -> None:
        self._denied: dict[str, float] = {}
        self._found: dict[str, float] = {}

    def record_answers(self, server: str, answers: Iterable[Answer], began_s: float, now_s: float) -> bool:
        """Learn from the answers of a batch. Return whether a denied name is the matter of its owner.

        :param server: host and port of its server. :param began_s: monotonic time of the call.
        :param now_s: monotonic time of its end.
        """
        host = _name_in(server)
        if not host:
            return False
        told = list(answers)
        if any(map(_has_answered, told)):
            self._denied.pop(host, None)
            _put(self._found, host, began_s)
        elif host not in self._denied and any(map(_has_denied, told)):
            _put(self._denied, host, now_s)
        return is_owners_matter(host, self._denied, self._found)


def _has_answered(answer: Answer) -> bool:
    return isinstance(answer, Delivered) or (
        isinstance(answer, Failure) and answer.blames_destination and answer.kind in _SAID
    )


def _has_denied(answer: Answer) -> bool:
    return isinstance(answer, Failure) and answer.kind is ErrorClass.NAME_NOT_RESOLVED


def _name_in(server: str) -> str:
    """Return the host if it is a name that only a resolver knows, else ""."""
    host = server.rpartition("@")[2]
    if host.startswith("["):
        return ""
    host = host.partition(":")[0].rstrip(".").lower()
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "" if host in ("", "localhost") else host
    return ""


def _put(names: dict[str, float], host: str, at_s: float) -> None:
    names.pop(host, None)
    names[host] = at_s
    if len(names) > MOST:
        del names[next(iter(names))]
