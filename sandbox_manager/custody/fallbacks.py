"""Fallbacks: the second destination that a job names (StageOutFallback), for output that the first does not take.

The manager redirects the undelivered files of a sandbox (``custody/redirects.py``) when the sandbox would fail, or has
been tried for STAGEOUT_FALLBACK_AFTER. The last failure of one of its files must be the destination's: a fault of the
node sends nothing there. This happens in the transaction that would otherwise record the failure.
Each file has the fact in its row, so no crash, retry or redirect sends it to the fallback a second time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sandbox_manager.custody import queries, redirects, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.redirects import FindPlugin, NotRedirected
from stageout.core import log
from stageout.core.units import count
from stageout.model.file import StoredFile
from stageout.model.sandbox import Sandbox, destination_of
from stageout.movers.schemes import fallback_problem

#: Reports repeat the reasons of all sandboxes.
_REASON_CHARS = 300


class FallbackRules(NamedTuple):
    """The rules of the node.

    :param find_plugin: for the scheme of a fallback. :param after_s: see :class:`sandbox_manager.rules.RetryRules`.
    :param reason_away: returns why the server of a destination cannot be reached, "" where it can.
    """

    find_plugin: FindPlugin
    after_s: float
    reason_away: Callable[[int], str]


def problem_of(
    url: str, plugin: str, files: Iterable[StoredFile], held: StoredCredentials | None, find_plugin: FindPlugin
) -> str:
    """Return why the files of a hand-off cannot be sent to this fallback; "" when they can.

    :param plugin: of the hand-off. :param held: its credentials, None without any.
    """
    problem = fallback_problem(url)
    if problem:
        return problem
    stored = held or StoredCredentials("", "", "", ())
    try:
        for old, item in {destination_of(plugin, item.url, stored.digest): item for item in files}.items():
            redirects.target_for(item, old, stored, url, find_plugin)
    except NotRedirected as refused:
        return str(refused)[:_REASON_CHARS]
    return ""


def use_if_due(db: sqlite3.Connection, box: Sandbox, rules: FallbackRules, now: int) -> bool:
    """Send undelivered files to the fallback if their time has come. Return whether the sandbox has changed."""
    if not box.fallback or not (_has_failed(box) or _has_waited(box, rules.after_s, now)):
        return False
    why = destination_failure(db, box, rules.reason_away)
    if not why:
        return False
    use(db, box, why, rules.find_plugin, now)
    found = queries.sandbox(db, box.id)
    return found is not None and found.change != box.change


def use(db: sqlite3.Connection, box: Sandbox, why: str, find_plugin: FindPlugin, now: int) -> bool:
    """Send undelivered files to the fallback with fresh attempts. Return whether any go there.

    :param why: the failure of the first destination.
    """
    if not box.fallback:
        return False
    try:
        files = redirects.fall_back(db, box.id, box.fallback, find_plugin)
    except NotRedirected as refused:
        if not box.fallback_note:
            problem = str(refused)[:_REASON_CHARS]
            updates.ignore_fallback(db, box.id, problem)
            log.warn("fallback-ignored", job=box.run.job, run=box.run.number, problem=problem)
        return False
    if files:
        reason = box.fallback_note or why[:_REASON_CHARS]
        updates.keep_fallback_reason(db, box.id, reason)
        updates.fresh_attempts(db, box.id, now)
        updates.set_reason(db, box.id, _present(box.fallback, reason))
        log.event("fallback-used", job=box.run.job, run=box.run.number, files=files, to=box.fallback, reason=why)
    return bool(files)


def _has_failed(box: Sandbox) -> bool:
    return bool(box.failed) and not box.waiting and not box.moving


def _has_waited(box: Sandbox, after_s: float, now: int) -> bool:
    return bool(box.waiting or box.failed) and not box.paused and 0 < after_s <= now - box.due_since


def destination_failure(db: sqlite3.Connection, box: Sandbox, reason_away: Callable[[int], str]) -> str:
    """Return the failure of the first destination; "" while nothing was tried there, or only the node failed."""
    worst = queries.first_error(db, box.id, of_destination=True)
    if worst is not None:
        return worst.error or "an attempt failed"
    return next(filter(None, (reason_away(part.destination) for part in box.waiting)), "")


# ---- texts for the owner ---------------------------------------------------------------------------------------------


def _present(url: str, reason: str) -> str:
    return f"goes to the fallback {url} because the destination failed: {reason}"


def present_reason(box: Sandbox) -> str:
    """Return the reason of a sandbox that has not failed since it went to its fallback; "" for others."""
    return _present(box.fallback, box.fallback_note) if box.fallback and box.fallback_note else ""


def delivery_reason(db: sqlite3.Connection, box: Sandbox) -> str:
    """Return which part of a delivered sandbox is at the fallback, and why; "" when nothing is."""
    files = queries.count_below(db, box.id, redirects.directory(box.fallback)) if present_reason(box) else 0
    if not files:
        return ""
    return f"{count(files, 'file')} delivered to the fallback {box.fallback} because the destination failed: " + (
        box.fallback_note
    )


def failure_reason(box: Sandbox, worst: StoredFile | None, reason: str) -> str:
    """Return the reason of a failed sandbox, with what became of its fallback.

    :param worst: the file whose failure counts. :param reason: that failure.
    """
    if not box.fallback:
        return f"{reason}; the fallback was not used: {box.fallback_note}" if box.fallback_note else reason
    is_there = worst is not None and worst.fell_back and worst.url.startswith(redirects.directory(box.fallback))
    if not is_there:
        return reason
    if worst is not None and worst.of_node:
        return f"{reason}; the destination had failed before: {box.fallback_note}"
    both = f"Destination: {box.fallback_note}. Fallback {box.fallback}: {reason}"
    return f"the destination and the fallback failed. {both}"
