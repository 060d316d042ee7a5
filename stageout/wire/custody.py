"""Messages between sandbox managers (EP) and schedd agents (AP), carried by ads in the collector.

A manager publishes one ad (MyType ``StageOutManager``) with the states of its sandboxes; where the collector refuses
such ads from it, the same attributes go into its slot ads. An agent publishes an ad about itself (``StageOutAgent``,
one per schedd) and one ad with orders per manager (``StageOutOrders``). The content is one string, ``StageOutPayload``
(JSON), which ``StageOutSignature`` covers byte by byte; the other attributes are for people.
``docs/administrator/security.md`` says who may say what.

The collector keeps its ads in tables, and a query scans the tables of its type. Each kind of message therefore has a
small table of its own that no daemon of HTCondor scans: :data:`REPORTS` and :data:`LETTERS`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple

from stageout.core.metrics import host_of
from stageout.core.signing import BadSignature, SigningKey, Vouch, check
from stageout.core.states import State
from stageout.wire.typed import IllTyped, WallClock, built

MANAGER_AD = "StageOutManager"
AGENT_AD = "StageOutAgent"
ORDERS_AD = "StageOutOrders"
BUCKET_AD = "StageOutOrderBucket"
AD_LIFETIME_S = 900
#: Maximum number of seconds between two reports while output waits at a manager.
BUSY_REPORT_INTERVAL_S = 40.0
#: Intervals between reports after which a manager without a newer report counts as silent.
_SILENT_INTERVALS = 3
#: The same in seconds, where a report announces no interval.
_SILENT_WITHOUT_INTERVAL_S = 660
#: Seconds for plugins that end, and for bytes under way: on a node without network its kernel repeats them for up to
#: 205 s, even when the plugin is gone.
_PLUGINS_END_S, _BYTES_UNDER_WAY_S = 30.0, 240.0
FILES_SHOWN = 50
#: Fields that each message contains. All other fields are left out while they have their default value.
_ALWAYS_SAID = frozenset(
    {
        "attempts", "data_slot", "error", "error_code", "extra", "files", "heard", "next_attempt_at", "orders", "owner",
        "plugin", "priority", "renewal_certificate", "renewal_url", "sandboxes", "series", "servers", "tickets",
        "unleased", "verified",
    }
)  # fmt: skip
SERVERS_SHOWN = 20
REFUSALS_SHOWN = 30
_IN_BUCKET = ("Name", "StageOutManager", "StageOutPayload", "StageOutSignature")
_NO_SANDBOXES = '"sandboxes":[]'


class Table(NamedTuple):
    """A table of the collector. :param ad_type: type for queries. :param update: command that puts an ad into it."""

    ad_type: str
    update: str


#: Reports of managers. The agents read all of them.
REPORTS = Table("License", "UPDATE_LICENSE_AD")
#: Notices of agents and buckets of order sheets. Every manager queries it every few seconds.
LETTERS = Table("HAD", "UPDATE_HAD_AD")
#: The collector's key of an ad in the table of reports contains the host of this address.
REPORT_ADDRESS = {"MyAddress": "<127.0.0.1:0>"}
#: Each agent distributes its order sheets over this number of ads, so that a manager's query costs the same in any
#: pool.
BUCKETS = 64


class BadPayload(Exception):
    """An ad whose payload is invalid or whose signature is wrong. It is ignored and logged."""


class JobKey(NamedTuple):
    """A job of one user. Output is always looked up by name and owner, never by the name alone.

    Owners may write the name of another job into their own.

    :param name: GlobalJobId, ``schedd#cluster.proc#time``. :param owner: User of the job, ``alice@domain``.
    """

    name: str
    owner: str

    @property
    def schedd(self) -> str:
        """Return the name of the schedd whose queue contains the job."""
        return schedd_of(self.name)

    @property
    def job_id(self) -> str:
        """Return ``cluster.proc``."""
        return job_id_of(self.name)


@dataclass(frozen=True)
class Run:
    """One run of a job: the identity under which output is kept, sent and fenced.

    :param job: GlobalJobId, ``schedd#cluster.proc#time``.
    :param number: NumShadowStarts, which only grows.
    :param owner: User of the job, ``alice@domain``.
    """

    job: str
    number: int
    owner: str

    @property
    def schedd(self) -> str:
        """Return the name of the schedd whose queue contains the job."""
        return schedd_of(self.job)

    @property
    def job_id(self) -> str:
        """Return ``cluster.proc``."""
        return job_id_of(self.job)

    @property
    def key(self) -> JobKey:
        """Return the job of the run."""
        return JobKey(self.job, self.owner)


_JOB_NAME = re.compile(r"(?P<schedd>[^#]+)#(?P<job_id>[0-9]{1,10}\.[0-9]{1,10})(?:#[0-9]{1,10})?\Z")


def is_job_name(name: str) -> bool:
    """Tell whether a text is the GlobalJobId of a job. It has no time with GLOBAL_JOB_ID_WITH_TIME = false."""
    return _JOB_NAME.match(name) is not None


def is_name_of(name: str, schedd: str, job_id: str) -> bool:
    """Tell whether a GlobalJobId belongs to a job, whose owner may have written another one.

    Owners can change its time as well, which only distinguishes two queues of one schedd.

    :param name: GlobalJobId. :param schedd: name of the job's schedd. :param job_id: ``cluster.proc`` of the job.
    """
    found = _JOB_NAME.match(name)
    return found is not None and (found["schedd"], found["job_id"]) == (schedd, job_id)


def schedd_of(name: str) -> str:
    """Return the schedd in a GlobalJobId."""
    return name.split("#", 1)[0]


def job_id_of(name: str) -> str:
    """Return ``cluster.proc`` out of a GlobalJobId."""
    return name.split("#")[1]


@dataclass(frozen=True)
class FileReport:
    """One file as shown to people.

    :param url: without userinfo and query. :param next_attempt_at: wall clock, seconds; 0 when none is planned.
    :param excused: attempts that do not count against the limit: the server, a credential or the node failed.
    :param began_at: wall clock, seconds: first byte of the attempt that delivered the file where the plugin reports it,
        otherwise the start of that attempt. While the file moves, the start of the attempt that runs.
    :param ended_at: wall clock, seconds, of the delivery; 0 before.
    :param digest: ``name:value`` pairs that the plugin computed; ``verified`` says what the destination confirmed.
    :param streams: that the transfer used. :param transfer_ms: duration of the transfer of the data; 0: not known.
    :param route: routers of the overlay, as its plugin reports them.
    :param of_node: 1: the last failure was the node's, not the destination's.
    """

    name: str
    url: str
    size_bytes: int
    state: str
    plugin: str = ""
    attempts: int = 0
    error_code: int = 0
    error: str = ""
    next_attempt_at: WallClock = 0
    verified: str = ""
    excused: int = 0
    began_at: WallClock = 0
    ended_at: WallClock = 0
    digest: str = ""
    streams: int = 0
    transfer_ms: int = 0
    route: str = ""
    of_node: int = 0


@dataclass(frozen=True)
class SandboxReport:
    """State of one sandbox.

    :param number: fencing number of the run. :param change: grows with each change of this sandbox's state.
    :param tickets: hand-offs that belong to it. :param attempts_limit: of each file; 0 without a limit.
    :param excused: attempts that do not count against the limit.
    :param files: at most FILES_SHOWN, those in trouble first.
    :param custody: receipts of files that were handed over to the overlay (:mod:`stageout.wire.deposits`); of a sandbox
        that has not come to its end, also of those that a custodian may have by now.
    :param files_only_here: left, and in none of these receipts.
    :param holdings: who has how much of these, and since when.
    :param group: accounting group of the job, "" without one.
    :param confirmed_at: wall clock, seconds; 0: the run is not confirmed. :param ended_at: wall clock of the end.
    :param paused: 1 while its owner has paused it.
    :param files_dropped: given up with the sandbox, and not in ``files_total``; likewise ``bytes_dropped``.
    :param refused: reason why the last REDIRECT was not carried out, or not for all files; "" when it was.
    :param gives_up_at: wall clock, seconds: last attempt at the latest. 0 before the first failure and at the end.
    :param fallback: URL of the directory for files that cannot be delivered; "" for none, or when it is ignored.
    :param fallback_note: reason why files went there; without ``fallback``, reason why the job's own is ignored.
    :param failing_since: wall clock, seconds: since then the last attempt of some file that is left has failed; 0: of
        none.
    """

    job: str
    number: int
    owner: str
    state: str
    change: int
    reason: str
    error_code: int
    tickets: tuple[str, ...]
    files_total: int
    files_left: int
    bytes_total: int
    bytes_left: int
    attempts: int
    attempts_limit: int
    next_attempt_at: WallClock
    accepted_at: WallClock
    data_slot: str = ""
    files: tuple[FileReport, ...] = ()
    custody: tuple[str, ...] = ()
    holdings: tuple[str, ...] = ()
    files_only_here: int = 0
    excused: int = 0
    group: str = ""
    confirmed_at: WallClock = 0
    ended_at: WallClock = 0
    paused: int = 0
    files_dropped: int = 0
    bytes_dropped: int = 0
    refused: str = ""
    gives_up_at: WallClock = 0
    fallback: str = ""
    fallback_note: str = ""
    failing_since: WallClock = 0

    @property
    def run(self) -> Run:
        """The run that made the sandbox."""
        return Run(self.job, self.number, self.owner)

    @property
    def server(self) -> str:
        """Return host and port of its first URL, "" without one, and without user name and password."""
        return next((host_of(file.url) for file in self.files if file.url), "")

    @property
    def code(self) -> int:
        """Return the code of its last failure, or of the first of its files that failed; 0 without one."""
        return self.error_code or next((file.error_code for file in self.files if file.error_code), 0)

    @property
    def trouble_since_at(self) -> int:
        """Return since when it failed or was lost, or since when it fails, as wall clock seconds; 0 without trouble or
        when paused.
        """
        if self.state in (State.FAILED, State.LOST):
            return self.ended_at
        return 0 if self.paused else self.failing_since


@dataclass(frozen=True)
class ServerReport:
    """A destination's server that cannot be reached, with the time of the next attempt.

    :param circuit: "open" or "half-open". :param failures: probes in a row without an answer.
    :param since_at: wall clock, seconds. :param probe_at: time of the next probe; 0 while one is running.
    """

    server: str
    circuit: str
    reason: str
    failures: int
    since_at: WallClock
    probe_at: WallClock


@dataclass(frozen=True)
class FlowReport:
    """Deliveries of one manager to one server.

    :param rate_bytes_per_s: of all transfers together, while some ran, over their last ten minutes; 0: not known.
    :param work_bytes_per_s: the same rate with :data:`stageout.core.eta.FILE_BYTES` for each file; while this manager
        has
        delivered nothing since its start, the usual rate of one plugin call. 0: not known.
    :param spread: mean deviation of the natural logarithm of a call's rate.
    :param streams: in use. :param limit: files at once that the tuner has chosen.
    :param tuning: state of the tuner: :class:`stageout.wire.control.Tuning`.
    :param files_waiting: that may be sent, with ``bytes_waiting``. :param files_moving: files being sent.
    """

    server: str
    rate_bytes_per_s: int = 0
    work_bytes_per_s: int = 0
    spread: float = 0.0
    streams: int = 0
    limit: int = 0
    tuning: str = ""
    files_waiting: int = 0
    bytes_waiting: int = 0
    files_moving: int = 0
    bytes_moving: int = 0


@dataclass(frozen=True)
class RefusalReport:
    """A run whose hand-off was refused, so that its plugin sends the output itself.

    :param job: GlobalJobId. :param number: of the run. :param code: of the reason, with the sentence ``reason``.
    :param owner: User of the job; "" from an earlier version.
    """

    job: str
    number: int
    code: str
    reason: str
    owner: str = ""


@dataclass(frozen=True)
class Report:
    """All that one manager says at one time.

    :param number: grows with every report, over restarts too. :param sent_at: wall clock, seconds.
    :param acknowledged: agent name -> number of the last order of it that was carried out.
    :param bytes_at_risk: accepted and not delivered. :param servers: that cannot be reached, at most SERVERS_SHOWN.
    :param unleased: schedds whose output waits for their agent's word that it hears this manager.
    :param ends_in_s: a pilot's end: so long after this report was made its manager sends and says nothing any more,
        unless it is started again. 0: no end is known.
    :param flows: servers with output that waits or moves, at most SERVERS_SHOWN, those with the most bytes first.
    :param cpu_slots: CPUs of the node. :param data_slots: sandboxes that its data slots take.
    :param spool_bytes: of the quota that are taken. :param spool_limit_bytes: the quota.
    :param refusals: the last REFUSALS_SHOWN refused hand-offs since the manager's start.
    :param interval_s: seconds until the next report at the latest; 0: from an earlier version.
    :param lease_s: the manager sends nothing later than this many seconds after the last report that the access
        point has read, even if the access point allows more; 0: as long as the access point allows.
    :param version: of the manager. :param handoffs: tried within the last hour. :param handoffs_refused: of these, by
        code of the reason. :param full_since: wall clock, seconds: since then the node takes no new jobs because its
        spool is too full; 0: it takes them.
    """

    manager: str
    key: str
    number: int
    sent_at: WallClock
    acknowledged: Mapping[str, int]
    bytes_at_risk: int
    sandboxes: tuple[SandboxReport, ...] = ()
    servers: tuple[ServerReport, ...] = ()
    unleased: tuple[str, ...] = ()
    ends_in_s: int = 0
    flows: tuple[FlowReport, ...] = ()
    cpu_slots: int = 0
    data_slots: int = 0
    spool_bytes: int = 0
    spool_limit_bytes: int = 0
    refusals: tuple[RefusalReport, ...] = ()
    interval_s: int = 0
    lease_s: int = 0
    version: str = ""
    handoffs: int = 0
    handoffs_refused: Mapping[str, int] = field(default_factory=dict)
    full_since: WallClock = 0

    @property
    def silent_after_s(self) -> int:
        """Return the age of this report, in seconds, at which its manager counts as silent."""
        return _SILENT_INTERVALS * self.interval_s or _SILENT_WITHOUT_INTERVAL_S


def silence_of_lost_s(lease_s: float) -> float:
    """Return the seconds without a report after which a manager with this lease sends nothing more, by any clock."""
    return max(lease_s * 4 / 3, lease_s + _PLUGINS_END_S, _BYTES_UNDER_WAY_S)


class Action(str, enum.Enum):
    """The orders that an agent can give to a manager."""

    CONFIRM = "confirm"
    SUPERSEDE = "supersede"
    CANCEL = "cancel"
    RETRY = "retry"
    PAUSE = "pause"
    RESUME = "resume"
    REDIRECT = "redirect"
    FORGET = "forget"


@dataclass(frozen=True)
class Order:
    """One order. Applying it twice has the same effect as once.

    CONFIRM: the run completed, send its files (``tickets`` and ``files`` as in the OUTPUT record of the run).
    SUPERSEDE: a run with a number above ``run_number`` exists: delete the output of that run and older ones. CANCEL:
    the job was removed. RETRY: try FAILED and waiting files now, with fresh attempts. PAUSE/RESUME: the owner's
    request. REDIRECT: send waiting and failed files to another URL, with fresh attempts. FORGET: the AP has recorded
    the end; the manager may drop the record.

    :param number: grows with every order of this agent, over restarts too.
    :param owner: User of the job. Output of another user does not belong to this job.
    :param request: of the owner, which tells two redirects apart. :param new_url: of a redirect.
    :param only_file: name of the only file to redirect; "" for all, below ``new_url``.
    """

    number: int
    action: Action
    job: str
    run_number: int
    tickets: tuple[str, ...] = ()
    files: int = 0
    priority: int = 0
    request: str = ""
    new_url: str = ""
    only_file: str = ""
    owner: str = ""

    @property
    def run(self) -> Run:
        """Return the run of the order."""
        return Run(self.job, self.run_number, self.owner)


@dataclass(frozen=True)
class OrderSheet:
    """Orders of one agent for one manager that are not acknowledged yet, oldest first.

    :param manager_key: public key of the intended manager; a manager with the same name and another key is not meant.
    :param series: of order numbers; an agent that lost its last number begins a new one.
    :param heard: number of the manager's newest report that the agent has read. :param lease_s: seconds after the time
        of that report during which the manager may send; 0: the agent never treats silence as loss.
    """

    agent: str
    manager: str
    sent_at: WallClock
    orders: tuple[Order, ...] = ()
    manager_key: str = ""
    series: str = ""
    heard: int = 0
    lease_s: float = 0.0

    @property
    def numbering(self) -> str:
        """Return the name under which order numbers are acknowledged."""
        return f"{self.agent}+{self.series}" if self.series else self.agent


@dataclass(frozen=True)
class AgentNotice:
    """An agent is alive and answers for this schedd.

    :param number: grows with every notice, over restarts too. :param vouches: from the agent's earlier keys to this.
    """

    agent: str
    schedd: str
    key: str
    number: int
    sent_at: WallClock
    renewal_url: str = ""
    renewal_certificate: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    vouches: tuple[Vouch, ...] = ()


class EncodedSandbox(NamedTuple):
    """A sandbox in the form of a report's payload. :param is_busy: its output still needs attention."""

    text: str
    is_busy: bool


def encoded(sandbox: SandboxReport) -> EncodedSandbox:
    """Encode a sandbox for :func:`report_ad`: one that has not changed need not be encoded again."""
    return EncodedSandbox(_text(sandbox), sandbox.state not in (State.RELEASED, State.SUPERSEDED, State.CANCELLED))


def report_ad(
    report: Report, key: SigningKey | None = None, more: Iterable[EncodedSandbox] = ()
) -> dict[str, Any]:  # fmt: skip
    """Make the manager's ad.

    :param key: signs it; None only where signing is not the matter. :param more: sandboxes beside those of the report.
    """
    sandboxes = [*map(encoded, report.sandboxes), *more]
    # No other string can contain these bytes: within a string the quotes would be escaped.
    rest, found, end = _text(replace(report, sandboxes=())).partition(_NO_SANDBOXES)
    assert found
    text = f"{rest}{_NO_SANDBOXES[:-1]}{','.join(sandbox.text for sandbox in sandboxes)}]{end}"
    return {
        **_envelope(MANAGER_AD, report.manager, text, report.sent_at, key),
        "StageOutManager": report.manager,
        "StageOutSandboxes": sum(sandbox.is_busy for sandbox in sandboxes),
        "StageOutBytesAtRisk": report.bytes_at_risk,
    }


def orders_ad(sheet: OrderSheet, key: SigningKey | None = None) -> dict[str, Any]:
    """Make the ad with an agent's orders for a manager. Its name contains the manager's key, which nobody can copy."""
    name = "/".join(part for part in (sheet.agent, sheet.manager, sheet.manager_key) if part)
    return {**_envelope(ORDERS_AD, name, _text(sheet), sheet.sent_at, key), "StageOutManager": sheet.manager}


def bucket_of(manager: str) -> int:
    """Compute the bucket that holds the order sheets for a manager of this name."""
    return int.from_bytes(hashlib.sha256(manager.encode("utf-8")).digest()[:4], "big") % BUCKETS


def bucket_ad(agent: str, bucket: int, sheets: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Make the ad with the order sheets of one agent for the managers of a bucket.

    :param sheets: ads of :func:`orders_ad`; each keeps its own signature.
    """
    content = [[ad[name] for name in _IN_BUCKET] for ad in sheets]
    return {
        "MyType": BUCKET_AD, "Name": f"{agent}/{bucket}", "StageOutBucket": bucket, "StageOutPayload": _text(content),
        "ClassAdLifetime": AD_LIFETIME_S,
    }  # fmt: skip


def sheets_for(manager: str, ad: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Find the order ads for a manager in a bucket's ad. :raises BadPayload: it holds something else."""
    try:
        rows = [dict(zip(_IN_BUCKET, map(str, row))) for row in json.loads(payload_of(ad))]
    except (ValueError, TypeError, RecursionError) as problem:
        raise BadPayload(f"not a bucket of order sheets: {problem}") from None
    return [{"MyType": ORDERS_AD, **row} for row in rows if row.get("StageOutManager") == manager]


def notice_ad(notice: AgentNotice, key: SigningKey | None = None) -> dict[str, Any]:
    """Make the ad by which managers know that an agent is alive."""
    ad = _envelope(AGENT_AD, notice.agent, _text(notice), notice.sent_at, key)
    return {**ad, "StageOutSchedd": notice.schedd}


def _fields(said: Any) -> dict[str, Any]:
    """Return the fields of a message, without those that are left out."""
    may_lack = _may_lack(said.__class__)
    return {name: value for name, value in vars(said).items() if value or name not in may_lack}


@functools.cache
def _may_lack(kind: Any) -> frozenset[str]:
    """Return the fields of a kind of messages that are left out while they have their default value."""
    defaults = {
        item.name for item in fields(kind) if item.default is not MISSING or item.default_factory is not MISSING
    }
    return frozenset(defaults - _ALWAYS_SAID)


def _text(said: object) -> str:
    return json.dumps(said, default=_fields, separators=(",", ":"), sort_keys=True)


def _envelope(my_type: str, name: str, text: str, sent_at: int, key: SigningKey | None) -> dict[str, Any]:
    return {
        "MyType": my_type,
        "Name": name,
        "StageOutPayload": text,
        "StageOutSignature": key.sign(my_type, text) if key else "",
        "StageOutSentAt": sent_at,
        "ClassAdLifetime": AD_LIFETIME_S,
    }


def read_report(payload: str) -> Report:
    """Parse a manager's payload. :raises BadPayload: not a report."""
    try:
        report = built(Report, json_object(payload))
        for sandbox in report.sandboxes:
            State(sandbox.state)
    except ValueError as problem:
        raise BadPayload(f"not a report: {problem}") from None
    return report


def sandbox_of(item: object) -> SandboxReport:
    """Make a sandbox out of its fields. :raises ValueError: they are not those of a sandbox."""
    found = built(SandboxReport, item)
    State(found.state)
    return found


def read_orders(payload: str) -> OrderSheet:
    """Parse an agent's order payload. :raises BadPayload: not an order sheet."""
    try:
        return built(OrderSheet, json_object(payload))
    except IllTyped as problem:
        raise BadPayload(f"not an order sheet: {problem}") from None


def read_notice(payload: str) -> AgentNotice:
    """Parse an agent's notice. :raises BadPayload: not a notice."""
    try:
        return built(AgentNotice, json_object(payload))
    except IllTyped as problem:
        raise BadPayload(f"not an agent's notice: {problem}") from None


def left_in(notice: AgentNotice) -> dict[str, int]:
    """Return how much output nodes hold of jobs that have left the schedd's queue, by state."""
    told = notice.extra.get("left")
    counts = told.items() if isinstance(told, dict) else ()
    known = {state.value for state in State}
    return {state: number for state, number in counts if state in known and type(number) is int and number > 0}


def left_jobs_in(notice: AgentNotice) -> frozenset[JobKey]:
    """Return jobs that have left the schedd's queue while a node holds their output; only the first ones of many."""
    told = notice.extra.get("left_jobs")
    pairs = (pair for pair in told if isinstance(pair, list)) if isinstance(told, list) else ()
    return frozenset(JobKey(*pair) for pair in pairs if len(pair) == 2 and all(isinstance(one, str) for one in pair))


class SilentManager(NamedTuple):
    """A manager that an agent counts as silent while output waits there, because its node may be gone.

    :param name: without the key. :param silent_s: when the notice was made. :param outputs: of jobs in the queue.
    :param lost_in_s: seconds until the jobs run again. :param owners: of the output, a few.
    """

    name: str
    silent_s: int
    outputs: int
    lost_in_s: int
    owners: tuple[str, ...]


def silent_in(notice: AgentNotice) -> list[SilentManager]:
    """Return the managers that the agent counts as silent."""
    told = notice.extra.get("silent")
    found = []
    for row in told if isinstance(told, list) else ():
        with contextlib.suppress(IllTyped):
            found.append(built(SilentManager, row))
    return found


class RefusedIdentity(NamedTuple):
    """Jobs of a user under names of other jobs. An agent counts them; the names themselves are not included.

    :param owner: User of the jobs, which the schedd writes. :param what: "job": GlobalJobId names another job;
        "output": a node holds output for which its owner has no job. :param jobs: ``cluster.proc``, a few.
    :param since_at: wall clock, seconds.
    """

    owner: str
    what: str
    number: int
    jobs: tuple[str, ...]
    since_at: WallClock


def identities_in(notice: AgentNotice) -> list[RefusedIdentity]:
    """Return the identities that the agent refuses."""
    told = notice.extra.get("identities")
    found = []
    for row in told if isinstance(told, list) else ():
        with contextlib.suppress(IllTyped):
            found.append(built(RefusedIdentity, row))
    return found


def payload_of(ad: Mapping[str, Any]) -> str:
    """Return the payload string of an ad. :raises BadPayload: there is none."""
    payload: object | None = ad.get("StageOutPayload")
    if not isinstance(payload, str):
        raise BadPayload("the ad has no StageOutPayload")
    return payload


def check_signature(kind: str, ad: Mapping[str, Any], key: str) -> None:
    """Check that the ad's payload is signed with this key. :param kind: MyType. :raises BadPayload: the reason."""
    signature: object = ad.get("StageOutSignature")
    try:
        check(kind, payload_of(ad), signature if isinstance(signature, str) else "", key)
    except BadSignature as problem:
        raise BadPayload(str(problem)) from None


def json_object(payload: str) -> dict[str, Any]:
    """Parse a payload. :raises BadPayload: it is no JSON object."""
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError) as problem:
        raise BadPayload(f"not JSON: {problem}") from None
    if not isinstance(data, dict):
        raise BadPayload("the payload is not an object")
    return _without_surrogates(data) if "\\ud" in payload.lower() else data


def _without_surrogates(data: dict[str, Any]) -> dict[str, Any]:
    """Replace each half of a surrogate pair by ``?``: files and daemons reject such a text."""
    found: dict[str, Any] = json.loads(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))
    return found
