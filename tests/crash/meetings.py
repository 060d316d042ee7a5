"""Orders that meet a run in each of its states: a schedule for each pair, because chance visits some of them only.

Some states last for milliseconds. So the manager reads the order at the moment in which its ledger has the state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sandbox_manager.custody.queries import CODE_OF
from stageout.core.states import State
from stageout.model.job import Status
from stageout.wire.custody import Action

#: Misfortunes that lead to a state, where ordinary jobs come there seldom.
WAYS = {
    State.RETRY_WAIT: ("destination_down",),
    State.FAILED: ("all_refuse",),
    State.CANCELLED: ("remove_job",),
    State.SUPERSEDED: ("linger", "vacate"),
    State.LOST: ("sync_refused", "file_gone"),
}
#: Orders that may end output before the access point has read of its end.
_ENDING = frozenset({Action.CANCEL, Action.SUPERSEDE, Action.FORGET})
_HELD = (
    "SELECT s.job, s.number, s.named_tickets, group_concat(t.ticket, ' ') "
    "FROM sandboxes s LEFT JOIN tickets t ON t.sandbox = s.id WHERE s.state = {} GROUP BY s.id ORDER BY s.id"
)


class Meeting(NamedTuple):
    """An order, and the state in which it finds a run."""

    action: Action
    state: State


class Meetings:
    """The part of a simulation that gives one order at the right moment, once."""

    def _meet(self) -> None:
        """Give the order if a run is in the state now."""
        for node in self.nodes if self.meeting is not None and self.troubled else ():
            pipeline = getattr(node.process, "pipeline", None)
            rows = node.rows(_HELD.format(CODE_OF[self.meeting.state])) if node.is_alive and pipeline else []
            if rows:
                self._order_now(node, pipeline, *rows[0])
                break

    def _order_now(self, node: Any, pipeline: Any, job: str, number: int, named: str, tickets: str) -> None:
        action, state = self.meeting
        self.meeting = None
        if action in _ENDING:
            self.excused |= {ticket for ticket, made_by in self.by_ticket.items() if made_by.job == job}
            self.excused |= set((tickets or "").split())
        if action is Action.CANCEL and job in self.schedd.jobs_:
            self.world.say(f"{job} is removed")
            self.given_up.add(job)
            self.running.pop(job, None)
            self.schedd.change(job, status=int(Status.REMOVED))
        url = f"copy://{self.random.choice(('h1', 'h2'))}/{job.split('#')[1].split('.')[0]}/"
        confirmed = tuple((named or tickets or "").split()) if action is Action.CONFIRM else ()
        sheet = self.agent.odd_order(
            node.identity, action, job, number, confirmed, url if action is Action.REDIRECT else ""
        )
        if sheet is not None:
            self.world.say(f"{action.value} meets {job} {number}, {state}")
            self._judge_orders(sheet)
            with self.world.inside(node.process):
                node.process.spawn(pipeline.apply_orders(sheet))
