"""Edits of many jobs in few transactions: one attribute with one value in many jobs at once.

A job's own order of attributes stays: its StageOutState is written when all its other attributes are in the schedd's
log. So a death in the middle leaves jobs whose edits the next pass makes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from schedd_agent.edits import Change, Edit
from schedd_agent.queue import QueueError
from stageout.core.durable import step


@dataclass
class Outcome:
    """Result of grouped edits. :param refused: reason by job id. :param left: jobs whose edits are not complete."""

    refused: dict[str, QueueError] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)


#: Sets an attribute in these jobs, in one transaction. It raises QueueError when no job is changed.
Setter = Callable[[Sequence[str], Change], None]


def apply_grouped(edits: Sequence[Edit], set_in: Setter, may_repeat: Callable[[], bool]) -> Outcome:
    """Make edits with the same label, grouped by attribute and value. Repeat a refused group job by job.

    :param edits: of different jobs, without atomic parts and commands.
    :param may_repeat: asked before each repeated edit; False when the time is over. Jobs whose edits are not complete
        then are left to the next pass.
    """
    waiting: Mapping[str, Sequence[Change]] = {edit.job_id: edit.changes for edit in edits}
    done = Outcome()
    with step(edits[0].label):
        while waiting := {job_id: changes for job_id, changes in waiting.items() if changes}:
            change, job_ids = _next_group(waiting)
            _set_in_all(job_ids, change, set_in, may_repeat, done=done)
            ended = done.refused.keys() | done.left
            waiting = {
                job_id: changes[1:] if job_id in job_ids else changes
                for job_id, changes in waiting.items() if job_id not in ended
            }  # fmt: skip
    return done


def _next_group(waiting: Mapping[str, Sequence[Change]]) -> tuple[Change, list[str]]:
    """Return a change and the jobs whose next one it is, of an attribute that no other job writes later."""
    later = {change.name for changes in waiting.values() for change in changes[1:]}
    heads = [changes[0] for changes in waiting.values()]
    change = next((head for head in heads if head.name not in later), heads[0])
    return change, [job_id for job_id, changes in waiting.items() if changes[0] == change]


def _set_in_all(
    job_ids: Sequence[str], change: Change, set_in: Setter, may_repeat: Callable[[], bool], done: Outcome
) -> None:
    try:
        with step("edit-group"):
            set_in(job_ids, change)
        return
    except QueueError as problem:
        if len(job_ids) == 1:
            done.refused[job_ids[0]] = problem
            return
    # One job that has left the queue aborts the transaction of all.
    for job_id in job_ids:
        if not may_repeat():
            done.left.add(job_id)
            continue
        try:
            with step("edit-group"):
                set_in([job_id], change)
        except QueueError as problem:
            done.refused[job_id] = problem
