"""The queries of commands to a schedd and to collectors, and their requests to a schedd.

Ads leave this module as :class:`stageout.core.classads.ClassAd` with plain values (:func:`stageout.condor.ads.plain`).
Every failure becomes a :class:`CommandError` with the next step for the user.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from stageout.cli.clocks import collector_ahead_s, shifted
from stageout.cli.exits import CommandError, Unavailable, UsageError
from stageout.cli.jobs import ATTRIBUTES, Job, JobId, constraint, is_cluster_ad
from stageout.cli.outputs import OUTPUT_ATTRIBUTES
from stageout.condor.ads import Expression, plain
from stageout.condor.bindings import BindingsMissing, CondorError, faults
from stageout.condor.collector import Collector
from stageout.condor.configuration import condor_settings, wait_less
from stageout.condor.schedd import Schedd
from stageout.core.classads import ClassAd, quote
from stageout.core.config import flocked_to
from stageout.wire.clocks import ahead_of_collector_s
from stageout.wire.custody import (
    AD_LIFETIME_S,
    AGENT_AD,
    MANAGER_AD,
    BadPayload,
    Report,
    check_signature,
    left_in,
    payload_of,
    read_notice,
    read_report,
)

_JOBS_AT_ONCE = 200


def load_bindings() -> None:
    """Load HTCondor's bindings for a command, with a shorter time limit for collector queries than daemons have.

    :raises CommandError: they are not installed.
    """
    try:
        wait_less()
    except BindingsMissing as problem:
        raise CommandError(str(problem)) from None


class Queue:
    """One schedd: the local one, or the one with a name.

    Each query locates the schedd again, so that it may restart between two queries.

    :param name: as for condor_q -name; None for the local schedd.
    :param pool: collector that knows the schedd; None for the configured one.
    """

    def __init__(self, name: str | None = None, pool: str | None = None) -> None:
        self._name = name
        self._pool = pool
        load_bindings()

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[ClassAd]]:
        """Return the jobs in the queue and the ads of their clusters, which show job factories.

        :raises Unavailable: the schedd does not answer.
        """
        return self._jobs_and_clusters(constraint(wanted, True))

    def jobs_of_dag(self, dag: int) -> tuple[list[Job], list[ClassAd]]:
        """Return the jobs of a DAG's nodes in the queue, and the ads of their clusters.

        Owners can write DAGManJobId, so jobs of another user than that of the DAGMan job are left out.

        :raises Unavailable: the schedd does not answer.
        """
        root = self.first_ad(JobId(dag, 0), ["ProcId", "User"])
        whose = f" && User =?= {quote(root.text('User'))}" if root else ""
        return self._jobs_and_clusters(f"DAGManJobId == {dag}{whose}")

    def most_post_scripts(self, dag: int) -> int | None:
        """Return DAGMan's limit on running POST scripts of a DAG. 0 means no limit, None means unknown."""
        try:
            root = self.first_ad(JobId(dag, 0), ["ProcId", "DAGMan_MaxPostScripts"])
        except Unavailable:
            return None
        found = root.get("DAGMan_MaxPostScripts") if root else None
        return found if isinstance(found, int) and found >= 0 else None

    def _jobs_and_clusters(self, wanted: str) -> tuple[list[Job], list[ClassAd]]:
        ads = self._ask(lambda schedd: schedd.query(wanted, list(ATTRIBUTES), with_clusters=True))
        return [Job.from_ad(ad) for ad in ads if not is_cluster_ad(ad)], [ad for ad in ads if is_cluster_ad(ad)]

    def first_ad(self, wanted: JobId, projection: Sequence[str]) -> ClassAd | None:
        """Return attributes of a job in the queue, or of the first job of a cluster; None without such a job.

        :raises Unavailable: the schedd does not answer.
        """
        found = self._ask(lambda schedd: schedd.query(constraint([wanted]), list(projection)))
        return min(found, key=lambda ad: ad.integer("ProcId"), default=None)

    def ended_ad(self, wanted: JobId, projection: Sequence[str]) -> ClassAd | None:
        """Return attributes of a job that has left the queue, or of a cluster's last such job; None without one.

        :raises Unavailable: the schedd does not answer.
        """
        found = self._ask(lambda schedd: schedd.history(constraint([wanted]), list(projection), 1))
        return found[0] if found else None

    def delivered_to(self, place: str, since_at: int, limit: int) -> list[ClassAd]:
        """Return StageOutStats of jobs whose output was delivered, newest first.

        :param place: beginning of their OutputDestination. :param since_at: wall clock, seconds; older jobs are left
            out.
        :raises Unavailable: the schedd does not answer.
        """
        same = f'substr(OutputDestination ?: "", 0, {len(place)}) == {quote(place)}'
        wanted = f'StageOutState == "Delivered" && {same}'
        since = f"CompletionDate > 0 && CompletionDate < {since_at}"
        ads = self._ask(lambda schedd: schedd.history(wanted, ["StageOutStats"], limit, since))
        return [stats for ad in ads if isinstance(stats := ad.get("StageOutStats"), ClassAd)]

    def jobs_in_stage_out(self, owner: str | None) -> list[Job]:
        """Find all jobs in the queue whose output was handed off.

        :param owner: the owner of the jobs; None for all owners. :raises Unavailable: the schedd does not answer.
        """
        return [job for job, _ in self.jobs_with_outputs(owner)]

    def jobs_with_outputs(self, owner: str | None, expression: str | None = None) -> list[tuple[Job, ClassAd]]:
        """Find all jobs in the queue whose output was handed off, with the attributes that name their output files.

        :param owner: the owner of the jobs; None for all owners. :param expression: a constraint on the jobs.
        :raises UsageError: the expression is invalid. :raises Unavailable: the schedd does not answer.
        """
        chosen = "" if expression is None else f" && ({_checked(expression)})"
        whose = f" && Owner == {quote(owner)}" if owner else ""
        wanted = (
            "((JobStatus == 4 && (TransferOutputStats.STAGEOUTFilesCountLastRun ?: 0) > 0) || "
            f'(StageOutState ?: "None") != "None"){whose}{chosen}'
        )
        names = [*ATTRIBUTES, *OUTPUT_ATTRIBUTES]
        return [(Job.from_ad(ad), ad) for ad in self._ask(lambda schedd: schedd.query(wanted, names))]

    def history(self, wanted: Sequence[JobId]) -> list[Job]:
        """Find jobs that have left the queue.

        :raises Unavailable: the schedd does not answer.
        """
        limit = len(wanted) if all(job.proc is not None for job in wanted) else -1
        ads = self._ask(lambda schedd: schedd.history(constraint(wanted), list(ATTRIBUTES), limit))
        return [replace(Job.from_ad(ad), in_queue=False) for ad in ads]

    def recent_history(self, owner: str | None, limit: int) -> list[Job]:
        """Return the newest jobs of the history whose output was handed off, newest first.

        :raises Unavailable: the schedd does not answer.
        """
        whose = f" && Owner == {quote(owner)}" if owner else ""
        wanted = f"(TransferOutputStats.STAGEOUTFilesCountLastRun ?: 0) > 0{whose}"
        ads = self._ask(lambda schedd: schedd.history(wanted, list(ATTRIBUTES), limit))
        return [replace(Job.from_ad(ad), in_queue=False) for ad in ads]

    def output_records(self, job: JobId) -> list[ClassAd]:
        """Return the stock OUTPUT records of a job's epoch history, oldest run first.

        :raises Unavailable: the schedd does not answer.
        """
        ads = self._ask(lambda schedd: schedd.epochs(constraint([job]), "OUTPUT"))
        return sorted(ads, key=lambda ad: ad.integer("NumShadowStarts"))

    def set_request(self, job: JobId, value: str) -> None:
        """Set StageOutRequest of one job, as the user that runs this command.

        :raises CommandError: the schedd refused.
        """
        schedd = self._schedd()
        try:
            changed = schedd.edit(str(job), "StageOutRequest", quote(value))
        except CondorError as problem:
            raise CommandError(
                f"{job}: the schedd refused the request ({_sentence(problem)}). Only the job's owner and the schedd's "
                "QUEUE_SUPER_USERS may ask this: is it your job, and can you authenticate to this schedd "
                "(condor_ping -type SCHEDD WRITE)?"
            ) from None
        if not changed:
            raise CommandError(
                f"{job}: the schedd changed nothing; is it your job, and still in the queue (condor_q {job})?"
            )

    def set_requests(self, values: Mapping[JobId, str]) -> list[tuple[JobId, CommandError]]:
        """Set StageOutRequest of many jobs, several hundred in a transaction. Stop when the schedd no longer answers.

        :param values: each transaction writes one value into all its jobs.
        :returns: the jobs that the schedd refused or did not confirm, with the reason.
        """
        refused: list[tuple[JobId, CommandError]] = []
        parts = list(_parts(values))
        left = [job for _, part in parts for job in part]
        for value, part in parts:
            try:
                if self._all_set(part, value):
                    del left[: len(part)]
                    continue
                for job in part:  # a job that has left the queue must not block the others
                    refused += self._refused(job, value)
                    del left[0]
            except Unavailable as silence:
                return refused + [(one, Unavailable(f"{one}: not confirmed: {silence}")) for one in left]
        return refused

    def _all_set(self, jobs: Sequence[JobId], value: str) -> bool:
        """Set StageOutRequest in one transaction. Return False if the schedd refuses.

        :raises Unavailable: the schedd does not answer.
        """
        try:
            return self._schedd().edit([str(job) for job in jobs], "StageOutRequest", quote(value)) == len(jobs)
        except CondorError:
            self.jobs(jobs[:1])
            return False

    def _refused(self, job: JobId, value: str) -> list[tuple[JobId, CommandError]]:
        """Set StageOutRequest of one job. Return the schedd's reason if it refuses.

        :raises Unavailable: the schedd does not answer.
        """
        try:
            self.set_request(job, value)
        except Unavailable:
            raise
        except CommandError as problem:
            self.jobs([job])
            return [(job, problem)]
        return []

    def name(self) -> str:
        """Return the name of the schedd, as in the collector and in GlobalJobId.

        :raises Unavailable: it cannot be located.
        """
        return str(self._location().get("Name", self._name or "local schedd"))

    def _ask(self, question: Callable[[Schedd], Iterable[Any]]) -> list[ClassAd]:
        schedd = self._schedd()
        try:
            with faults():
                return [plain(ad) for ad in question(schedd)]
        except CondorError as problem:
            raise Unavailable(
                f"the schedd does not answer ({_sentence(problem)}). Is it running (condor_status -schedd), "
                "and may you read its queue (condor_q)? A schedd does not answer either while it waits for its "
                f"collector {_collector(self._pool)} (condor_status -collector)."
            ) from None

    def _schedd(self) -> Schedd:
        return Schedd(self._location())

    def _location(self) -> Any:
        try:
            found = Collector(self._pool).locate("Schedd", self._name)
        except CondorError as problem:
            if self._name or self._pool:
                raise _silent_collector(self._pool, problem) from None
            raise Unavailable(f"no schedd can be found here ({_sentence(problem)}). {_NO_SCHEDD}") from None
        if found is None:
            pool = f" -pool {self._pool}" if self._pool else ""
            raise Unavailable(
                f"the collector {_collector(self._pool)} knows no schedd named {self._name}; "
                f"condor_status{pool} -schedd lists them."
            )
        return found


def _parts(values: Mapping[JobId, str]) -> Iterator[tuple[str, list[JobId]]]:
    """Group the jobs into transactions that each write one value."""
    groups: dict[str, list[JobId]] = {}
    for job, value in values.items():
        groups.setdefault(value, []).append(job)
    for value, jobs in groups.items():
        for start in range(0, len(jobs), _JOBS_AT_ONCE):
            yield value, jobs[start : start + _JOBS_AT_ONCE]


def _checked(expression: str) -> str:
    """Return an expression in parentheses for a constraint. :raises UsageError: it is invalid."""
    try:
        return str(Expression(expression))
    except CondorError:
        raise UsageError(f"-constraint {expression}: not an expression; condor_q takes the same") from None


_NO_SCHEDD = (
    "Is HTCondor running (condor_who -daemons)? On a machine without a schedd name one with --name, "
    "or look at an execute point's own sandboxes with 'stageout status --node'."
)


#: Ads that carry a manager's report, in the manager's own ad or in a slot ad. The slot ad's report is empty while the
#: manager's own ad is in use.
REPORTS = f'(StageOutPayload ?: "") != "" && (MyType == "{MANAGER_AD}" || MyType == "Machine")'

_NEWS = (
    f'((MyType == "{MANAGER_AD}" && time() - LastHeardFrom < {AD_LIFETIME_S}) || (MyType == "Machine" && '
    f'(StageOutPayload ?: "") != "" && MyCurrentTime - StageOutHeartbeat < {AD_LIFETIME_S}))'
)


class Pool:
    """The collector's view: managers' reports and agents' notices.

    :param pool: collector to query; None for the configured one.
    """

    def __init__(self, pool: str | None = None) -> None:
        self._pool = pool
        load_bindings()

    def reports(self, managers: Iterable[str] | None = None) -> list[Report]:
        """Return the last report with a valid signature of each manager, from its own ad or from slot ads.

        Anybody can use a manager's name. If two keys sign reports with one name, both reports are returned. All times
        are converted to this machine's clock.

        :param managers: names of the managers; None for all.
        :raises Unavailable: the collector does not answer.
        """
        wanted = REPORTS
        if managers is not None:
            names = " || ".join(f"StageOutManager == {quote(name)}" for name in sorted(set(managers)))
            wanted += f" && ({names or 'false'})"
        newest: dict[tuple[str, str], Report] = {}
        ahead_s: dict[tuple[str, str], int] = {}
        for ad in self._ads_of(set(managers or ()), wanted):
            try:
                report = read_report(payload_of(ad))
                if report.key:
                    check_signature(MANAGER_AD, ad, report.key)
            except BadPayload:
                continue  # an ad of a newer version or of another program; the doctor reports it
            known = newest.get((report.manager, report.key))
            if known is None or known.number < report.number:
                newest[report.manager, report.key] = report
                ahead_s[report.manager, report.key] = ahead_of_collector_s(ad)
        return [shifted(report, -ahead_s[who] - self._ahead_s) for who, report in newest.items()]

    def heard(self, managers: Iterable[str]) -> set[str]:
        """Select the managers whose report is recent.

        The age is measured by the clock of the daemon that publishes the ad: the collector for a manager's own ad, the
        startd for slot ads.

        :raises Unavailable: the collector does not answer.
        """
        wanted = set(managers) - {""}
        names = " || ".join(f"StageOutManager == {quote(name)}" for name in sorted(wanted))
        found = self._ads_of(wanted, f"({names or 'false'}) && {_NEWS}", ["StageOutManager"])
        return {ad.text("StageOutManager") for ad in found}

    def _ads_of(self, managers: set[str], wanted: str, projection: Sequence[str] = ()) -> list[ClassAd]:
        """Return ads in the collector. For managers without an ad there, query the pools to which jobs flock.

        :raises Unavailable: the collector does not answer.
        """
        found = self.ads(wanted, projection)
        for host in flocked_to(condor_settings()) if self._pool is None else ():
            if managers <= {ad.text("StageOutManager") for ad in found}:
                break
            with contextlib.suppress(Unavailable):
                found += Pool(host).ads(wanted, projection)
        return found

    def managers_of(self, slots: Iterable[str]) -> set[str]:
        """Return the managers of the nodes with these slots.

        :raises Unavailable: the collector does not answer.
        """
        names = " || ".join(f"Name == {quote(slot)}" for slot in sorted(slots))
        found = self.ads(f'MyType == "Machine" && ({names or "false"})', ["StageOutManager"])
        return {ad.text("StageOutManager") for ad in found} - {""}

    def agent_heard_at(self, schedd: str) -> int:
        """Return the time of the agent's last ad in the collector, in seconds of this machine's clock; 0 without an ad.

        :raises Unavailable: the collector does not answer.
        """
        wanted = f'MyType == "{AGENT_AD}" && StageOutSchedd == {quote(schedd)}'
        heard_at = max((ad.integer("LastHeardFrom") for ad in self.ads(wanted, ["LastHeardFrom"])), default=0)
        return heard_at - self._ahead_s if heard_at else 0

    def left_output(self, schedd: str) -> dict[str, int] | None:
        """Return how much output nodes hold of jobs that have left the schedd's queue, by state.

        Return None if the agent does not publish it.

        :raises Unavailable: the collector does not answer.
        """
        wanted = f'MyType == "{AGENT_AD}" && StageOutSchedd == {quote(schedd)}'
        for ad in self.ads(wanted, ["StageOutPayload"]):
            with contextlib.suppress(BadPayload):
                notice = read_notice(payload_of(ad))
                return left_in(notice) if "left" in notice.extra else None
        return None

    @cached_property
    def _ahead_s(self) -> int:
        """Return by how many seconds the collector's clock is ahead of this machine's clock."""
        return collector_ahead_s(
            lambda by_s: bool(self.ads(f'MyType == "Collector" && time() >= {int(time.time()) + by_s}', ["MyType"]))
        )

    def ads(self, wanted: str, projection: Sequence[str] = ()) -> list[ClassAd]:
        """Return ads of any type in the collector.

        :raises Unavailable: the collector does not answer.
        """
        try:
            with faults():
                return [plain(ad) for ad in Collector(self._pool).query("Any", wanted, projection)]
        except CondorError as problem:
            raise _silent_collector(self._pool, problem) from None


def _collector(pool: str | None) -> str:
    """Return the name of the collector that is queried."""
    return pool or condor_settings().condor("COLLECTOR_HOST", "of COLLECTOR_HOST")


def _silent_collector(pool: str | None, problem: CondorError) -> Unavailable:
    if pool:
        then = (
            f"Correct -pool, or leave it out for this machine's pool; 'condor_status -pool {pool} -collector' tries it."
        )
    else:
        then = "Is its name right (condor_config_val COLLECTOR_HOST), and is it up (condor_status -collector)?"
    return Unavailable(f"the collector {_collector(pool)} does not answer ({_sentence(problem)}). {then}")


def _sentence(problem: CondorError) -> str:
    return " ".join(str(problem).split()).rstrip(".")
