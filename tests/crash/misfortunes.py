"""The misfortunes of a schedule: each ``_mis_NAME`` is one kind; at last all is mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from sandbox_manager.custody.queries import STATE_OF
from stageout.core.states import State
from stageout.model.job import Status
from stageout.model.sandbox import SENDABLE
from stageout.wire.custody import Action
from tests.crash.judgement import NEEDED
from tests.crash.memory_sqlite import Connection
from tests.crash.parties import LEASE_S, Node
from tests.crash.pool_model import (
    SCHEDD,
    Forger,
)
from tests.crash.product import Flight
from tests.crash.world import Killed, Process

_MISFORTUNES = (
    "kill_manager", "kill_manager", "kill_agent", "kill_agent", "power", "power", "power_of_the_ap", "gone_for_long",
    "cut_off", "agent_cut_off", "disk_full", "disk_of_the_ap_full", "destination_down", "destination_down",
    "destination_refuses", "collector_restart", "schedd_down", "second_manager", "clock_of_node", "clock_of_ap",
    "number_lost", "ledger_lost", "older_ledger", "damaged_text", "forged_record", "lost_sight",
    "agent_cut_off_long", "blind", "power_after_handoff",
    "kill_after_handoff", "mute_after_handoff", "vanish", "remove_job", "vacate", "backup", "file_gone",
    "directory_gone", "mute",
    "sync_refused",
    "names_stay", "slow_disk", "late_part", "disk_ails", "linger", "wish", "wish",
    "odd_order", "odd_order", "kill_while_moving", "disk_full_while_moving", "cable", "cable",
)  # fmt: skip
#: Kinds that make output wait, and orders come while it does.
_OFTEN = ("destination_down", "destination_refuses", "wish", "odd_order")
#: Kinds that last long, or whose consequences come late.
_LASTING = {"agent_cut_off_long", "blind", "lost_sight", "mute"}
#: Orders that change nothing that counts, about the run that a manager holds, or (True) about runs before it.
_ODD = (
    (Action.RETRY, False), (Action.PAUSE, False), (Action.RESUME, False), (Action.SUPERSEDE, True),
    (Action.CANCEL, True), (Action.FORGET, True), (Action.FORGET, False), (Action.CONFIRM, False),
)  # fmt: skip


_UNSENT = SENDABLE | {State.ACCEPTED, State.FAILED}
FAULTS = ("kill-before", "kill-after", "EIO", "ENOSPC", "EDQUOT", "EMFILE", "EINTR", "short-write")


@dataclass(frozen=True)
class Trouble:
    """How bad it is: what may go wrong, how often, and how long jobs run meanwhile.

    :param step_fault: probability of a fault at a labelled step. :param call_kill: of death at a system call.
    :param call_power: of the loss of power there. :param mischief: that an ad is lost, late or doubled.
    :param kinds: of misfortunes that happen, ``events`` of them.
    :param jobs: that are submitted. :param parts: most hand-offs of one run.
    :param repeats: probability that HTCondor repeats all uploads of a run.
    :param impatient: output is given up, and failed output deleted, within the schedule.
    """

    step_fault: float
    call_kill: float
    call_power: float
    mischief: float
    events: int
    length_s: float
    kinds: tuple[str, ...] = _MISFORTUNES
    jobs: int = 6
    parts: int = 2
    repeats: float = 0.0
    impatient: bool = False


class Fault(NamedTuple):
    """A fault at one label. :param for_ever: until all is mended; else once."""

    label: str
    what: str
    for_ever: bool


class Misfortunes:
    """The part of a simulation that makes things go wrong, and at last mends them."""

    def _duration_s(self, kind: str, func: Callable[..., Any]) -> float:
        if kind == "mover":
            run = getattr(func, "__self__", None)
            flight = Flight(self.world, run, self.destination, self)
            self._judge_start(flight)
            process = self.world.current
            assert process is not None and run is not None
            process.flights[str(run._directory)] = flight  # type: ignore[attr-defined]
            return flight.duration_s
        if kind == "sync":
            return self.random.choice((0.05, 2.0, 60.0, 300.0))
        if any(node.is_slow and node.process is self.world.current for node in self.nodes):
            return self.random.choice((0.5, 5.0, 60.0))
        return self.random.uniform(0.0001, 0.004)

    def _on_call(self, process: Process, name: str) -> None:
        if not self.troubled or process.name.startswith("plugin"):
            return
        if self.random.random() < self.trouble.call_kill:
            self.world.kill(process, f"at a call, {name}")
            raise Killed
        if self.random.random() < self.trouble.call_power:
            self._power_off(process)
            raise Killed

    def _on_step(self, process: Process, label: str) -> str | None:
        what = self._fault_at(label)
        if what is not None and label == "spool-data":
            for node in self.nodes:
                if node.machine is process.machine:
                    self._excuse_unsynced(node)
        return what

    def _excuse_unsynced(self, node: Node) -> None:
        """The disk refuses data of one of them."""
        self.refused |= {row[0] for row in node.rows("SELECT ticket FROM tickets WHERE synced != 1")}
        self.excused |= self.refused

    def _fault_at(self, label: str) -> str | None:
        fault = self.fault
        if fault is not None and label == fault.label and (self.troubled if fault.for_ever else not self.faulted):
            self.faulted.add(label)
            self.world.say(f"fault {fault.what} at {label}")
            return fault.what
        if not self.troubled or self.random.random() >= self.trouble.step_fault:
            return None
        what = self.random.choice(FAULTS)
        self.world.say(f"fault {what} at {label}")
        return what

    def _power_off(self, process: Process) -> None:
        machine = process.machine
        mine = [one for one in self.processes if one.machine is machine]
        node = next((one for one in self.nodes if one.machine is machine), None)
        machine.databases.end_process(process)
        if node is not None:
            self._excuse_unsynced(node)
        self.world.lose_power(machine, mine)
        if node is not None:
            machine.disk.make_dirs(f"/{node.name}/execute")
            for entry in machine.disk.listdir(f"/{node.name}/execute"):
                machine.disk.forget(f"/{node.name}/execute/{entry}")
            for execution in list(self.running.values()):
                if execution.node == node.name:
                    self.world.after(
                        self.random.uniform(100, 900), lambda execution=execution: self._back_to_idle(execution)
                    )
        down_s = self.random.choice((30.0, 600.0, 3 * LEASE_S))
        if not self.troubled:
            down_s = 30.0
        self.world.after(down_s, lambda: self._power_on(machine))

    def _power_on(self, machine: Any) -> None:
        machine.is_up = True
        for node in self.nodes:
            if node.machine is machine:
                node.start()
        if machine is self.agent.machine:
            self.agent.start()

    def _misfortune(self) -> None:
        """Something happens."""
        if not self.troubled:
            return
        random, world = self.random, self.world
        node = random.choice(self.nodes)
        later = random.choice((60.0, 400.0, 1500.0, 2.5 * LEASE_S))
        kind = random.choice(self.trouble.kinds)
        world.say(f"misfortune: {kind} ({node.name}, {later:.0f} s)")
        getattr(self, f"_mis_{kind}")(node, later)

    def _mis_kill_manager(self, node: Node, later: float) -> None:
        if node.process is not None:
            self.world.kill(node.process, "kill -9")

    def _mis_kill_agent(self, node: Node, later: float) -> None:
        if self.agent.process is not None:
            self.world.kill(self.agent.process, "kill -9")

    def _mis_power(self, node: Node, later: float) -> None:
        if node.process is not None and node.machine.is_up:
            self._power_off(node.process)

    def _mis_power_of_the_ap(self, node: Node, later: float) -> None:
        if self.agent.process is not None and self.agent.machine.is_up:
            self._power_off(self.agent.process)

    def _mis_gone_for_long(self, node: Node, later: float) -> None:
        """The manager does not run for a while, the job's machine is otherwise well."""
        node.stay_down_until_s = self.world.now_s + later
        if node.process is not None:
            self.world.kill(node.process, "kill -9")
        self.world.after(later + 1, node.start)

    def _mis_cut_off(self, node: Node, later: float) -> None:
        self.collector.cut_off.add(node.name)
        self.world.after(later, lambda: self.collector.cut_off.discard(node.name))

    def _mis_lost_sight(self, node: Node, later: float) -> None:
        """A node cannot send its output for a while, and the access point loses sight of it for longer.

        Its manager may be started again meanwhile.
        """
        if self.random.random() < 0.5:
            self.world.after(LEASE_S, lambda: self._mis_kill_manager(node, later))
        self.destination.unreachable_from.add(node.name)
        self.world.after(2 * LEASE_S, lambda: self.destination.unreachable_from.discard(node.name))
        self.world.after(300, lambda: self._mis_cut_off(node, 3 * LEASE_S))

    def _mis_cable(self, node: Node, later: float) -> None:
        """A node's network is gone, mostly while a plugin sends: for less than its lease, or for longer."""
        for_s = self.random.choice((0.4, 1.0, 1.5, 3.0)) * node.silence_s
        if self.random.random() < 0.3:
            self._cut_cable(node, for_s)
        else:
            self.at_start = lambda node, _: self._cut_cable(node, for_s)

    def _cut_cable(self, node: Node, for_s: float) -> None:
        self._mis_cut_off(node, for_s)
        self.destination.unreachable_from.add(node.name)
        self.world.after(for_s, lambda: self.destination.unreachable_from.discard(node.name))

    def _mis_agent_cut_off_long(self, node: Node, later: float) -> None:
        self._mis_agent_cut_off(node, 1.5 * LEASE_S)

    def _mis_blind(self, node: Node, later: float) -> None:
        """The access point hears nobody for longer than a lease, and a manager is down when it hears again.

        Mostly it has just heard of output there.
        """
        if self.random.random() < 0.3:
            self._blind(node)
        else:
            self.after_handoff = lambda node, _: self.world.after(100, lambda: self._blind(node))

    def _blind(self, node: Node) -> None:
        self._mis_agent_cut_off(node, 1.4 * LEASE_S)
        self.world.after(0.5 * LEASE_S, lambda: self._mis_gone_for_long(node, LEASE_S))

    def _mis_power_after_handoff(self, node: Node, later: float) -> None:
        self.after_handoff = self._mis_power

    def _mis_kill_after_handoff(self, node: Node, later: float) -> None:
        self.after_handoff = self._mis_kill_manager

    def _mis_mute_after_handoff(self, node: Node, later: float) -> None:
        """A report of a hand-off is the last for a while: what the run hands over after it comes late."""
        self.after_handoff = lambda node, _: self._mute(node, min(later, 400))

    def _mis_file_gone(self, node: Node, later: float) -> None:
        """A cleaner deletes a file, or all files of a ticket, in the spool."""
        place = f"{node.spool}/sandboxes"
        tickets = sorted(node.machine.disk.listdir(place)) if node.machine.disk.exists(place) else []
        if tickets:
            ticket = self.random.choice(tickets)
            files = sorted(node.machine.disk.listdir(f"{place}/{ticket}"))
            self._delete(node, ticket, self.random.choice([ticket, *(f"{ticket}/{name}" for name in files)]))

    def _delete(self, node: Node, ticket: str, gone: str) -> None:
        self.world.say(f"{gone} is deleted")
        self.excused.add(ticket)
        self.deleted.add(ticket)
        self.deleted_s = self.world.now_s
        self.unrecorded.get(node.name, set()).discard(ticket)
        node.machine.disk.forget(f"{node.spool}/sandboxes/{gone}")

    def _mis_directory_gone(self, node: Node, later: float) -> None:
        """All of a node's tickets are deleted while its manager is down."""
        self._mis_kill_manager(node, later)
        place = f"{node.spool}/sandboxes"
        for ticket in sorted(node.machine.disk.listdir(place)) if node.machine.disk.exists(place) else []:
            self._delete(node, ticket, ticket)

    def _mis_mute(self, node: Node, later: float) -> None:
        """Messages of a node are lost, messages to it arrive: a firewall, or a right that was taken away.

        Mostly its agent has just heard of output there.
        """
        if self.random.random() < 0.3:
            self._mute(node, 3 * LEASE_S)
        else:
            self.after_handoff = self._mute_while_output_waits

    def _mute_while_output_waits(self, node: Node, later: float) -> None:
        """The server of the output comes back when nothing of it may be sent any more."""
        self._mis_destination_down(node, node.silence_s + 150)
        self.world.after(100, lambda: self._mute(node, 3 * node.silence_s))

    def _mute(self, node: Node, for_s: float) -> None:
        self.collector.mute.add(node.name)
        self.world.after(for_s, lambda: self.collector.mute.discard(node.name))

    def _mis_names_stay(self, node: Node, later: float) -> None:
        """Nothing can be removed from a node's disk for a while."""
        node.machine.disk.keeps_names = True
        self.world.after(min(later, 400), lambda: setattr(node.machine.disk, "keeps_names", False))

    def _mis_slow_disk(self, node: Node, later: float) -> None:
        """Each visit to a node's disk takes up to a minute."""
        node.is_slow = True
        self.world.after(min(later, 1500), lambda: setattr(node, "is_slow", False))

    def _mis_linger(self, node: Node, later: float) -> None:
        """A run goes on on its node although the access point has given it up, and hands its output over at last.

        Its second hand-off may come when a newer run is known.
        """
        if not self.running:
            self.world.after(60, lambda: self._mis_linger(node, later) if self.troubled else None)
            return
        execution = next(iter(self.running.values()))
        self._back_to_idle(execution)
        for delay_s in self.random.sample((30.0, 300.0, 1000.0), self.random.randint(1, 2)):
            self.world.after(delay_s, lambda: self._hand_over_late(execution))

    def _mis_late_part(self, node: Node, later: float) -> None:
        """A plugin's last files come when its run has been decided without them."""
        self.is_part_late = True

    def _mis_disk_ails(self, node: Node, later: float) -> None:
        """A disk takes nothing, and does not even say how full it is."""
        node.machine.disk.ails = True
        self._mis_disk_full(node, later)
        self.world.after(min(later, 1500), lambda: setattr(node.machine.disk, "ails", False))

    def _mis_kill_while_moving(self, node: Node, later: float) -> None:
        """A manager dies while it sends."""
        self.at_start = self._mis_kill_manager

    def _mis_disk_full_while_moving(self, node: Node, later: float) -> None:
        """A disk is full when the end of what is being sent is to be recorded."""
        self.at_start = lambda node, _: self._mis_disk_full(node, later)

    def _mis_wish(self, node: Node, later: float) -> None:
        """The owner of a job asks for something while its output is on its way."""
        if self.random.random() < 0.5:
            self._mis_destination_down(node, later)
        jobs = [job for job in self.schedd.jobs_.values() if job.has_final_handoff and not job.request]
        if not jobs:
            self.world.after(60, lambda: self._mis_wish(node, later) if self.troubled else None)
            return
        job = self.random.choice(jobs)
        wish = self.random.choice(("retry", "retry", "pause", "resume", "cancel", "redirect", "redirect"))
        if wish == "redirect":
            wish = self._redirect_of(job.name)
        self.world.say(f"the owner of {job.name} asks for {wish}")
        if wish == "cancel":
            self.given_up.add(job.name)
        self.schedd.jobs_[job.name] = replace(job, request=wish)

    def _redirect_of(self, name: str) -> str:
        """Return an owner's request to send a job's output to one of the hosts."""
        number, host = self.outputs[name][0].split("/")[3], self.random.choice(("h1", "h2"))
        return f"redirect r{self.random.randrange(10**6)} copy://{host}/{number}/"

    def _mis_odd_order(self, node: Node, later: float) -> None:
        """Some orders come that are late, early or vain, while output waits for its server."""
        if self.random.random() < 0.7:
            self.random.choice((self._mis_destination_down, self._mis_destination_refuses))(node, later)
        for _ in range(6):
            self.world.after(self.random.uniform(0, 400), self._order_out_of_turn)

    def _order_out_of_turn(self) -> None:
        query = "SELECT job, number, state, CASE WHEN confirmed_at THEN named_tickets ELSE '' END FROM sandboxes"
        rows = [(one, *row) for one in self.nodes for row in one.rows(query)]
        if not rows or not all(one.admission for one in self.nodes):
            self.world.after(60, lambda: self._order_out_of_turn() if self.troubled else None)
            return
        holder, job, number, state, named = self.random.choice(rows)
        action, before = self.random.choice(_ODD)
        if action is Action.CONFIRM and not named:
            return
        if action is Action.FORGET and not before:
            # It may be forgotten before the access point has read its end.
            self.excused |= {ticket for ticket, made_by in self.by_ticket.items() if made_by.job == job}
            if STATE_OF[state] not in _UNSENT - {State.FAILED}:
                return
        self.world.say(f"{action.value} of {job} {number - before} is ordered out of turn")
        tickets = tuple(named.split()) if action is Action.CONFIRM else ()
        self.agent.odd_order(holder.identity, action, job, number - before, tickets)

    def _resume_all(self) -> None:
        """Nobody pauses anything for ever."""
        for node in self.nodes:
            paused = node.rows("SELECT job, number FROM sandboxes WHERE paused = 1")
            for job, number in paused if node.admission else ():
                self.agent.odd_order(node.identity, Action.RESUME, job, number)

    def _mis_sync_refused(self, node: Node, later: float) -> None:
        """The disk cannot write the data of an output, and says so once; perhaps nobody asks for that output then."""
        node.machine.disk.refuses = lambda: self._excuse_unsynced(node)
        if self.random.random() < 0.3:
            self._mis_agent_cut_off(node, min(later, 1500))

    def _mis_all_refuse(self, node: Node, later: float) -> None:
        self.destination.refusing |= {"h1", "h2", "h3"}
        self.world.after(600, self.destination.refusing.clear)

    def _mis_vanish(self, node: Node, later: float) -> None:
        """A completed job is in neither queue nor history any more."""
        for job in list(self.schedd.jobs_.values()):
            if job.status == Status.COMPLETED and job.handed_off:
                self.world.say(f"{job.name} vanishes")
                self.vanished.add(job.name)
                del self.schedd.jobs_[job.name]

    def _mis_agent_cut_off(self, node: Node, later: float) -> None:
        self.collector.cut_off.add(SCHEDD)
        self.world.after(later, lambda: self.collector.cut_off.discard(SCHEDD))

    def _mis_disk_full(self, node: Node, later: float) -> None:
        node.machine.disk.full = True
        self.world.after(min(later, 1500), lambda: setattr(node.machine.disk, "full", False))

    def _mis_disk_of_the_ap_full(self, node: Node, later: float) -> None:
        self.agent.machine.disk.full = True
        self.world.after(min(later, 1500), lambda: setattr(self.agent.machine.disk, "full", False))

    def _mis_destination_down(self, node: Node, later: float) -> None:
        self._fail_hosts(self.destination.down, later)

    def _mis_destination_refuses(self, node: Node, later: float) -> None:
        self._fail_hosts(self.destination.refusing, later)

    def _fail_hosts(self, failing: set[str], later: float) -> None:
        """A host fails for a while; if for long, the host of all fallbacks fails, too."""
        hosts = {self.random.choice(("h1", "h2"))} | ({"h3"} if later >= LEASE_S else set())
        failing |= hosts
        self.world.after(later, lambda: failing.difference_update(hosts))

    def _mis_collector_restart(self, node: Node, later: float) -> None:
        self.collector.up = False
        self.world.after(self.random.choice((1.0, 60.0, 900.0)), self.collector.restart)

    def _mis_schedd_down(self, node: Node, later: float) -> None:
        """The schedd is away; when it is back it reconnects to running jobs, which raises NumShadowStarts."""
        self.schedd.up = False
        self.world.after(min(later, 900), self._schedd_back)

    def _schedd_back(self) -> None:
        self.schedd.up = True
        for name in list(self.running):
            job = self.schedd.jobs_.get(name)
            if job is not None and job.status == Status.RUNNING:
                self.schedd.change(name, run=job.run + 1, reconnects=job.reconnects + 1,
                                   shadow_since=self.schedd.wall_s())  # fmt: skip

    def _mis_second_manager(self, node: Node, later: float) -> None:
        node.second_manager()

    def _mis_clock_of_node(self, node: Node, later: float) -> None:
        """Not back before a manager that lost its ledger has begun to count anew, as below."""
        jump_s = self.random.choice((-86400.0, -600.0, 600.0, 7200.0))
        if jump_s > 0 or node.is_alive or node.name not in self.without_ledger:
            node.machine.jump(jump_s)

    def _mis_clock_of_ap(self, node: Node, later: float) -> None:
        self.agent.machine.jump(self.random.choice((-86400.0, -600.0, 600.0, 7200.0)))

    def _mis_number_lost(self, node: Node, later: float) -> None:
        """The agent dies and its file with the order number is gone."""
        if self.agent.process is not None:
            self.world.kill(self.agent.process, "kill -9")
        if self.agent.machine.disk.exists(self.agent.number_file):
            self.agent.machine.disk.forget(self.agent.number_file)

    def _mis_ledger_lost(self, node: Node, later: float) -> None:
        """The ledger is damaged; the administrator moves it aside, as the error says.

        Not while the clock is behind what it was: a manager without memory and with a clock that was set back is not
        heard (docs/developer/crash.md).
        """
        if node.machine.wall_offset_s < node.machine.most_offset_s:
            return
        if node.process is not None:
            self.world.kill(node.process, "kill -9")
        self.excused |= {row[0] for row in node.rows("SELECT ticket FROM tickets")}
        node.machine.databases.lose(node.ledger)
        self.without_ledger.add(node.name)

    def _mis_damaged_text(self, node: Node, later: float) -> None:
        """The disk damages one URL in the ledger: it is not UTF-8 any more."""
        rows = node.rows(
            "SELECT f.ticket, f.position, f.url, t.ticket FROM files f JOIN tickets t ON t.id = f.ticket "
            "WHERE f.state IN (0, 3)"
        )
        if not rows:
            self.world.after(60, lambda: self._mis_damaged_text(node, later) if self.troubled else None)
            return
        self._mis_kill_manager(node, later)
        number, position, url, ticket = self.random.choice(rows)
        self.world.say(f"{url} of ticket {ticket} is damaged in the ledger")
        self.excused.add(ticket)
        damaged = url.encode("utf-8", "backslashreplace")[:-1] + b"\xb0"
        ledger = node.machine.databases.look(node.ledger)
        assert ledger is not None
        ledger.execute(
            "UPDATE files SET url = CAST(? AS TEXT) WHERE ticket = ? AND position = ?", (damaged, number, position)
        )

    def _mis_older_ledger(self, node: Node, later: float) -> None:
        """An administrator puts a ledger back from a copy, and the spool is newer than that copy.

        Mostly output waits there.
        """
        if self.random.random() < 0.7:
            self._mis_destination_down(node, 2 * later)
        copy = node.machine.databases.copy(node.ledger)
        if copy is not None:
            self.world.after(min(later, 400), lambda: self._put_back(node, copy))

    def _put_back(self, node: Node, copy: Connection) -> None:
        """Not while the clock is behind, as above. A restored schedd knows nothing of the runs that the copy lacks."""
        if not self.troubled or self.restored or node.machine.wall_offset_s < node.machine.most_offset_s:
            return
        self._mis_kill_manager(node, 0.0)
        self.world.say(f"an older ledger is put back on {node.name}")
        accepted, tickets = self._promised(node), set(node.rows("SELECT ticket FROM tickets"))
        node.machine.databases.put_back(node.ledger, copy)
        known = self._promised(node)
        self.excused |= {row[0] for row in tickets.union(node.rows("SELECT ticket FROM tickets"))} - known
        self.unrecorded.setdefault(node.name, set()).update(accepted - known)
        self.without_ledger.add(node.name)

    def _promised(self, node: Node) -> set[str]:
        """Return tickets whose output is on the disk, as the ledger says, too."""
        found = {row[0] for row in node.rows(f"{NEEDED} AND t.synced = 1")}
        return {ticket for ticket in found if node.machine.disk.exists(node.place_of(ticket))}

    def _overtaken(self, known: int) -> set[tuple[int, int]]:
        """(Run that counts again for a restored queue, run after it), where nobody can know of the second any more and
        output of the first still waits at its node."""
        query = "SELECT t.ticket, s.state FROM tickets t JOIN sandboxes s ON s.id = t.sandbox"
        held = {ticket: STATE_OF[number] for node in self.nodes for ticket, number in node.rows(query)}
        last = {one.job: one for one in self.executions[:known] if one.counted}
        waiting = {job for job, one in last.items() if any(held.get(at) in _UNSENT for at in one.accepted)}
        return {
            (last[one.job].number, one.number) for one in self.executions[known:]
            if one.job in waiting and not one.accepted.keys() & held.keys()
        }  # fmt: skip

    def _mis_forged_record(self, node: Node, later: float) -> None:
        """A job writes, in texts of its plugin, records of other users' runs that name output of nobody."""
        if not node.key:
            self.world.after(60, lambda: self._mis_forged_record(node, later) if self.troubled else None)
            return
        self.forger = Forger(f"{self.random.getrandbits(128):032x}", node.manager, node.key)
        for name, execution in self.running.items():
            job = self.schedd.jobs_[name]
            self.world.say(f"a record of run {job.run} of {name} is forged before that of execution {execution.number}")
            writer, text = self.forger.imitated(job, self.schedd.wall_s())
            self.schedd.records[writer].append(text)

    def _mis_remove_job(self, node: Node, later: float) -> None:
        name = self.random.choice(list(self.schedd.jobs_) or [""])
        if name:
            self.world.say(f"{name} is removed")
            self.running.pop(name, None)
            self.schedd.change(name, status=int(Status.REMOVED))

    def _mis_vacate(self, node: Node, later: float) -> None:
        for execution in list(self.running.values())[:1]:
            self._back_to_idle(execution)

    def _mis_backup(self, node: Node, later: float) -> None:
        """The schedd's disk is lost and restored from a backup."""
        if self.restored:
            return
        self.restored = True
        saved, known = self.schedd.backup(), len(self.executions)
        self.world.after(self.random.uniform(100, 2000), lambda: self._restore(saved, known))

    def _restore(self, saved: Any, known: int) -> None:
        """:param known: executions that the backup knows of."""
        if not self.troubled:
            return
        overtaken = self._overtaken(known)
        self.destination.overtaken |= overtaken
        self.destination.unknown |= {one.number for one in self.executions[known:] if not one.accepted}
        self.destination.unknown |= {newer for _, newer in overtaken}
        self.world.say("the schedd is restored from a backup")
        for name in [*self.running]:
            del self.running[name]
        self.collector.cut_off.clear()
        new = {name: job for name, job in self.schedd.jobs_.items() if name not in saved[0]}
        self.schedd.restore(saved)
        for name in new:
            self.world.say(f"{name} is unknown to the restored schedd")
        for name, job in self.schedd.jobs_.items():
            if job.status == Status.IDLE:
                self.world.after(300, lambda name=name: self._match(name))

    def _mend(self) -> None:
        """All is well from now on."""
        world = self.world
        world.say("all is mended")
        self.troubled = False
        self.collector.cut_off.clear()
        self.collector.mute.clear()
        self.collector.mischief = 0.0
        self.destination.down.clear()
        self.destination.refusing.clear()
        self.destination.unreachable_from.clear()
        if not self.collector.up:
            self.collector.restart()
        if not self.schedd.up:
            self._schedd_back()
        self.agent.machine.disk.full = False
        for node in self.nodes:
            node.machine.disk.full = node.machine.disk.ails = node.machine.disk.keeps_names = node.is_slow = False
            node.stay_down_until_s = 0.0
            if node.process is not None and self.restarts_at_last:
                world.kill(node.process, "one restart for good measure")
            self._power_on(node.machine)
        self._power_on(self.agent.machine)


def draw_trouble(random: Random) -> Trouble:
    """A shape of a schedule: mostly short, with few kinds of misfortunes."""
    kinds = sorted(set(_MISFORTUNES))
    some = [*random.sample(kinds, random.randint(1, 3)), *random.sample(_OFTEN, random.randint(0, 2))]
    return Trouble(
        step_fault=random.choice((0.0, 0.005, 0.02, 0.05)),
        call_kill=random.choice((0.0, 0.0, 0.002)),
        call_power=random.choice((0.0, 0.0, 0.001)),
        mischief=random.choice((0.0, 0.0, 0.05, 0.2)),
        events=random.randint(0, 6),
        length_s=5000.0 if _LASTING & {*some} else random.choice((700.0, 700.0, 1500.0, 3000.0)),
        kinds=_MISFORTUNES if random.random() < 0.2 else tuple(some),
        jobs=random.choice((1, 2, 2, 4)),
        parts=random.choice((1, 2, 3)),
        repeats=random.choice((0.0, 0.0, 0.3)),
        impatient=random.random() < 0.2,
    )
