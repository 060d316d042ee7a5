"""Managers' reports, after their signatures were checked.

A report is evidence for the key that signed it, never for the name in it. So an identity is a name with a key
(:func:`stageout.model.run.manager_identity`). The access point's own record of a run names the identities that count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from schedd_agent.model import ReportedSandbox
from stageout.core import log
from stageout.core.durable import read_file, write_file
from stageout.core.states import FREED
from stageout.model.run import manager_identity, name_of
from stageout.wire.clocks import ahead_of_collector_s
from stageout.wire.custody import (
    MANAGER_AD,
    BadPayload,
    JobKey,
    Report,
    Run,
    SandboxReport,
    check_signature,
    is_job_name,
    payload_of,
    read_report,
)

_REFUSALS_KEPT = 100
#: Seconds of silence of a manager whose report has expired.
NO_REPORT_SILENT_S = 120
_STORE_INTERVAL_S = 60.0
_NUMBERS_KEPT = 20_000


class _OutdatedReport(BadPayload):
    """A report that its manager has replaced since."""

    def __init__(self, report: Report, newest: int) -> None:
        super().__init__(f"report {report.number} of {report.manager} is old: {newest} was seen already")
        self.manager_identity = manager_identity(report.manager, report.key)


class NewestReportNumbers:
    """Number of the newest report of each identity, kept over restarts, so that an old report cannot be replayed.

    :param path: file for the numbers; None to keep them in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._stored_s = float("-inf")
        self._numbers: dict[str, int] = {}
        self._changed = False
        try:
            found = json.loads(read_file(path)) if path else {}
            self._numbers = {str(name): int(number) for name, number in found.items()}
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            return

    def get(self, identity: str) -> int:
        """Return the newest number, 0 for none."""
        return self._numbers.get(identity, 0)

    def put(self, identity: str, number: int) -> None:
        """Record a report's number."""
        self._numbers.pop(identity, None)
        self._numbers[identity] = number
        while len(self._numbers) > _NUMBERS_KEPT:
            del self._numbers[next(iter(self._numbers))]
        self._changed = True

    def store(self, now_s: float) -> None:
        """Write the file, at most once a minute. On return it is on the disk. :raises OSError: the disk refuses it."""
        if self._path and self._changed and now_s - self._stored_s >= _STORE_INTERVAL_S:
            write_file("reports-seen", self._path, json.dumps(self._numbers).encode("ascii"))
            self._stored_s, self._changed = now_s, False


@dataclass
class ReportTable:
    """The newest report of each identity about the jobs of one schedd.

    :param schedd: name of the schedd, the first part of its jobs' GlobalJobIds.
    """

    schedd: str
    newest: NewestReportNumbers = field(default_factory=NewestReportNumbers)
    _reports: dict[str, Report] = field(default_factory=dict)
    _ahead_s: dict[str, int] = field(default_factory=dict)
    _read_earlier: dict[tuple[str, str], tuple[str, str, Report]] = field(default_factory=dict)
    _refused: dict[tuple[str, str], None] = field(default_factory=dict)
    _heard: set[str] = field(default_factory=set)
    _latest: dict[tuple[str, Run], SandboxReport] = field(default_factory=dict)
    _disputed: frozenset[str] = frozenset()
    _promised_s: dict[str, int] = field(default_factory=dict)

    def update(self, ads: Iterable[Mapping[str, Any]]) -> list[Report]:
        """Replace all reports by those in the collector's ads. Return the new ones."""
        present: set[str] = set()
        refused: list[tuple[Mapping[str, Any], BadPayload]] = []
        fresh: list[Report] = []
        before, self._read_earlier = self._read_earlier, {}
        self._heard = set()
        for ad in ads:
            try:
                report = self._read(ad, before)
            except BadPayload as problem:
                refused.append((ad, problem))
                continue
            identity = manager_identity(report.manager, report.key)
            present.add(identity)
            if self._take(identity, report):
                self._ahead_s[identity] = ahead_of_collector_s(ad)
                fresh.append(report)
        old = {problem.manager_identity for _, problem in refused if isinstance(problem, _OutdatedReport)}
        for identity in self._reports.keys() - present - old:
            del self._reports[identity], self._ahead_s[identity]
        self._disputed = self._find_disputed(present, refused)
        self._forget_changes()
        return fresh

    def _take(self, identity: str, report: Report) -> bool:
        known = self._reports.get(identity)
        if known is not None and report.number <= known.number:
            return False
        if report.number > self.newest.get(identity):
            self._heard.add(identity)
        sandboxes = tuple(self._latest_state(identity, sandbox) for sandbox in report.sandboxes)
        self._reports[identity] = replace(report, sandboxes=sandboxes)
        self.newest.put(identity, report.number)
        self._promise(identity, report.lease_s if report.key else 0)
        return True

    def _promise(self, identity: str, lease_s: int) -> None:
        """Keep the promise of the newest report, also when its ad has expired. One that is forgotten is long."""
        self._promised_s.pop(identity, None)
        if lease_s > 0:
            self._promised_s[identity] = lease_s
            while len(self._promised_s) > _NUMBERS_KEPT:
                del self._promised_s[next(iter(self._promised_s))]

    def silent_after_s(self, identity: str) -> int:
        """Return the seconds without a newer report after which an identity counts as silent."""
        report = self._reports.get(identity)
        return report.silent_after_s if report else NO_REPORT_SILENT_S

    @property
    def promised_s(self) -> Mapping[str, int]:
        """Return the leases that identities have promised to keep, of those that have."""
        return self._promised_s

    def _find_disputed(self, present: set[str], refused: list[tuple[Mapping[str, Any], BadPayload]]) -> frozenset[str]:
        """Log refused reports. Return the names in which more than one key signs."""
        voices = [name_of(identity) for identity in present]
        for ad, problem in refused:
            if isinstance(problem, _OutdatedReport) and problem.manager_identity in present:
                continue  # The manager publishes another kind of ad now. The old ad expires by itself.
            self.refuse(str(ad.get("Name")), str(problem))
            voices += [manager_of(ad)] * 2
        return frozenset(name for name in voices if voices.count(name) > 1)

    @property
    def disputed(self) -> frozenset[str]:
        """Return names in which several keys sign. Silence of such a manager is no evidence."""
        return self._disputed

    @property
    def numbers(self) -> dict[str, int]:
        """Return the number of each identity's newest report."""
        return {manager: report.number for manager, report in self._reports.items()}

    def reports(self) -> Iterable[Report]:
        """Return the newest report of each identity."""
        return self._reports.values()

    def reports_by_collector_clock(self) -> Iterator[Report]:
        """Return the same reports, each with its time as the collector's clock showed it."""
        for identity, report in self._reports.items():
            yield replace(report, sent_at=report.sent_at - self._ahead_s[identity])

    @property
    def endings(self) -> dict[str, tuple[int, int]]:
        """Return number and announced end (in seconds, 0 for none) of each identity's newest report."""
        return {manager: (report.number, report.ends_in_s) for manager, report in self._reports.items()}

    def busy(self) -> set[str]:
        """Return the identities that hold output of this schedd's jobs."""
        return {
            manager for manager, report in self._reports.items()
            if any(sandbox.state not in FREED and sandbox.run.schedd == self.schedd for sandbox in report.sandboxes)
        }  # fmt: skip

    def unleased(self) -> set[str]:
        """Return the identities that wait for a lease of this agent before they send."""
        return {manager for manager, report in self._reports.items() if self.schedd in report.unleased}

    @property
    def heard(self) -> Set[str]:
        """Return the identities with a report that is newer than all before it, at the last update.

        The ad of a manager that is gone stays in the collector for :data:`AD_LIFETIME_S`, so the ad is no sign of it.
        """
        return self._heard

    def reported_jobs(self) -> Iterator[tuple[str, JobKey]]:
        """Return identity and job of every sandbox in a report of :attr:`heard`."""
        reports = ((identity, self._reports[identity]) for identity in self._heard)
        return ((identity, sandbox.run.key) for identity, report in reports for sandbox in report.sandboxes)

    def by_job(self) -> dict[JobKey, list[ReportedSandbox]]:
        """Return the sandboxes of this schedd's jobs, each in its newest state."""
        found: dict[JobKey, list[ReportedSandbox]] = {}
        for report in self._reports.values():
            for sandbox in report.sandboxes:
                if is_job_name(sandbox.job) and sandbox.run.schedd == self.schedd:
                    item = ReportedSandbox(report.manager, report.key, sandbox)
                    found.setdefault(sandbox.run.key, []).append(item)
        return found

    def acknowledged(self, agent: str) -> dict[str, int]:
        """Return the number of the last order that each identity acknowledged to an agent, 0 for none."""
        return {identity: report.acknowledged.get(agent, 0) for identity, report in self._reports.items()}

    def refuse(self, what: str, problem: str) -> None:
        """Log a rejected report and the reason, once."""
        matter = (what, problem)
        if matter not in self._refused:
            log.warn("report-refused", ad=what, problem=problem)
            while len(self._refused) >= _REFUSALS_KEPT:
                del self._refused[next(iter(self._refused))]
            self._refused[matter] = None

    @property
    def refused(self) -> Sequence[tuple[str, str]]:
        """Return the newest hundred rejected reports with their reasons."""
        return tuple(self._refused)

    def _read(self, ad: Mapping[str, Any], known: Mapping[tuple[str, str], tuple[str, str, Report]]) -> Report:
        payload, signature = payload_of(ad), str(ad.get("StageOutSignature") or "")
        place = (str(ad.get("MyType")), str(ad.get("Name")))
        before = known.get(place)
        if before is not None and before[:2] == (payload, signature):
            report = before[2]
        else:
            report = read_report(payload)
            if report.key or signature:
                check_signature(MANAGER_AD, ad, report.key)
        if ad.get("MyType") == MANAGER_AD and ad.get("Name") != report.manager:
            raise BadPayload(f"it speaks for {report.manager}")
        newest = self.newest.get(manager_identity(report.manager, report.key))
        if report.number < newest:
            raise _OutdatedReport(report, newest)
        self._read_earlier[place] = (payload, signature, report)
        return report

    def _latest_state(self, identity: str, sandbox: SandboxReport) -> SandboxReport:
        """Return the newest known state of a sandbox: an older one never replaces it."""
        key = (identity, sandbox.run)
        known = self._latest.get(key)
        if known is None or sandbox.change >= known.change:
            self._latest[key] = sandbox
            return sandbox
        return known

    def _forget_changes(self) -> None:
        listed = {(identity, sandbox.run) for identity, report in self._reports.items() for sandbox in report.sandboxes}
        self._latest = {key: sandbox for key, sandbox in self._latest.items() if key in listed}


def manager_of(ad: Mapping[str, Any]) -> str:
    """Return the manager's name in a report's ad. Anybody can write it."""
    return str(ad.get("StageOutManager") or ad.get("Name"))
