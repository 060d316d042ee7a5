"""The charges against a schedule: at each edit and order, and at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sandbox_manager.custody.queries import CODE_OF, STATE_OF
from schedd_agent.file_records import key_of
from stageout.core.states import FREED, State
from stageout.model.job import Job, Status
from stageout.wire.custody import Action, Order, OrderSheet
from tests.crash.observed import FREED_CODES
from tests.crash.parties import HOLE_S, POLL_S
from tests.crash.pool_model import (
    Execution,
    ModelReceipts,
    path_of,
)

_ARRIVED = f"{CODE_OF[State.DELIVERED]}, {CODE_OF[State.RELEASED]}"
_WANTED = "EXISTS (SELECT 1 FROM files f WHERE f.ticket = t.id AND f.state IN (0, 1, 3))"
_HELD = f"SELECT t.ticket, s.state FROM tickets t JOIN sandboxes s ON s.id = t.sandbox WHERE t.freed = 0 AND {_WANTED}"
#: For SQL: tickets whose bytes are needed.
NEEDED = f"{_HELD} AND s.state NOT IN ({FREED_CODES})"
_DROPPED = "NOT EXISTS (SELECT 1 FROM files f WHERE f.ticket = t.id AND f.state != 4)"
_UNWANTED = (
    "SELECT t.ticket FROM tickets t JOIN sandboxes s ON s.id = t.sandbox "
    f"WHERE t.freed = 0 AND (s.state IN ({FREED_CODES}) OR {_DROPPED})"
)
_PAUSED = (
    "SELECT t.ticket, p.at FROM tickets t JOIN sim_paused p ON p.sandbox = t.sandbox "
    f"JOIN sandboxes s ON s.id = t.sandbox WHERE s.state = {CODE_OF[State.MOVING]}"
)
_UNDER_WAY = (
    f"SELECT job FROM sandboxes WHERE state IN ({CODE_OF[State.LEASED]}, {CODE_OF[State.MOVING]}) "
    "UNION SELECT s.job FROM sandboxes s JOIN files f ON f.sandbox = s.id WHERE f.state = 1"
)
#: A removal that failed is tried again after 30 s; of several steps one may fail again.
_FREED_WITHIN_S = 900.0
#: A manager tries again every 30 s to record what it has removed.
_RECORDED_WITHIN_S = 300.0
#: A mover may begin in the moment in which its owner's word comes.
_PAUSED_WITHIN_S = 5.0
#: Three times the interval of reports.
_REPORTED_WITHIN_S = 900.0
_AUDIT_S = 150.0


class Judgement:
    """The part of a simulation that knows what was promised."""

    def _judge_edit(self, before: Job, after: Job, edit: Any) -> None:
        self.world.say(f"{edit.label} {edit.job_id}: {after.ad_state.state} {after.ad_state.reason}")
        counts = self._counting(before.name)
        if edit.label == "edit-delivered" and counts is not None:
            missing = [
                url for ticket, urls in counts.accepted.items() for url in urls if not self._arrived(counts, url)
            ]
            if missing:
                self.world.violation(f"{before.name} is called delivered, {missing} never arrived")
        if edit.label == "edit-hold" and "was changed" in after.ad_state.reason:
            self.world.violation(f"{before.name}: nobody changed anything, but: {after.ad_state.reason}")
        if edit.label == "edit-rerun" and counts is not None:
            if "nothing was heard" in after.ad_state.reason:
                self._judge_silence(after)
            elif self.trouble.impatient and "deleted" in after.ad_state.reason:
                self.world.say("its time was over")
            elif self.forger and self.agent.starts > 1 and "no manager reported" in after.ad_state.reason:
                self.world.say("its record stood between two that look like one run's")
            elif not self._is_excused(counts) and not self.restored and not self._clocks_jumped:
                self.world.violation(f"{before.name}: accepted output is lost for no reason: {after.ad_state.reason}")

    def _is_excused(self, execution: Execution) -> bool:
        """Was something lost of what a run has handed over, be it named in its record or not?"""
        return any(self.by_ticket.get(ticket) is execution for ticket in self.excused)

    @property
    def _clocks_jumped(self) -> bool:
        return any(node.machine.wall_offset_s for node in self.nodes)

    def _judge_orders(self, sheet: OrderSheet) -> None:
        """Only what was removed is cancelled: absence from the queue says nothing."""
        for order in sheet.orders:
            if order.action is Action.CONFIRM:
                self._confirmed(order.tickets)
            if order.action is Action.FORGET and not self.agent.is_odd(order.number):
                self._judge_forget(sheet, order)
            if order.action is Action.SUPERSEDE and not self.agent.is_odd(order.number):
                self._judge_supersede(order)
            wished = order.job in self.schedd.removed | self.given_up or self.agent.is_odd(order.number)
            if order.action is Action.CANCEL and not wished:
                self.world.violation(f"{order.job} is cancelled although nobody removed it")

    def _judge_supersede(self, order: Order) -> None:
        """Output of a run that HTCondor has held is not thrown away before the job runs again."""
        job = self.schedd.jobs_.get(order.job)
        if job and job.name in self.held_in_part and order.run_number == job.run and not self.restored:
            self.world.violation(f"run {job.run} of {order.job} is superseded, and the job is still held")

    def _judge_forget(self, sheet: OrderSheet, order: Order) -> None:
        """Files that were delivered are recorded before their manager may forget them."""
        (node,) = (one for one in self.nodes if one.manager == sheet.manager)
        rows = node.rows(
            "SELECT t.ticket FROM tickets t JOIN sandboxes s ON s.id = t.sandbox "
            f"WHERE s.job = '{order.job}' AND s.number = {order.run_number} AND s.state IN ({_ARRIVED})"
        )
        named = ModelReceipts(self.schedd.records).record_with(
            order.run.key, sheet.manager, sheet.manager_key, [ticket for (ticket,) in rows]
        )
        known = {(ad["GlobalJobId"], ad["NumShadowStarts"]) for ad in self.agent.file_records()}
        if named and (order.job, order.run_number) not in known:
            run = f"run {order.run_number} of {order.job}"
            self.world.violation(f"{sheet.manager} forgets {run}, which is not recorded")

    def _judge_file_records(self) -> None:
        for key, count in Counter(map(key_of, self.agent.file_records())).items():
            if count > 1:
                self.world.violation(f"{key} is recorded {count} times")

    def _confirmed(self, tickets: tuple[str, ...]) -> None:
        """The access point has said that these are of a run that completed."""
        self.confirmed.update(tickets)
        for made_by in filter(None, map(self.by_ticket.get, tickets)):
            self.newest[made_by.job] = max(made_by.number, self.newest.get(made_by.job, 0))

    def _judge_report(self, sender: str, report: dict[str, Any]) -> None:
        """Orders that a report acknowledges are on the disk, and no plugin sends output of runs that it calls ended."""
        node = next(one for one in self.nodes if one.name == sender)
        done = dict(node.rows("SELECT agent, number FROM orders_done"))
        for agent, number in report["acknowledged"].items():
            if number > done.get(agent, 0):
                self.world.violation(f"{sender} acknowledges order {number}, its ledger {done.get(agent, 0)}")
        sent = {ticket for one in self.flights if one.node == sender and not one.is_over for ticket in one.tickets}
        for box in report["sandboxes"]:
            if State(box["state"]) in FREED and not sent.isdisjoint(box["tickets"]):
                self.world.violation(f"run {box['number']} of {box['job']} is {box['state']}, and is still sent")

    # ---- what is sent ------------------------------------------------------------------------------------------------

    def sending(self, flight: Any, ticket: str, url: str) -> Execution | None:
        """A plugin is about to send a file: whose it is, None when it may not be sent."""
        found = self.by_ticket.get(ticket)
        problem = self._against_sending(flight, ticket, found)
        if problem:
            self.world.violation(f"{url} is sent {problem}")
        return None if problem else found

    def _against_sending(self, flight: Any, ticket: str, made_by: Execution | None) -> str:
        if made_by is None:
            return "for a ticket that no plugin has a receipt of"
        if ticket not in self.confirmed:
            return f"although run {made_by.number} was not confirmed with ticket {ticket}"
        newest = self.newest.get(made_by.job, 0)
        if newest > made_by.number and (made_by.number, newest) not in self.destination.overtaken:
            return f"by run {made_by.number} although run {newest} is confirmed"
        for other in self.flights:
            others = {self.by_ticket[one].number for one in other.tickets if self._made(one) == made_by.job}
            if not other.is_over and others - {made_by.number}:
                return f"by run {made_by.number} while run {others} is sent, too"
        heard_s = self.collector.read_s.get(f"manager@slots@{flight.node}", float("-inf"))
        node = next(one for one in self.nodes if one.name == flight.node)
        if self.world.now_s > heard_s + node.silence_s:
            return f"{self.world.now_s - heard_s:.0f} s after the making of the last report that was read"
        return ""

    def _made(self, ticket: str) -> str:
        return self.by_ticket[ticket].job if ticket in self.by_ticket else ""

    def _judge_start(self, flight: Any) -> None:
        """A plugin is started: not for what its owner has paused."""
        self.flights = [*(one for one in self.flights if not one.is_over), flight]
        node = next(one for one in self.nodes if one.name == flight.node)
        strikes, self.at_start = self.at_start, None
        if strikes is not None:
            self.world.after(0.1, lambda: strikes(node, 0.0))
        for ticket, at_s in node.rows(_PAUSED):
            if ticket in flight.tickets and self.world.now_s - at_s > _PAUSED_WITHIN_S:
                self.world.violation(f"ticket {ticket} is sent although its owner has paused it")

    # ---- ledger and spool --------------------------------------------------------------------------------------------

    def recovered(self, machine: Any) -> None:
        """A manager has started: what it needs is there, and nothing counts as being sent."""
        for node in self.nodes:
            if node.machine is not machine or self.world.now_s - self.deleted_s < 1:
                continue
            for ticket, state in node.rows(NEEDED):
                if not machine.disk.exists(node.place_of(ticket)):
                    self.world.violation(f"the directory of ticket {ticket} is gone, it is {STATE_OF[state]}")
            for (job,) in node.rows(_UNDER_WAY):
                self.world.violation(f"output of {job} counts as being sent after a start of its manager")
            for ticket in sorted(self.unrecorded.pop(node.name, ())):
                if not any(machine.disk.exists(place) for place in (node.place_of(ticket), node.aside(ticket))):
                    self.world.violation(f"ticket {ticket} was accepted, has no record, and its bytes are deleted")

    def releasing(self, machine: Any, ticket: str) -> None:
        """The bytes of a ticket are about to be removed: nobody may need them, unless the disk has refused them."""
        if ticket in self.refused:
            return
        for node in self.nodes:
            if node.machine is machine and any(row[0] == ticket for row in node.rows(_HELD)):
                self.world.violation(f"bytes of ticket {ticket} are removed, and are wanted")

    def _audit(self) -> None:
        """While managers run they report, free what nobody wants, and want nothing that is not there."""
        known, self.unwanted = self.unwanted, {}
        for node in self.nodes:
            if not node.is_alive or node.machine.disk.full or node.machine.disk.keeps_names or node.is_slow:
                continue
            for (ticket,) in node.rows(_UNWANTED):
                key = (node.process, ticket)
                self.unwanted[key] = since_s = known.get(key, self.world.now_s)
                if self.world.now_s - since_s > _FREED_WITHIN_S:
                    self.world.violation(f"ticket {ticket} is wanted no more, and is not freed")
            for ticket, state in node.rows(NEEDED):
                if not node.machine.disk.exists(node.place_of(ticket)) and ticket not in self.deleted:
                    self._removed_at(known, node, ticket, state)
            if self.collector.answers(node.name) and node.name not in self.collector.mute:
                self._silent_at(known, node)
        self.world.after(_AUDIT_S, self._audit)

    def _removed_at(self, known: dict[Any, float], node: Any, ticket: str, state: int) -> None:
        """The bytes of a ticket were removed, or never came to the disk: its owner must know."""
        key = (node.process, ticket, "removed")
        self.unwanted[key] = since_s = known.get(key, self.world.now_s)
        if self.world.now_s - since_s > _RECORDED_WITHIN_S:
            self.world.violation(f"the bytes of ticket {ticket} are removed, and it is {STATE_OF[state]}")

    def _silent_at(self, known: dict[Any, float], node: Any) -> None:
        """A manager runs and could report."""
        if self.troubled and self.fault and self.fault.for_ever and self.fault.label.startswith("report-"):
            return  # the walk keeps it from that
        key = (node.process, "silent")
        since_s = self.unwanted[key] = known.get(key, self.world.now_s)
        if self.world.now_s - max(since_s, self.collector.came_s.get(node.manager, 0.0)) > _REPORTED_WITHIN_S:
            self.world.violation(f"{node.name} has made no report for {_REPORTED_WITHIN_S:.0f} s")

    def _judge_rooms(self) -> None:
        """At rest nothing counts against the quota or holds a place."""
        for node in self.nodes:
            if node.is_alive and node.admission is not None:
                space, promised = node.admission.space, node.admission._reservations
                if space.used_bytes or promised:
                    self.world.violation(f"{node.name} counts {space.used_bytes} bytes and {promised} at rest")

    def _judge_silence(self, job: Job) -> None:
        """Silence counts only while it could have been broken: agent and collector up, and no report there."""
        self.collector.ads()
        for node in self.nodes:
            if node.manager in job.ad_state.reason:
                since_s = max(self.agent.started_s, self.collector.last_sign_s.get((node.manager, job.name), 0.0))
                looks = [since_s, *(at_s for at_s in self.collector.looks if at_s > since_s)]
                gaps = (after - before for before, after in zip(looks, looks[1:]))
                view_s = sum(gap for gap in gaps if gap <= HOLE_S)
                if view_s < node.silence_s - 2 * POLL_S - 10:
                    self.world.violation(f"{job.name}: silence of {view_s:.0f} s of view was taken for loss")

    def _counting(self, name: str) -> Execution | None:
        known = (one for one in reversed(self.executions) if one.number not in self.destination.unknown)
        return next((one for one in known if one.job == name and one.counted), None)

    def _arrived(self, execution: Execution, url: str) -> bool:
        found = self.destination.content.get(path_of(url))
        return found is not None and found[0] >= execution.number

    def _judge_the_end(self) -> None:
        for name, past in self.schedd.history.items():
            counts = self._counting(name)
            if past.status == Status.COMPLETED and name not in self.schedd.let_go:
                for url in self.outputs[name]:
                    found = self.destination.content.get(path_of(url))
                    if counts is None or found is None or found[0] < counts.number:
                        self.world.violation(f"{name} left as completed, {url} holds {found}")
        for job in self.schedd.jobs_.values():
            if job.held_by_us and job.is_hold_unlogged:
                self.world.violation(f"{job.name} is held, and nothing has told its owner")
        self._judge_tickets()
        self._judge_rooms()
        self._judge_file_records()

    def _judge_tickets(self) -> None:
        nodes = [one.rows("SELECT ticket FROM tickets") for one in self.nodes]
        owned = Counter(row[0] for rows in nodes for row in rows)
        for ticket, count in owned.items():
            if count > 1:
                self.world.violation(f"ticket {ticket} is owned {count} times")
