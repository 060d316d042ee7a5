"""What managers report, as far as it may be believed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from schedd_agent.model import Seen
from stageout.core import log
from stageout.wire.custody import MANAGER_AD, BadPayload, Report, SandboxReport, payload_of, read_report

UNSIGNED = "unsigned"
_GLOBAL_JOB_ID = re.compile(r"[^#]+#\d+\.\d+#\d+\Z")


def verify(payload: str, signature: str, key: str) -> str:
    """How a payload is vouched for: until signatures exist, by the collector's authorisation of its sender alone.

    :raises BadPayload: the signature is wrong.
    """
    del payload, signature, key
    return UNSIGNED


@dataclass
class Board:
    """The newest report of each manager about the jobs of one schedd.

    :param schedd: name of the schedd, the first part of its jobs' GlobalJobIds.
    """

    schedd: str
    _reports: dict[str, Report] = field(default_factory=dict)
    _payloads: dict[str, str] = field(default_factory=dict)
    _bad: dict[str, str] = field(default_factory=dict)
    _changes: dict[tuple[str, str, int], SandboxReport] = field(default_factory=dict)

    def update(self, ads: Iterable[Mapping[str, Any]]) -> list[Report]:
        """Take all ads that the collector has now; managers without an ad are gone. Returns reports that are new."""
        present: set[str] = set()
        fresh: list[Report] = []
        for ad in ads:
            try:
                report = self._read(ad)
            except BadPayload as problem:
                self._say_bad(str(ad.get("Name")), str(problem))
                continue
            present.add(report.manager)
            known = self._reports.get(report.manager)
            if known is None or report.number > known.number:
                boxes = tuple(self._newest(report.manager, box) for box in report.sandboxes)
                self._reports[report.manager] = replace(report, sandboxes=boxes)
                fresh.append(report)
        for manager in self._reports.keys() - present:
            del self._reports[manager], self._payloads[manager]
        self._forget_changes()
        return fresh

    def shown(self) -> Iterator[tuple[str, str]]:
        """(manager, job) of every sandbox that is in a report now."""
        return ((manager, box.job) for manager, report in self._reports.items() for box in report.sandboxes)

    def by_job(self) -> dict[str, list[Seen]]:
        """Sandboxes of this schedd's jobs, newest believable state of each."""
        found: dict[str, list[Seen]] = {}
        for manager, report in self._reports.items():
            for box in report.sandboxes:
                if _GLOBAL_JOB_ID.match(box.job) and box.run.schedd == self.schedd:
                    found.setdefault(box.job, []).append(Seen(manager, report.key, box))
        return found

    def acknowledged(self, agent: str) -> dict[str, int]:
        """Manager -> number of the last order of that agent that it carried out."""
        reports = self._reports.items()
        return {name: report.acknowledged[agent] for name, report in reports if agent in report.acknowledged}

    def _read(self, ad: Mapping[str, Any]) -> Report:
        payload = payload_of(ad)
        name = str(ad.get("StageOutManager") or ad.get("Name"))
        known = self._reports.get(name)
        if known is not None and self._payloads.get(name) == payload:
            return known
        report = read_report(payload)
        verify(payload, str(ad.get("StageOutSignature") or ""), report.key)
        if ad.get("MyType") == MANAGER_AD and ad.get("Name") != report.manager:
            raise BadPayload(f"it speaks for {report.manager}")
        self._payloads[report.manager] = payload
        return report

    def _say_bad(self, ad: str, problem: str) -> None:
        if self._bad.get(ad) != problem:
            self._bad[ad] = problem
            log.warn("bad-report", ad=ad, problem=problem)

    def _newest(self, manager: str, box: SandboxReport) -> SandboxReport:
        """States only go forward: an older one, from whatever source, does not count."""
        key = (manager, box.job, box.number)
        known = self._changes.get(key)
        if known is None or box.change >= known.change:
            self._changes[key] = box
            return box
        return known

    def _forget_changes(self) -> None:
        listed = {
            (manager, box.job, box.number) for manager, report in self._reports.items() for box in report.sandboxes
        }
        self._changes = {key: box for key, box in self._changes.items() if key in listed}
