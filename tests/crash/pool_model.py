"""The pool round the product: destination, collector, schedd with its queue, records and history.

A model, on purpose simple. It knows what really happened, so it is also the judge: a file that arrives is compared with
the run that made it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from schedd_agent.collector import CollectorSnapshot
from schedd_agent.edits import Change, Edit, ToolCommand
from schedd_agent.model import DagEnd
from schedd_agent.queue import QueueError
from schedd_agent.receipts import Receipts
from stageout.condor.bindings import CondorError
from stageout.core import durable
from stageout.model.job import USER_HOLD_CODE, HistoryRecord, Job, JobAdState, Status
from stageout.wire.custody import AD_LIFETIME_S, AGENT_AD, MANAGER_AD, ORDERS_AD, JobKey, job_id_of, read_orders
from tests.crash.world import START_WALL_S, World

SCHEDD = "ap"
#: User of all jobs.
USER = "alice@test"


@dataclass
class Execution:
    """One run of a job, as it really was.

    :param number: grows over all runs of all jobs. :param ep_run: NumShadowStarts as its execute point knows it.
    :param accepted: ticket -> its URLs, of hand-offs whose receipt the plugin got.
    """

    number: int
    job: str
    ep_run: int
    node: str
    files: dict[str, bytes]
    accepted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    managers: dict[str, tuple[str, str]] = field(default_factory=dict)
    counted: bool = False


def path_of(url: str) -> str:
    """Return the path of a URL, which is the same on every host: a redirect changes only the host."""
    return url.split("/", 3)[3]


@dataclass
class Destination:
    """Servers that keep what they are sent, by path.

    :param down: hosts that do not answer; :param refusing: that refuse.
    :param unreachable_from: nodes that reach none of them. :param unknown: runs that a restored queue does not know
    and that no node holds output of. :param overtaken: (run, such a run after it) where nobody can keep the first from
    counting again: docs/developer/crash.md."""

    world: World
    content: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)
    unreachable_from: set[str] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    overtaken: set[tuple[int, int]] = field(default_factory=set)
    puts: int = 0

    def put(self, made_by: Execution, url: str, data: bytes, asked_by: str) -> str:
        """A whole file arrives, or "down", or "refused"."""
        host = url.split("/")[2]
        if host in self.down or asked_by.partition(".")[0] in self.unreachable_from:
            return "down"
        if host in self.refusing:
            return "refused"
        self.puts += 1
        self.world.say(f"{url} arrives from {asked_by}, run {made_by.number} of {made_by.job}")
        made = next(content for one, content in made_by.files.items() if path_of(one) == path_of(url))
        if data != made:
            self.world.violation(f"{url}: {data[:30]!r} was sent, run {made_by.number} made {made[:30]!r}")
        before = self.content.get(path_of(url))
        if before is not None and before[0] > made_by.number and (made_by.number, before[0]) not in self.overtaken:
            self.world.violation(f"{url}: output of run {made_by.number} overwrites that of run {before[0]}")
        if asked_by != "plugin" and not made_by.counted:
            self.world.violation(f"{url}: sent although run {made_by.number} never completed")
        self.content[path_of(url)] = (made_by.number, data)
        return ""


@dataclass
class Collector:
    """Ads that expire, come late, twice or not at all; all are gone after a restart.

    :param cut_off: senders that neither say nor hear anything; :param mute: that only hear.
    :param read_s: by manager, when the newest report was made that the access point has read. :param came_s: by
    manager, when its last report came, were it to get lost.
    """

    world: World
    up: bool = True
    started_s: float = -10_000.0
    cut_off: set[str] = field(default_factory=set)
    mischief: float = 0.0
    looks: list[float] = field(default_factory=list)
    last_sign_s: dict[tuple[str, str], float] = field(default_factory=dict)
    read_s: dict[str, float] = field(default_factory=dict)
    mute: set[str] = field(default_factory=set)
    on_orders: Any = None
    on_report: Any = None
    came_s: dict[str, float] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)
    _ads: dict[tuple[str, str], tuple[Mapping[str, Any], float]] = field(default_factory=dict)
    _made_s: dict[str, float] = field(default_factory=dict)

    def restart(self) -> None:
        """All ads are forgotten."""
        self.world.say("the collector restarts")
        self._expire()
        self._ads.clear()
        self.started_s = self.world.now_s
        self.up = True

    def take(self, ad: Mapping[str, Any], sender: str) -> bool:
        """An ad comes in. False when the sender notices that it did not."""
        if ad["MyType"] == MANAGER_AD and self.on_report is not None:
            self.on_report(sender, json.loads(ad["StageOutPayload"]))
        if not self.up or sender in self.cut_off | self.mute:
            return False
        self._made_s[ad["StageOutSignature"]] = self.came_s[ad["Name"]] = self.world.now_s
        if self.world.random.random() < self.mischief:
            if self.world.random.random() < 0.5:
                self.world.say(f"an ad of {sender} is lost")
                return True
            self.world.after(self.world.random.uniform(1, 200), lambda: self._keep(ad))
            if self.world.random.random() < 0.5:
                return True
        self._keep(ad)
        return True

    def _keep(self, ad: Mapping[str, Any]) -> None:
        if not self.up:
            return
        self._ads[ad["MyType"], ad["Name"]] = (ad, self.world.now_s)
        if ad["MyType"] == MANAGER_AD:
            report = json.loads(ad["StageOutPayload"])
            if report["number"] > self._newest.get(ad["Name"], 0):
                self._newest[ad["Name"]] = report["number"]
                self.last_sign_s.update({(ad["Name"], box["job"]): self.world.now_s for box in report["sandboxes"]})
        elif ad["MyType"] == ORDERS_AD and self.on_orders is not None:
            self.on_orders(read_orders(ad["StageOutPayload"]))

    def ads(self, *kinds: str) -> list[Mapping[str, Any]]:
        """All that have not expired."""
        self._expire()
        return [
            {**ad, "LastHeardFrom": int(START_WALL_S + came_s)} for (kind, _), (ad, came_s) in self._ads.items()
            if kind in kinds
        ]  # fmt: skip

    def reports(self) -> list[Mapping[str, Any]]:
        """Return what managers say, as the access point reads it."""
        found = self.ads(MANAGER_AD)
        for ad in found:
            made_s = self._made_s[ad["StageOutSignature"]]
            self.read_s[ad["Name"]] = max(made_s, self.read_s.get(ad["Name"], made_s))
        return found

    def answers(self, asker: str) -> bool:
        """Does a question from there get an answer?"""
        return self.up and asker not in self.cut_off

    def _expire(self) -> None:
        for (kind, name), (_, came_s) in list(self._ads.items()):
            ends_s = came_s + AD_LIFETIME_S
            if ends_s < self.world.now_s:
                del self._ads[kind, name]


class ManagerCollector:
    """The collector as a sandbox manager sees it."""

    def __init__(self, collector: Collector, node: str) -> None:
        self._collector = collector
        self._node = node

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        if not self._collector.answers(self._node):
            raise CondorError("the collector does not answer")
        return [
            ad for ad in self._collector.ads(AGENT_AD, ORDERS_AD)
            if ad["MyType"] == AGENT_AD or ad["StageOutManager"] == manager
        ]  # fmt: skip

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        if not self._collector.take(ad, self._node):
            raise CondorError("the collector does not answer")

    async def close(self) -> None:
        return None


class AgentDirectory:
    """The collector as the agent sees it."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def query_reports(self) -> CollectorSnapshot:
        if not self._collector.answers(SCHEDD):
            raise CondorError("the collector does not answer")
        self._collector.looks.append(self._collector.world.now_s)
        age_s = self._collector.world.now_s - self._collector.started_s
        return CollectorSnapshot(self._collector.reports(), age_s)

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        for ad in ads:
            if not self._collector.take(ad, SCHEDD):
                raise CondorError("the collector took no ad")


class ModelReceipts(Receipts):
    """The product's reader of records, fed from memory. :param records: by ``cluster.proc`` of the writing job."""

    def __init__(self, records: Mapping[str, list[bytes]]) -> None:
        self._model = records
        super().__init__(Path("/"))

    def has_news(self) -> bool:
        return False

    def _version(self, cluster: int, proc: int) -> tuple[int, ...]:
        return (len(self._model.get(f"{cluster}.{proc}", ())),)

    def _read(self, cluster: int, proc: int) -> bytes:
        return b"".join(self._model.get(f"{cluster}.{proc}", ()))


class Handed(NamedTuple):
    """One hand-off, as a record names it. :param files: how many there are."""

    ticket: str
    manager: str
    key: str
    files: int


def record_text(job: Job, execution: Execution, wall_s: int) -> bytes:
    """The OUTPUT record that a shadow writes about the job's run."""
    handed = [Handed(ticket, *execution.managers[ticket], len(urls)) for ticket, urls in execution.accepted.items()]
    return _record(job.name, job.run, job.owner, handed, wall_s)


def _record(name: str, run: int, owner: str, handed: Sequence[Handed], wall_s: int) -> bytes:
    ads = []
    for one in handed:
        facts = f'Ticket = "{one.ticket}"; ManagerName = "{one.manager}"; ManagerKey = "{one.key}"'
        receipt = f"[ {facts}; Files = {one.files}; Bytes = 1 ]"
        ads += [f"[ DeveloperData = [ StageOutReceipt = {receipt} ] ]"] * one.files
    results = f"OutputPluginResultList = {{ {', '.join(ads)} }}\n" if ads else ""
    head = f'GlobalJobId = "{name}"\nNumShadowStarts = {run}\n{results}EpochWriteDate = {wall_s}\n'
    cluster, proc = job_id_of(name).split(".")
    ids = f"ClusterId={cluster} ProcId={proc} RunInstanceId={run - 1}"
    return f'{head}*** OUTPUT {ids} Owner="{owner}" CurrentTime={wall_s}\n'.encode()


class Forger(NamedTuple):
    """A user whose jobs forge records. :param ticket: of nobody, at this manager with this key."""

    ticket: str
    manager: str
    key: str

    def imitated(self, job: Job, wall_s: int) -> tuple[str, bytes]:
        """Return a job of the forger's, and its record, in whose texts a record of the job's run seems to stand."""
        writer = f"{1000 + int(self.ticket[:6], 16)}.0"
        own = _record(f"{SCHEDD}#{writer}#{wall_s}", 1, "mallory", [], wall_s)
        return writer, own + self.forged(job.name, job.run, job.owner, wall_s) + own

    def of_others(self, job: Job, wall_s: int) -> bytes:
        """Return records of the job's next run: of one that had its number in an earlier queue, or of another owner."""
        name, _, made = job.name.rpartition("#")
        if int(self.ticket[-1], 16) % 2:
            return self.forged(f"{name}#{int(made) - 1}", job.run + 1, job.owner, wall_s)
        return self.forged(job.name, job.run + 1, "mallory", wall_s)

    def forged(self, name: str, run: int, owner: str, wall_s: int) -> bytes:
        """Return what looks like the record of a run."""
        return _record(name, run, owner, [Handed(self.ticket, self.manager, self.key, 1)], wall_s)


_SHOWN = {
    "StageOutState": "state", "StageOutRun": "run", "StageOutReason": "reason", "StageOutBytesLeft": "bytes_left",
    "StageOutFilesLeft": "files_left", "StageOutAttempts": "attempts", "StageOutNextAttempt": "next_attempt_at",
    "StageOutManager": "manager", "StageOutCustody": "custody",
}  # fmt: skip
_JOB = {
    "JobStatus": "status", "HoldReasonCode": "hold_code", "HoldReasonSubCode": "hold_subcode",
    "NumJobCompletions": "completions", "StageOutReruns": "reruns", "StageOutRequest": "request",
    "EnteredCurrentStatus": "entered_at", "StageOutUntold": "unlogged_hold_run",
    "StageOutKeptUntil": "kept_until",
}  # fmt: skip


@dataclass
class Schedd:
    """The queue with its history and records; edits work as on a schedd's.

    :param on_edit: told after a change: (job before, job after, edit).
    """

    world: World
    up: bool = True
    jobs_: dict[str, Job] = field(default_factory=dict)
    let_go: set[str] = field(default_factory=set)
    history: dict[str, HistoryRecord] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    records: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    on_edit: Any = None
    on_change: Any = None

    def wall_s(self) -> int:
        return int(START_WALL_S + self.world.now_s)

    # ---- what the agent asks -----------------------------------------------------------------------------------------

    def jobs(self, reported: Collection[JobKey]) -> list[Job]:
        self._answer()
        ids = {key.job_id for key in reported}
        return [job for job in self.jobs_.values() if f"{job.cluster}.{job.proc}" in ids or _is_candidate(job)]

    def history_records(self, jobs: Collection[JobKey]) -> dict[JobKey, HistoryRecord]:
        self._answer()
        return {key: self.history[key.name] for key in jobs if key.owner == USER and key.name in self.history}

    def ids(self, first: int, last: int) -> set[tuple[int, int]]:
        self._answer()
        return {(job.cluster, job.proc) for job in self.jobs_.values()}

    def dags(self, clusters: Collection[int]) -> dict[int, DagEnd]:
        return {}

    def remove(self, job: Job, reason: str) -> None:
        raise QueueError("not in this model")

    def apply(self, edit: Edit) -> None:
        self._answer()
        with durable.step(edit.label):
            name = next((job.name for job in self.jobs_.values() if f"{job.cluster}.{job.proc}" == edit.job_id), None)
            if name is None:
                raise QueueError("no such job")
            before = self.jobs_[name]
            for change in edit.changes:
                self.world.on_call_now("schedd-edit")
                self._set(name, change.name, change.value)
            job = self.jobs_[name]
            if edit.atomic:
                self.world.on_call_now("schedd-edit")
                if f"JobStatus == {int(job.status)} && NumShadowStarts == {job.run}" not in edit.condition:
                    raise QueueError("the job has moved on")
                for attribute, value in (*edit.told, *edit.atomic):
                    self._set(name, attribute, value)
            if edit.command:
                self.world.on_call_now("schedd-act")
                self._act(name, edit.command)
            self.on_edit(before, self.jobs_[name], edit)
        self.on_change(name)

    def set_in(self, job_ids: Sequence[str], change: Change) -> None:
        self._answer()
        self.world.on_call_now("schedd-edit")
        found = {f"{job.cluster}.{job.proc}": job for job in self.jobs_.values()}
        if not found.keys() >= set(job_ids):
            raise QueueError("no such job")
        for job_id in job_ids:
            before = found[job_id]
            self._set(before.name, change.name, change.value)
            if change.name == "StageOutState":
                label = "edit-delivered" if change.value == '"Delivered"' else "edit-progress"
                self.on_edit(before, self.jobs_[before.name], Edit(label, before.cluster, before.proc))
        for job_id in job_ids:
            self.on_change(found[job_id].name)

    def _answer(self) -> None:
        if not self.up:
            raise QueueError("the schedd does not answer")

    def _set(self, name: str, attribute: str, text: str) -> None:
        job = self.jobs_[name]
        value: Any = text[1:-1] if text.startswith('"') else int(text) if text.lstrip("-").isdigit() else text
        if attribute in _SHOWN:
            self.jobs_[name] = replace(job, ad_state=replace(job.ad_state, **{_SHOWN[attribute]: value}))
        elif attribute in _JOB:
            empty: Any = "" if attribute == "StageOutRequest" else 0
            self.jobs_[name] = replace(job, **{_JOB[attribute]: empty if value == "undefined" else value})
        elif attribute == "LeaveJobInQueue":
            self.let_go.add(name)

    def _act(self, name: str, act: ToolCommand) -> None:
        job = self.jobs_[name]
        if not (job.status == Status.HELD and f"NumShadowStarts == {job.run}" in act.condition):
            return
        if act.tool == "condor_hold" and job.hold_code != USER_HOLD_CODE:
            self.jobs_[name] = replace(job, hold_code=USER_HOLD_CODE)
        elif act.tool == "condor_release":
            self.jobs_[name] = replace(job, status=Status.COMPLETED, hold_code=0, hold_subcode=0)

    # ---- what happens to jobs ----------------------------------------------------------------------------------------

    def change(self, name: str, **facts: Any) -> None:
        """A change by the schedd itself."""
        self.jobs_[name] = job = replace(self.jobs_[name], **{"entered_at": self.wall_s(), **facts})
        if job.status == Status.REMOVED:
            self.removed.add(name)
        self.on_change(name)

    def leaves(self, name: str) -> bool:
        """Let a job leave when nothing keeps it. True when it has left."""
        job = self.jobs_.get(name)
        if job is None:
            return True
        delivered = job.ad_state.state == "Delivered" and job.ad_state.run == job.run
        ends = job.status == Status.COMPLETED and (delivered or not job.handed_off or name in self.let_go)
        if ends or job.status == Status.REMOVED:
            self.history[name] = HistoryRecord(
                int(job.status), job.run, job.executing_since, job.transferred_at, reconnects=job.reconnects
            )
            del self.jobs_[name]
            self.world.say(f"{name} leaves the queue with status {int(job.status)}")
            return True
        return False

    def backup(self) -> tuple[dict[str, Job], set[str], dict[str, HistoryRecord]]:
        """The queue as of now."""
        return dict(self.jobs_), set(self.let_go), dict(self.history)

    def restore(self, saved: tuple[dict[str, Job], set[str], dict[str, HistoryRecord]]) -> None:
        """The queue is again what it was; runs that it thinks are going on have ended."""
        self.jobs_, self.let_go, self.history = dict(saved[0]), set(saved[1]), dict(saved[2])
        for name, job in self.jobs_.items():
            if job.status in (Status.RUNNING, Status.TRANSFERRING):
                self.jobs_[name] = replace(job, status=int(Status.IDLE))


def _is_candidate(job: Job) -> bool:
    return (
        job.status in (Status.COMPLETED, Status.REMOVED) or job.ad_state != JobAdState() or bool(job.request)
        or job.held_by_us or (job.status == Status.HELD and job.held_at_exit)
        or (job.has_failed_transfer and job.handed_off > 0)
    )  # fmt: skip
