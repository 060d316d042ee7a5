"""One schedule: a pool with the product's managers and agent, jobs, and misfortune, all out of one seed.

First jobs run while things go wrong. Then everything is mended, and the pool must come to rest: every job delivered,
run again and delivered, or held with its reason; nothing left in a spool.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from stageout.core.states import State
from stageout.model.job import Job, Status
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Run, job_id_of
from tests.crash.judgement import Judgement
from tests.crash.meetings import Meeting, Meetings
from tests.crash.misfortunes import FAULTS, Fault, Misfortunes, Trouble, draw_trouble
from tests.crash.observed import FALLBACKS, Coverage, Observer
from tests.crash.parties import AgentSide, Node
from tests.crash.pool_model import (
    SCHEDD,
    USER,
    Collector,
    Destination,
    Execution,
    Forger,
    Schedd,
    record_text,
)
from tests.crash.product import PluginCall, simulated
from tests.crash.world import Process, World


@dataclass
class Simulation(Meetings, Misfortunes, Judgement):
    """One schedule.

    :param seed: decides everything. :param keep_trace: remember events for people.
    :param misfortunes: only these happen, with this probability of faults at steps (empty: all).
    :param meeting: an order that comes while a run is in a state.
    :param fault: at this step only. :param events: number of misfortunes then; :param length_s: of the trouble then.
    """

    seed: int
    keep_trace: bool = False
    misfortunes: tuple[str, ...] = ()
    step_fault: float = 0.0
    fault: Fault | None = None
    meeting: Meeting | None = None
    events: int = 8
    length_s: float = 6000.0
    jobs: int = 6
    parts: int = 2
    repeats: float = 0.0
    processes: list[Process] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    by_ticket: dict[str, Execution] = field(default_factory=dict)
    running: dict[str, Execution] = field(default_factory=dict)
    outputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    after_handoff: Callable[[Node, float], None] | None = None
    excused: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    held_in_part: set[str] = field(default_factory=set)
    faulted: set[str] = field(default_factory=set)
    vanished: set[str] = field(default_factory=set)
    without_ledger: set[str] = field(default_factory=set)
    forger: Forger | None = None
    unrecorded: dict[str, set[str]] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    newest: dict[str, int] = field(default_factory=dict)
    flights: list[Any] = field(default_factory=list)
    unwanted: dict[Any, float] = field(default_factory=dict)
    at_start: Callable[[Node, float], None] | None = None
    deleted_s: float = -1000.0
    deleted: set[str] = field(default_factory=set)
    is_part_late: bool = False
    troubled: bool = True
    restored: bool = False

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.restarts_at_last = self.seed % 2 == 0
        self.world = World(self.random, self.keep_trace)
        self.coverage = Coverage()
        self.observer = Observer(self.world, self.coverage)
        self.destination = Destination(self.world)
        self.collector = Collector(self.world)
        self.schedd = Schedd(self.world)
        self.collector.on_orders, self.collector.on_report = self._judge_orders, self._judge_report
        self.schedd.on_edit, self.schedd.on_change = self._judge_edit, self._changed
        self.trouble = draw_trouble(self.random)
        if self.misfortunes:
            self.trouble = Trouble(
                self.step_fault, 0.0, 0.0, 0.0, self.events, self.length_s, self.misfortunes, self.jobs, self.parts,
                self.repeats,
            )  # fmt: skip
        self.nodes: list[Node] = []

    # ---- the course of it --------------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Play the schedule. Returns what was violated."""
        world = self.world
        with simulated(world, self.observer, self):
            try:
                self.nodes = [Node(self, f"ep{at}") for at in range(self.random.choice((1, 2, 2, 3)))]
                self.agent = AgentSide(self)
                if self.meeting is not None:
                    self.observer.on_commit = lambda: world.after(0.0, self._meet)
                world.on_call, world.on_step, world.duration_s = self._on_call, self._on_step, self._duration_s
                self.collector.mischief = self.trouble.mischief
                for node in self.nodes:
                    node.start()
                self.agent.start()
                world.after(300, self._evaluate)
                self._audit()
                for number in range(self.random.randint(1, self.trouble.jobs)):
                    when_s = self.random.uniform(1, 0.8 * self.trouble.length_s)
                    world.after(when_s, lambda number=number: self._submit(number + 1))
                for _ in range(self.trouble.events):
                    world.after(self.random.uniform(60, self.trouble.length_s), self._misfortune)
                world.run(self.trouble.length_s)
                self._mend()
                self._come_to_rest()
                if not world.violations:
                    self._judge_the_end()
            finally:
                world.close(self.processes)
        return world.violations

    def _come_to_rest(self) -> None:
        """Run on until nothing is left to do; wait in steps, because looking costs."""
        world = self.world
        end_s = world.now_s + 120_000
        while world.now_s < end_s and not world.violations:
            world.run(world.now_s + 300)
            if self._is_at_rest():
                return
            self._resume_all()
        if not world.violations:
            world.violation(f"does not come to rest: {self._what_is_left()}")

    def _is_at_rest(self) -> bool:
        return not self._what_is_left()

    def _what_is_left(self) -> list[str]:
        left = [f"{job.name} {Status(job.status).name} {job.ad_state.state} {job.ad_state.reason}"
                for job in self.schedd.jobs_.values() if job.status != Status.HELD or job.held_by_us]  # fmt: skip
        for node in self.nodes:
            left += [f"{node.name}: {path}" for part in ("sandboxes", "intake", "movers")
                     if node.machine.disk.exists(f"{node.spool}/{part}")
                     for path in node.machine.disk.files_below(f"{node.spool}/{part}")]  # fmt: skip
            left += [f"{node.name}: record {row}" for row in node.rows("SELECT job, number, state FROM sandboxes")]
        return left

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def _submit(self, number: int) -> None:
        name = f"{SCHEDD}#{number}.0#1700000000"
        hosts = self.random.choice((("h1",), ("h1", "h2")))
        count = self.random.randint(1, 3)
        self.outputs[name] = tuple(f"copy://{self.random.choice(hosts)}/{number}/f{at}" for at in range(count))
        self.schedd.jobs_[name] = Job(
            name, number, 0, Status.IDLE, 0, USER, entered_at=self.schedd.wall_s(), owner="alice"
        )
        self._match_later(name)

    def _match_later(self, name: str) -> None:
        self.world.after(self.random.uniform(5, 120), lambda: self._match(name))

    def _match(self, name: str) -> None:
        job = self.schedd.jobs_.get(name)
        if job is None or job.status != Status.IDLE or name in self.running:
            return
        nodes = [node for node in self.nodes if node.machine.is_up]
        if not nodes or not self.schedd.up:
            self._match_later(name)
            return
        node = self.random.choice(nodes)
        number = len(self.executions) + 1
        urls = self.outputs[name]
        files = {url: f"{name} run {number} of {url} ".encode() * self.random.randint(1, 3) for url in urls}
        execution = Execution(number, name, job.run + 1, node.name, files)
        self.executions.append(execution)
        self.running[name] = execution
        self.schedd.change(name, status=int(Status.RUNNING), run=job.run + 1, handed_off=0,
                           shadow_since=self.schedd.wall_s(), executing_since=self.schedd.wall_s())  # fmt: skip
        self.world.say(f"{name} starts on {node.name} as run {job.run + 1}, execution {number}")
        boot = node.machine.boot
        self.world.after(self.random.choice((10, 100, 400)), lambda: self._computed(execution, node, boot))

    def _computed(self, execution: Execution, node: Node, boot: int) -> None:
        """The job has ended: its plugins run, one after the other."""
        if self.running.get(execution.job) is not execution:
            return
        if not node.machine.is_up or node.machine.boot != boot:
            self._back_to_idle(execution)
            return
        scratch = f"/{node.name}/execute/dir_{execution.number}"
        node.machine.disk.make_dirs(scratch)
        paths = {}
        for at, (url, data) in enumerate(execution.files.items()):
            paths[url] = f"{scratch}/{at}"
            full, node.machine.disk.full = node.machine.disk.full, False
            node.machine.disk.put(paths[url], data)
            node.machine.disk.full = full
        urls = list(paths)
        count = self.random.randint(1, self.trouble.parts) if self.random.random() < 0.5 else 1
        groups = [group for group in (urls[at::count] for at in range(count)) if group]
        times = 2 if self.random.random() < self.trouble.repeats else 1
        self._call_plugin(_Upload(self, execution, node, boot, paths, groups, times))

    def _call_plugin(self, upload: _Upload) -> None:
        """The next plugin call of a run, or its end."""
        execution, node = upload.execution, upload.node
        if self.running.get(execution.job) is not execution or node.machine.boot != upload.boot:
            if self.running.get(execution.job) is execution:
                self._back_to_idle(execution)
            return
        if not upload.left and upload.times > 1:
            self.world.say(f"all uploads of {execution.job} are repeated")
            upload.begin_again()
            execution.accepted.clear()
            self.world.after(self.random.choice((0.01, 20.0, 200.0)), lambda: self._call_plugin(upload))
            return
        if not upload.left:
            node.machine.disk.forget(f"/{node.name}/execute/dir_{execution.number}")
            self._uploaded(execution)
            return
        group = upload.left.pop(0)
        if self.is_part_late:
            # The plugin has given up waiting and uploads itself, its offer is on its way all the same.
            self.is_part_late = False
            self.world.after(self.random.choice((0.1, 100.0, 400.0)), lambda: self._hand_over_late(execution))
            self._upload_itself(upload, group)
            return
        paths = {url: upload.paths[url] for url in group}
        if not self._offer(execution, node, paths, lambda what: upload.answered(group, what)):
            self._upload_itself(upload, group)

    def _offer(self, execution: Execution, node: Node, paths: dict[str, str], answered: Any) -> bool:
        """A plugin offers files to its node's manager. False when there is none."""
        intake = getattr(node.process, "intake", None) if node.is_alive else None
        if intake is None:
            return False
        process = Process(self.world, node.machine, f"plugin.{execution.number}")
        self.processes.append(process)
        call = PluginCall(self.world, process, self._facts(execution, node), paths, answered)
        assert node.process is not None
        node.process.on_death.append(call.end)
        with self.world.inside(node.process):
            intake._run(intake._client(call), "client")
        return True

    def _hand_over_late(self, execution: Execution) -> None:
        """A run that its access point has given up hands its output over; refused, it can do nothing."""
        node = next(one for one in self.nodes if one.name == execution.node)
        scratch = f"/{node.name}/execute/late_{execution.number}"
        if node.machine.is_up and not node.machine.disk.full:
            node.machine.disk.make_dirs(scratch)
            paths = {url: f"{scratch}/{at}" for at, url in enumerate(execution.files)}
            for url, path in paths.items():
                node.machine.disk.put(path, execution.files[url])
            self._offer(execution, node, paths, lambda what: self._handed_over_late(execution, what))

    def _handed_over_late(self, execution: Execution, what: Any) -> None:
        if what not in (None, "died"):
            self.world.say(f"late output of run {execution.ep_run} of {execution.job} is taken")
            self.by_ticket[what.ticket] = execution

    def _facts(self, execution: Execution, node: Node) -> RunFacts:
        uid = os.geteuid()
        return RunFacts(
            run=Run(execution.job, execution.ep_run, USER),
            user="alice",
            uid=uid,
            gid=uid,
            slot=SlotKey(node.name, 1, 1),
            slot_name=f"slot1@{node.name}",
            guard=True,
            fallback=self._fallback(execution.job),
        )

    def _fallback(self, job: str) -> str:
        """Return the second destination of a job; every second job has one."""
        number = int(self.outputs[job][0].split("/")[3])
        return f"{FALLBACKS}{number}/" if (self.seed + number) % 2 == 0 else ""

    def _upload_itself(self, upload: _Upload, group: list[str]) -> None:
        """The plugin uploads synchronously."""
        execution = upload.execution
        for url in group:
            if self.destination.put(execution, url, execution.files[url], "plugin"):
                self.world.after(30, lambda: self._back_to_idle(execution))
                return
        self.world.after(0.5, lambda: self._call_plugin(upload))

    def _uploaded(self, execution: Execution) -> None:
        """All plugins succeeded. Mostly the run completes; HTCondor may think otherwise."""
        name = execution.job
        job = self.schedd.jobs_.get(name)
        if job is None or job.status != Status.RUNNING:
            return
        if not self.schedd.up:
            self.world.after(20, lambda: self._uploaded(execution))
            return
        fate = self.random.random() if self.troubled else 1.0
        if fate < 0.06:  # vacated, or the shadow died
            if self.random.random() < 0.5:
                self._write_record(job, execution)
            self._back_to_idle(execution)
            return
        handed_off = sum(map(len, execution.accepted.values()))
        self._write_record(job, execution)
        del self.running[name]
        facts = {"handed_off": handed_off, "completions": job.completions + 1}
        if fate < 0.09:
            self.schedd.change(name, status=int(Status.HELD), hold_code=1)
            self.world.after(self.random.uniform(50, 2000), lambda: self._release(name))
            return
        if fate < 0.12:
            self.schedd.change(name, status=int(Status.REMOVED))
            return
        if self.troubled and fate > 0.94:
            self._fail_in_part(execution, handed_off)
            return
        if fate < (0.2 if self.forger is None else 0.5):
            # The schedd died before it heard of it: the next shadow only says that the job is done.
            at = self.schedd.wall_s()
            told = at + self.random.choice((-1, 0, 1))
            facts |= {"run": job.run + 1, "transferred_at": told, "executing_since": at - 2}
            if self.forger is not None and not self.restored:
                self.schedd.records[job_id_of(name)].insert(0, self.forger.of_others(job, at - 86400))
        execution.counted = True
        self.world.say(f"{name} completes as run {job.run}, execution {execution.number}")
        self.schedd.change(name, status=int(Status.COMPLETED), **facts)

    def _fail_in_part(self, execution: Execution, handed_off: int) -> None:
        """Another part of the output transfer fails: HTCondor holds the job, and its owner may do so once more."""
        name = execution.job
        execution.counted = True  # what was handed off is sent, as HTCondor itself would have sent it by then
        counted = self.random.choice((0, handed_off))
        self.held_in_part.add(name)
        self.world.say(f"{name} is held, a part of run {execution.ep_run} failed, execution {execution.number}")
        self.schedd.change(
            name, status=int(Status.HELD), hold_code=self.random.choice((12, 33)), hold_subcode=2, handed_off=counted
        )
        self.world.after(self.random.uniform(5, 2000), lambda: self._hold_again(name))
        self.world.after(self.random.uniform(50, 4000), lambda: self._release(name))

    def _hold_again(self, name: str) -> None:
        """The owner holds a held job: the code of the hold is another one then."""
        job = self.schedd.jobs_.get(name)
        is_begun = job is not None and (job.ad_state.run, job.status) == (job.run, Status.HELD)
        if is_begun and name in self.held_in_part and self.random.random() < 0.3:
            self.schedd.change(name, hold_code=1, hold_subcode=0)

    def _write_record(self, job: Job, execution: Execution) -> None:
        """The shadow appends its record to the job's file."""
        text = record_text(job, execution, self.schedd.wall_s())
        self.schedd.records[job_id_of(job.name)].append(text)

    def _evaluate(self) -> None:
        """The schedd looks at all jobs now and then."""
        if self.schedd.up:
            for name in list(self.schedd.jobs_):
                if not self.schedd.leaves(name) and self.schedd.jobs_[name].status == Status.IDLE:
                    self._match_later(name)
        self.world.after(300, self._evaluate)

    def _back_to_idle(self, execution: Execution) -> None:
        if self.running.get(execution.job) is execution:
            del self.running[execution.job]
            self.schedd.change(execution.job, status=int(Status.IDLE))

    def _release(self, name: str) -> None:
        job = self.schedd.jobs_.get(name)
        if job is not None and job.status == Status.HELD:
            self.world.say(f"{name} is released by its owner")
            self.held_in_part.discard(name)
            self.schedd.change(name, status=int(Status.IDLE), hold_code=0, hold_subcode=0)

    def _changed(self, name: str) -> None:
        """Something about a job changed: it may leave, run, or be cared for by its owner."""
        job = self.schedd.jobs_[name]
        if job.status == Status.IDLE:
            self._match_later(name)
        elif job.status in (Status.COMPLETED, Status.REMOVED):
            self.world.after(self.random.uniform(1, 60), lambda: self.schedd.leaves(name))
        elif job.held_by_us and not job.request:
            self.world.after(self.random.uniform(60, 1500), lambda: self._owner_acts(name))

    def _owner_acts(self, name: str) -> None:
        """The owner of a job that was held because its output could not be delivered."""
        job = self.schedd.jobs_.get(name)
        if job is None or not job.held_by_us or job.request:
            return
        wish = self.random.random()
        if job.ad_state.state == State.FAILED and wish < 0.15:
            self.world.say(f"the owner of {name} gives its output up")
            self.given_up.add(name)
            self.schedd.jobs_[name] = replace(job, request="cancel")
        elif job.ad_state.state == State.FAILED and wish < 0.7:
            request = self.random.choice(("retry", self._redirect_of(name)))
            self.world.say(f"the owner of {name} asks for {request}")
            self.schedd.jobs_[name] = replace(job, request=request)
            self.world.after(1500, lambda: self._owner_acts(name))
        elif not self._somebody_is_cut_off():
            self._release(name)
        else:
            self.world.after(300, lambda: self._owner_acts(name))

    def _somebody_is_cut_off(self) -> bool:
        return bool(self.collector.cut_off) or not self.collector.up


@dataclass
class _Upload:
    """The plugin calls of one run."""

    sim: Simulation
    execution: Execution
    node: Node
    boot: int
    paths: dict[str, str]
    groups: list[list[str]]
    times: int = 1

    def __post_init__(self) -> None:
        self.left = list(self.groups)

    def begin_again(self) -> None:
        """HTCondor repeats an upload that failed in the end."""
        self.times -= 1
        self.left = list(self.groups)

    def answered(self, group: list[str], what: Any) -> None:
        """One call has ended."""
        if what == "died":
            self.sim._back_to_idle(self.execution)
        elif what is None:
            self.sim._upload_itself(self, group)
        else:
            self.execution.accepted[what.ticket] = tuple(group)
            self.execution.managers[what.ticket] = (what.manager_name, what.manager_key)
            self.sim.by_ticket[what.ticket] = self.execution
            strikes, self.sim.after_handoff = self.sim.after_handoff, None
            if strikes is not None:
                delay_s = self.sim.random.choice((0.001, 0.5, 10.0))
                self.sim.world.after(delay_s, lambda: strikes(self.node, 0.0))
            self.sim._call_plugin(self)


__all__ = ["FAULTS", "Fault", "Simulation"]
