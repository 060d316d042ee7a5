"""Admission of hand-offs: every reason of policy to refuse one, before a single byte is linked.

The listener refuses what breaks the protocol and its limits, ``identity.py`` a peer that is no job's plugin, and
``custody/orders.py`` a run that another one has overtaken. ``stageout/core/reasons.py`` has all codes.

:func:`reason_against_job` looks at the job alone, before any room is reserved. :meth:`Admission.reason_against` looks
at the offer and the node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sandbox_manager.custody.quota import Space
from sandbox_manager.custody.redirects import PluginChoice, choose_plugin
from sandbox_manager.custody.registry import Registry
from sandbox_manager.custody.spool import Spool
from sandbox_manager.intake.agents import AgentTable
from sandbox_manager.rules import Rules
from sandbox_manager.scheduling.breaker import Flow
from sandbox_manager.scheduling.slots import is_stuck, positions_free
from sandbox_manager.scheduling.throughput import Throughput
from stageout.core.clock import Clock
from stageout.core.reasons import sentence_of
from stageout.core.states import FREED, State
from stageout.core.synchronous import NO_REASON, Reason
from stageout.core.units import size
from stageout.model.run import Account, RunFacts
from stageout.model.sandbox import NAME_BYTES, Destination, Occupant, SlotKey
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.schemes import split_url


@dataclass(frozen=True)
class PilotEnd:
    """The forecast from observed rates; without a known end every hand-off is possible."""

    registry: Registry
    throughput: Throughput
    clock: Clock
    rules: Callable[[], Rules]

    @property
    def left_s(self) -> float | None:
        """Seconds until then; None where no end is known."""
        end = self.rules().pilot_end
        return end - self.clock.wall_s() if end else None

    @property
    def fits(self) -> bool:
        """Tell whether all waiting output will have arrived by then."""
        left_s = self.left_s
        return left_s is None or left_s > self.throughput.needs_s(self._waiting())

    def reason_against(self, servers: Iterable[str], size_bytes: int) -> Reason:
        """Return why output for these servers would arrive too late, behind all that waits.

        :param size_bytes: of the output.
        """
        left_s = self.left_s
        if left_s is None:
            return NO_REASON
        waiting = self._waiting()
        needs_s = self.throughput.needs_s({server: waiting.get(server, 0) + size_bytes for server in servers})
        if left_s > needs_s:
            return NO_REASON
        later = f"delivery afterwards would take {needs_s:.0f} s"
        return Reason("PilotEnd", f"the pilot ends in {max(0.0, left_s):.0f} s, {later}")

    def _waiting(self) -> dict[str, int]:
        waiting: dict[str, int] = {}
        for sandbox in self.registry.by_id.values():
            for part in sandbox.waiting if sandbox.state not in FREED else ():
                server = self.registry.destinations[part.destination].server
                waiting[server] = waiting.get(server, 0) + part.size_bytes
        return waiting


def servers_of(urls: Collection[str]) -> frozenset[str]:
    """Return the different servers of URLs."""
    return frozenset(Destination("", *split_url(url)).server for url in urls)


LEAST_FREE_BYTES = 16 * 1024 * 1024
#: In the row of a file in the ledger, which counts as NAME_BYTES.
_MOST_URL_BYTES = 4096
#: A run has one for each plugin and kind of credential.
_HANDOFFS_OF_RUN = 32


@dataclass(frozen=True)
class Offer:
    """A plugin's offer.

    :param account: of the manager's own, that gets the files; None: they stay the job's user's.
    """

    facts: RunFacts
    files: int
    size_bytes: int
    schemes: frozenset[str]
    servers: frozenset[str]
    plugin: str
    account: Account | None = None

    @property
    def charge_bytes(self) -> int:
        """Bytes of the quota that it takes."""
        return self.size_bytes + self.files * NAME_BYTES


@dataclass
class Admission:
    """Checks of an offer, and the room that is reserved for offers on their way in.

    :ivar state_bytes: of the quota, that plugins of a user keep for their next call, by uid.
    """

    registry: Registry
    agents: AgentTable
    table: PluginsTable
    flow: Callable[[str], Flow]
    spool: Spool
    end: PilotEnd
    rules: Callable[[], Rules]
    space: Space = field(default_factory=Space)
    is_stopping: bool = False
    state_bytes: dict[int, int] = field(default_factory=dict)
    report_problem: str = ""
    _reservations: dict[int, Offer] = field(default_factory=dict)
    _copying: dict[int, int] = field(default_factory=dict)
    _last: int = 0

    def reason_against(self, offer: Offer) -> Reason:
        """Return why the plugin must upload the files itself."""
        checks = (
            self._stopping,
            self._report,
            self._consent,
            self._account,
            self._run,
            self._plugin,
            self._slot,
            self._space,
            self._end,
        )
        return next((reason for check in checks if (reason := check(offer))), NO_REASON)

    def reserve(self, offer: Offer) -> int:
        """Reserve room, and an account if it needs one, for an offer. Return the number for :meth:`unreserve`."""
        self._last += 1
        self._reservations[self._last] = replace(offer, account=self._account_for(offer.facts))
        return self._last

    def account_of(self, number: int) -> Account | None:
        """Return the account of the manager's own that gets the files of a reserved offer."""
        return self._reservations[number].account

    def reason_against_copy(self, number: int, size_bytes: int) -> Reason:
        """Return why there is no room for a copy of the files of a reserved offer."""
        others = sum(self._copying.values()) - self._copying.get(number, 0)
        free = self.spool.free_bytes()
        if free >= LEAST_FREE_BYTES + others + size_bytes:
            return NO_REASON
        return Reason(
            "OtherFilesystem",
            f"the job's files cannot be linked into the spool (is it another filesystem?), and a copy of "
            f"{size(size_bytes)} has no room there: {size(free)} are free, {size(others)} of them for others",
        )

    def reserve_copy(self, number: int, size_bytes: int) -> Offer:
        """Reserve room for a copy until :meth:`unreserve`. Return the offer."""
        self._copying[number] = size_bytes
        return self._reservations[number]

    def stop(self) -> None:
        """Refuse every offer from now on."""
        self.is_stopping = True

    def note_report(self, problem: str) -> None:
        """Take nothing over while no report can be made. :param problem: reason, "" after a report."""
        self.report_problem = problem

    def unreserve(self, number: int) -> None:
        """Drop the reservation of an offer that has become a sandbox, or nothing."""
        self._reservations.pop(number, None)
        self._copying.pop(number, None)

    def positions_free(self, slot: SlotKey, owner: str) -> int:
        """Count the places left in a data slot for an owner."""
        taken = [
            (one.slot, one.owner, count)
            for one, count in self.registry.occupying(slot)
            if not (one.may_stick and self._is_stuck(one))
        ]
        reserved = {(item.facts.run, item.facts.slot) for item in self._reservations.values()}
        for run, place in reserved:
            if place.parent == slot.parent and self.registry.of_run(run) is None:
                taken.append((place, run.owner, 1))
        return positions_free(slot, owner, taken, self.rules().limits)

    @property
    def positions_used(self) -> int:
        """Places taken in all data slots together."""
        runs = {item.facts.run for item in self._reservations.values() if self.registry.of_run(item.facts.run) is None}
        return len(runs) + sum(count for one, count in self.registry.occupying() if not self._is_stuck(one))

    def _is_stuck(self, one: Occupant) -> bool:
        return is_stuck(one, self.registry.destinations, self.flow)

    @property
    def quota_bytes(self) -> int:
        """Most bytes in the spool."""
        if self.rules().quota_bytes:
            return self.rules().quota_bytes
        return self.spool.total_bytes() // 2

    @property
    def owner_quota_bytes(self) -> int:
        """Most bytes of one owner: half of the spool unless the configuration says otherwise."""
        return self.rules().owner_quota_bytes or self.quota_bytes // 2

    @property
    def used_bytes(self) -> int:
        """Bytes of the quota that are taken."""
        return self.space.used_bytes + sum(self.registry.record_bytes.values()) + sum(self.state_bytes.values())

    @property
    def movable_bytes(self) -> int:
        """The part of it that goes away by itself, as soon as it is sent. A file with two destinations counts once."""
        return min(self.used_bytes, self.registry.movable_bytes)

    def _stopping(self, offer: Offer) -> Reason:
        return Reason("Stopping", "the sandbox manager is stopping") if self.is_stopping else NO_REASON

    def _report(self, offer: Offer) -> Reason:
        if not self.report_problem:
            return NO_REASON
        return Reason("Report", f"the sandbox manager cannot make its report: {self.report_problem}")

    def _consent(self, offer: Offer) -> Reason:
        if not self.agents.is_fresh(offer.facts.run.schedd):
            return Reason("NoAgent", f"no stageout agent of schedd {offer.facts.run.schedd} was heard of lately")
        return self.agents.objection(offer.facts.run.schedd, offer.facts.agent_key)

    def _account(self, offer: Offer) -> Reason:
        facts, accounts = offer.facts, self.rules().accounts
        if any(facts.uid == account.uid for account in accounts):
            reserved = "an account that STAGEOUT_ACCOUNTS reserves for the sandbox manager"
            return Reason("SlotUser", f"the job runs as {facts.user}, {reserved}")
        if not facts.foreign_account or self._account_for(facts) is not None:
            return NO_REASON
        why = "keep output of other owners" if accounts else "are not set"
        return Reason(
            "SlotUser",
            f"the job of {facts.owner} runs as {facts.user}, an account that other owners may share, and "
            f"STAGEOUT_ACCOUNTS of the node {why}",
        )

    def _account_for(self, facts: RunFacts) -> Account | None:
        """Choose the account of the manager's own that gets a run's output.

        None: the job's account is its owner's, or all accounts have output of other owners.
        """
        if not facts.foreign_account:
            return None
        known = self.registry.of_run(facts.run)
        if known is not None:
            return Account(known.user, known.uid, known.gid)
        reserved = {(item.account.uid, item.facts.owner) for item in self._reservations.values() if item.account}
        return choose_account(
            facts.owner, self.rules().accounts, reserved.union(self.registry.holders), self.state_bytes
        )

    def _run(self, offer: Offer) -> Reason:
        run = offer.facts.run
        newest = self.registry.newest_run(run.key)
        if newest > run.number:
            return Reason("OtherRun", f"run {newest} of job {run.job_id} is newer than this run {run.number}")
        known = self.registry.of_run(run)
        if known is not None and known.state is not State.ACCEPTED:
            return Reason("OtherRun", f"output of run {run.number} of job {run.job_id} is {known.state} already")
        made = len(known.tickets) if known else 0
        if made + sum(item.facts.run == run for item in self._reservations.values()) >= _HANDOFFS_OF_RUN:
            return Reason("TooMany", f"run {run.number} of job {run.job_id} has made {_HANDOFFS_OF_RUN} hand-offs")
        return NO_REASON

    def _plugin(self, offer: Offer) -> Reason:
        if self.table.registered(offer.plugin) is None:
            return Reason("Plugin", f"{offer.plugin} is not in FILETRANSFER_PLUGINS of this node")
        reasons = (self.choose_plugin(offer.plugin, scheme).problem for scheme in offer.schemes)
        return next(filter(None, reasons), NO_REASON)

    def choose_plugin(self, path: str, scheme: str) -> PluginChoice:
        """Return the plugin for URLs of a scheme, and why it cannot be used. :param path: the starter's choice."""
        return choose_plugin(self.table, self.rules().require_verified, path, scheme)

    def _slot(self, offer: Offer) -> Reason:
        run = offer.facts.run
        if self.registry.of_run(run) or any(other.facts.run == run for other in self._reservations.values()):
            return NO_REASON  # a further hand-off of a run that has its place
        if self.positions_free(offer.facts.slot, offer.facts.owner) <= 0:
            return Reason("SlotFull", f"the data slot of {offer.facts.slot_name} is full (STAGEOUT_DATA_SLOT_DEPTH)")
        return NO_REASON

    def _space(self, offer: Offer) -> Reason:
        held = self.used_bytes + sum(item.charge_bytes for item in self._reservations.values()) + offer.charge_bytes
        if held > self.quota_bytes:
            of_quota = f"{size(held)} of {size(self.quota_bytes)} (STAGEOUT_SPOOL_QUOTA_MB)"
            return Reason("SpoolFull", f"the spool would hold {of_quota}")
        limit, owner = self.owner_quota_bytes, offer.facts.owner
        own = self.space.by_owner[owner] + self.registry.record_bytes[owner] + offer.charge_bytes
        own += self.state_bytes.get(offer.facts.kept_by(self._account_for(offer.facts)).uid, 0)
        own += sum(item.charge_bytes for item in self._reservations.values() if item.facts.owner == owner)
        if own > limit:
            of_quota = f"{size(own)} of {size(limit)} (STAGEOUT_OWNER_QUOTA_MB)"
            return Reason("OwnerQuota", f"output of {owner} would take {of_quota}")
        if self.spool.free_bytes() < LEAST_FREE_BYTES:
            return Reason("SpoolFull", "the filesystem of the spool is full")
        return NO_REASON

    def _end(self, offer: Offer) -> Reason:
        reserved = (item.size_bytes for item in self._reservations.values() if item.servers & offer.servers)
        return self.end.reason_against(offer.servers, offer.size_bytes + sum(reserved))


def schemes_of(urls: Collection[str]) -> frozenset[str]:
    """Return the different schemes of URLs."""
    return frozenset(split_url(url)[0] for url in urls)


def reason_against_job(facts: RunFacts, urls: Iterable[str], encrypted: bool) -> Reason:
    """Return why output of this job, or for one of these destinations, must not be delivered afterwards.

    :param encrypted: ENCRYPT_EXECUTE_DIRECTORY of this node.
    """
    if not facts.guard:
        known = sentence_of(facts.left_out)
        code, why = (facts.left_out, known) if known else ("NotMarked", "StageOutGuard is not true")
        return Reason(code, f"the job did not consent to delivery after its end: {why}")
    if encrypted or facts.encrypted:
        return Reason("Encrypted", "the execute directory is encrypted (ENCRYPT_EXECUTE_DIRECTORY), the spool is not")
    checkpoints = facts.checkpoint_destination and facts.checkpoint_destination.rstrip("/") + "/"
    for url in urls:
        if checkpoints and url.startswith(checkpoints):
            return Reason("Checkpoint", "a checkpoint must be at its destination before the job goes on")
        try:
            size_bytes = len(url.encode("utf-8"))
        except UnicodeEncodeError:
            return Reason("TooMany", "a destination URL holds bytes that are not UTF-8")
        if size_bytes > _MOST_URL_BYTES:
            return Reason("TooMany", f"a destination URL has {size_bytes} bytes, more than {_MOST_URL_BYTES}")
    return NO_REASON


def choose_account(
    owner: str, accounts: Sequence[Account], holders: Collection[tuple[int, str]], in_use: Container[int]
) -> Account | None:
    """Return the account that has output of this owner, else a free one; None where there is neither.

    :param holders: uid and owner of all output on the node. :param in_use: uids for which plugins keep state.
    """
    free = None
    for account in accounts:
        owners = {holder for uid, holder in holders if uid == account.uid}
        if owners == {owner}:
            return account
        if free is None and not owners and account.uid not in in_use:
            free = account
    return free
