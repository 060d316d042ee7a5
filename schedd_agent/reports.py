"""Managers' reports, as far as they may be believed.

A report is believed about the key that signed it, never about the name in it: a *custodian* is a manager with a key
(:func:`schedd_agent.model.custodian`). Which custodian counts for a run is in the AP's own record of that run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from schedd_agent.model import Seen, custodian, name_of
from stageout.core import log
from stageout.core.durable import read_file, write_file
from stageout.core.states import FREED
from stageout.wire.custody import (
    MANAGER_AD,
    BadPayload,
    Report,
    SandboxReport,
    check_signature,
    payload_of,
    read_report,
)

_GLOBAL_JOB_ID = re.compile(r"[^#]+#\d+\.\d+#\d+\Z")
_REFUSALS_KEPT = 100
_STORE_INTERVAL_S = 60.0
_NUMBERS_KEPT = 20_000


class _Old(BadPayload):
    """A report that its custodian has replaced since."""

    def __init__(self, report: Report, newest: int) -> None:
        super().__init__(f"report {report.number} of {report.manager} is old: {newest} was seen already")
        self.custodian = custodian(report.manager, report.key)


class Newest:
    """Number of the newest report of each custodian, over restarts: a report that was recorded is not played back.

    :param path: file in which it is kept; None keeps nothing.
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

    def get(self, custodian: str) -> int:
        """The newest number, 0 for none."""
        return self._numbers.get(custodian, 0)

    def put(self, custodian: str, number: int) -> None:
        """A report has come."""
        self._numbers.pop(custodian, None)
        self._numbers[custodian] = number
        while len(self._numbers) > _NUMBERS_KEPT:
            del self._numbers[next(iter(self._numbers))]
        self._changed = True

    def store(self, now_s: float) -> None:
        """Write the file, at most once a minute. On return it is on the disk. :raises OSError: it is not."""
        if self._path and self._changed and now_s - self._stored_s >= _STORE_INTERVAL_S:
            write_file("reports-seen", self._path, json.dumps(self._numbers).encode("ascii"))
            self._stored_s, self._changed = now_s, False


@dataclass
class Board:
    """The newest report of each custodian about the jobs of one schedd.

    :param schedd: name of the schedd, the first part of its jobs' GlobalJobIds.
    """

    schedd: str
    newest: Newest = field(default_factory=Newest)
    _reports: dict[str, Report] = field(default_factory=dict)
    _read_before: dict[tuple[str, str], tuple[str, str, Report]] = field(default_factory=dict)
    _refused: dict[tuple[str, str], None] = field(default_factory=dict)
    _changes: dict[tuple[str, str, int], SandboxReport] = field(default_factory=dict)
    _disputed: frozenset[str] = frozenset()

    def update(self, ads: Iterable[Mapping[str, Any]]) -> list[Report]:
        """Take all ads that the collector has now; managers without an ad are gone. Returns reports that are new."""
        present: set[str] = set()
        refused: list[tuple[Mapping[str, Any], BadPayload]] = []
        fresh: list[Report] = []
        before, self._read_before = self._read_before, {}
        for ad in ads:
            try:
                report = self._read(ad, before)
            except BadPayload as problem:
                refused.append((ad, problem))
                continue
            whose = custodian(report.manager, report.key)
            present.add(whose)
            if self._take(whose, report):
                fresh.append(report)
        old = {problem.custodian for _, problem in refused if isinstance(problem, _Old)}
        for whose in self._reports.keys() - present - old:
            del self._reports[whose]
        self._disputed = self._settle(present, refused)
        self._forget_changes()
        return fresh

    def _take(self, whose: str, report: Report) -> bool:
        known = self._reports.get(whose)
        if known is not None and report.number <= known.number:
            return False
        boxes = tuple(self._newest(whose, box) for box in report.sandboxes)
        self._reports[whose] = replace(report, sandboxes=boxes)
        self.newest.put(whose, report.number)
        return True

    def _settle(self, present: set[str], refused: list[tuple[Mapping[str, Any], BadPayload]]) -> frozenset[str]:
        """Say what was refused; returns the names in which more than one voice speaks."""
        voices = [name_of(whose) for whose in present]
        for ad, problem in refused:
            if isinstance(problem, _Old) and problem.custodian in present:
                continue  # It has changed doors: the ad behind the other one expires by itself.
            self.refuse(str(ad.get("Name")), str(problem))
            voices += [manager_of(ad)] * 2
        return frozenset(name for name in voices if voices.count(name) > 1)

    @property
    def disputed(self) -> frozenset[str]:
        """Names in which others speak now, too: that such a manager cannot be heard is no evidence of anything."""
        return self._disputed

    @property
    def numbers(self) -> dict[str, int]:
        """Manager -> number of its newest report."""
        return {manager: report.number for manager, report in self._reports.items()}

    @property
    def endings(self) -> dict[str, tuple[int, int]]:
        """Manager -> number of its newest report, and in how many seconds it will have ended, 0 for no end."""
        return {manager: (report.number, report.ends_in_s) for manager, report in self._reports.items()}

    def busy(self) -> set[str]:
        """Managers that hold output of this schedd's jobs."""
        return {
            manager for manager, report in self._reports.items()
            if any(box.state not in FREED and box.run.schedd == self.schedd for box in report.sandboxes)
        }  # fmt: skip

    def unleased(self) -> set[str]:
        """Managers that wait for this agent's word before they send."""
        return {manager for manager, report in self._reports.items() if self.schedd in report.unleased}

    def shown(self) -> Iterator[tuple[str, str]]:
        """(custodian, job) of every sandbox that is in a report now."""
        return ((whose, box.job) for whose, report in self._reports.items() for box in report.sandboxes)

    def by_job(self) -> dict[str, list[Seen]]:
        """Sandboxes of this schedd's jobs, newest believable state of each."""
        found: dict[str, list[Seen]] = {}
        for report in self._reports.values():
            for box in report.sandboxes:
                if _GLOBAL_JOB_ID.match(box.job) and box.run.schedd == self.schedd:
                    found.setdefault(box.job, []).append(Seen(report.manager, report.key, box))
        return found

    def acknowledged(self, agent: str) -> dict[str, int]:
        """Custodian -> number of the last order of that agent that it carried out, 0 for none."""
        return {whose: report.acknowledged.get(agent, 0) for whose, report in self._reports.items()}

    def refuse(self, what: str, problem: str) -> None:
        """Name in the log, once, what is not believed and why."""
        matter = (what, problem)
        if matter not in self._refused:
            log.warn("report-refused", ad=what, problem=problem)
            while len(self._refused) >= _REFUSALS_KEPT:
                del self._refused[next(iter(self._refused))]
            self._refused[matter] = None

    @property
    def refused(self) -> Sequence[tuple[str, str]]:
        """Return the rejected reports with their reasons; the newest hundred."""
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
        newest = self.newest.get(custodian(report.manager, report.key))
        if report.number < newest:
            raise _Old(report, newest)
        self._read_before[place] = (payload, signature, report)
        return report

    def _newest(self, whose: str, box: SandboxReport) -> SandboxReport:
        """States only go forward: an older one, from whatever source, does not count."""
        key = (whose, box.job, box.number)
        known = self._changes.get(key)
        if known is None or box.change >= known.change:
            self._changes[key] = box
            return box
        return known

    def _forget_changes(self) -> None:
        listed = {(whose, box.job, box.number) for whose, report in self._reports.items() for box in report.sandboxes}
        self._changes = {key: box for key, box in self._changes.items() if key in listed}


def manager_of(ad: Mapping[str, Any]) -> str:
    """Name of the manager that an ad of a report names. Anybody can write it."""
    return str(ad.get("StageOutManager") or ad.get("Name"))
