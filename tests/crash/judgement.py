"""What is held against a schedule: at each edit and order, and at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from schedd_agent.model import Job, Status
from stageout.wire.custody import Action, OrderSheet
from tests.crash.parties import HOLE_S, LEASE_S, POLL_S
from tests.crash.pool_model import (
    Execution,
)


class Judgement:
    """The part of a simulation that knows what was promised."""

    def _judge_edit(self, before: Job, after: Job, edit: Any) -> None:
        self.world.say(f"{edit.label} {edit.job_id}: {after.shown.state} {after.shown.reason}")
        counts = self._counting(before.name)
        if edit.label == "edit-delivered" and counts is not None:
            missing = [
                url for ticket, urls in counts.accepted.items() for url in urls if not self._arrived(counts, url)
            ]
            if missing:
                self.world.violation(f"{before.name} is called delivered, {missing} never arrived")
        if edit.label == "edit-hold" and "was changed" in after.shown.reason:
            self.world.violation(f"{before.name}: nobody changed anything, but: {after.shown.reason}")
        if edit.label == "edit-rerun" and counts is not None:
            if "nothing was heard" in after.shown.reason:
                self._judge_silence(after)
            elif not self.excused & counts.accepted.keys() and not self.restored and not self._clocks_jumped:
                self.world.violation(f"{before.name}: accepted output is lost for no reason: {after.shown.reason}")

    @property
    def _clocks_jumped(self) -> bool:
        return any(node.machine.wall_offset_s for node in self.nodes)

    def _judge_orders(self, sheet: OrderSheet) -> None:
        """Only what was removed is cancelled: absence from the queue says nothing."""
        for order in sheet.orders:
            if order.action is Action.CANCEL and order.job not in self.schedd.removed | self.given_up:
                self.world.violation(f"{order.job} is cancelled although nobody removed it")

    def _judge_silence(self, job: Job) -> None:
        """Silence counts only while it could have been broken: agent and collector up, and no report there."""
        self.collector.ads()
        for node in self.nodes:
            if node.manager in job.shown.reason:
                since_s = max(self.agent.started_s, self.collector.last_there_s.get((node.manager, job.name), 0.0))
                looks = [since_s, *(at_s for at_s in self.collector.looks if at_s > since_s)]
                gaps = (after - before for before, after in zip(looks, looks[1:]))
                view_s = sum(gap for gap in gaps if gap <= HOLE_S)
                if view_s < LEASE_S - 2 * POLL_S - 10:
                    self.world.violation(f"{job.name}: silence of {view_s:.0f} s of view was taken for loss")

    def _counting(self, name: str) -> Execution | None:
        known = (one for one in reversed(self.executions) if one.number not in self.destination.unknown)
        return next((one for one in known if one.job == name and one.counted), None)

    def _arrived(self, execution: Execution, url: str) -> bool:
        found = self.destination.content.get(url)
        return found is not None and found[0] >= execution.number

    def _judge_the_end(self) -> None:
        for name, past in self.schedd.history.items():
            counts = self._counting(name)
            if past.status == Status.COMPLETED and name not in self.schedd.let_go:
                for url in self.outputs[name]:
                    found = self.destination.content.get(url)
                    if counts is None or found is None or found[0] < counts.number:
                        self.world.violation(f"{name} left as completed, {url} holds {found}")
        self._judge_tickets()

    def _judge_tickets(self) -> None:
        nodes = [one.rows("SELECT ticket FROM tickets") for one in self.nodes]
        owned = Counter(row[0] for rows in nodes for row in rows)
        for ticket, count in owned.items():
            if count > 1:
                self.world.violation(f"ticket {ticket} is owned {count} times")
