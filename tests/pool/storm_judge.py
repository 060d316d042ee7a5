"""The judge of :mod:`tests.pool.storm`: compares what owners are told with what is at the destination."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stageout.core.states import ENDS, State
from tests.harness.pool import Node
from tests.pool.conftest import Site
from tests.pool.storm_jobs import Owners, Run, StormJob, Workload

_REMOVED, _COMPLETED, _HELD = 3, 4, 5


@dataclass
class Judge:
    """Knows what every run wrote, and where its files must be.

    :ivar early: owners who were told of a delivery that was not there at that moment.
    """

    workload: Workload
    owners: Owners
    early: list[str] = field(default_factory=list)
    _seen: set[tuple[str, int]] = field(default_factory=set)

    @property
    def site(self) -> Site:
        return self.workload.site

    def look(self, ads: Iterable[Mapping[str, Any]]) -> None:
        """Check jobs in the queue that are delivered according to their ads."""
        known = {str(job): job for job in self.workload.jobs}
        for ad in ads:
            job, number = known.get(f"{ad['ClusterId']}.{ad['ProcId']}"), int(ad.get("StageOutRun") or 0)
            if job is not None and (str(job), number) not in self._seen:
                self._seen.add((str(job), number))
                told = f"at {time.strftime('%H:%M:%S')} {job} was called delivered (run {number})"
                self.early += [f"{told}: {fault}" for fault in self._absent(job, number)]

    def end(self, job: StormJob, history: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
        """Return how a job ended, in words, and what is wrong with that.

        :param history: ads of the jobs that have left the queue, by id.
        """
        waiting = self.site.pool.q(job.submission)
        ad = waiting or history.get(str(job))
        if ad is None:
            return "gone", [f"{job} is neither in the queue nor in the history"]
        status, told = ad["JobStatus"], ad.get("StageOutState") == State.DELIVERED
        wrong = self._absent(job, int(ad.get("StageOutRun") or 0)) if told and status != _COMPLETED else []
        if status == _COMPLETED and not waiting:
            end = "delivered after its end" if told else "delivered by its run"
            wrong = [*self._absent_last(job, ad)]  # the run that counts may be a later one
        elif status == _REMOVED and not waiting:
            end = "removed, and delivered before" if told else "removed"
            wrong += [] if "rm" in job.asked else ["nobody removed it"]
        elif status == _HELD:
            state = ad.get("StageOutState", "None")
            end = f"held, its output {state}"
            wrong += (
                []
                if "leave" in job.asked and ad.get("HoldReason")
                else ["its owner did not leave it held, or has no reason"]
            )
            wrong += [] if state in (*ENDS, "None") else [f"its output is neither delivered nor given up: {state}"]
        else:
            end, wrong = "unfinished", [f"JobStatus {status} {ad.get('HoldReason')}"]
        return end, [f"{job} ({job.kind.name}, {end}): {one} {_facts(ad)}" for one in wrong]

    def _absent_last(self, job: StormJob, ad: Mapping[str, Any]) -> Iterator[str]:
        """Say what is missing of a completed job: the output of the run whose standard output came back."""
        try:
            wrote = self.site.wrote(job.submission)
        except (OSError, ValueError):
            wrote = {}  # its standard output went elsewhere
        if wrote:
            yield from self._compare(job, {name: {digest} for name, digest in wrote.items()})
            yield from (f"its standard output does not tell of {one}" for one in {*job.outputs} - {*wrote})
        else:
            yield from self._absent(job, int(ad.get("NumShadowStarts") or 0))

    def _absent(self, job: StormJob, number: int) -> list[str]:
        """Say what is missing of a run. A shadow that came back to a run has raised the number; a later run may have
        replaced the files.
        """
        runs = self.workload.runs(job)
        counted = max((run.number for run in runs if run.number <= number), default=0)
        if not counted:
            return [f"no run until {number} has written anything"]
        names: dict[str, set[str]] = {name: set() for name in job.outputs}
        names.update({run.name: set() for run in runs if run.number == counted})
        for run in runs:
            if run.number >= counted and run.name in names:
                names[run.name].add(run.digest)
        return [*self._compare(job, names)]

    def _compare(self, job: StormJob, names: Mapping[str, set[str]]) -> Iterator[str]:
        for name, digests in names.items():
            places = [self.site.file(job, name), self.site.destination.file(f"{self.owners.elsewhere(job)}/{name}")]
            if name not in job.outputs:
                places.append(job.submission.dir / name)
            found = [digest for path in places if (digest := _digest(path))]
            if digests.isdisjoint(found):
                yield f"{name} is {'of another run' if found else 'missing'} at its destination"

    def records(self) -> list[str]:
        """Return the records of delivered files (`stageout history -files`) whose files are not there."""
        rows = self.site.file_records("--all", user="root")
        wrote: dict[str, list[Run]] = {}
        for job in self.workload.jobs:
            for run in self.workload.runs(job):
                wrote.setdefault(run.job, []).append(run)
        base, wrong = self.site.destination.url(), []
        for row in rows:
            if not row.get("TransferSuccess") or row["GlobalJobId"] not in wrote or "TransferUrl" not in row:
                continue
            runs = [run for run in wrote[row["GlobalJobId"]] if run.name == row["TransferFileName"]]
            path = self.site.destination.file(str(row["TransferUrl"]).removeprefix(base))
            if _digest(path) not in {run.digest for run in runs}:
                wrong.append(f"recorded as delivered, and not there: {row['GlobalJobId']} {row['TransferUrl']}")
        return wrong

    def spooled(self, hostile: str) -> list[str]:
        """Return the output that the nodes still hold, but for that of hostile users and failures that are shown.

        A hostile user who spoils the name of a job after its hand-off keeps room of his own quota.
        """
        if self.site.spool_is_empty():
            return []
        rows = [row for ep in self.site.pool.eps for row in _status(ep, "--node")]
        shown = {row["job"] for row in _status(self.site.pool.ap, "--all") if row["state"] == State.FAILED}
        return [
            f"{row['job']} of {row['owner']} is in the spool: {row['state']}"
            for row in rows
            if not (hostile and row["owner"].startswith(f"{hostile}@"))
            and not (row["state"] == State.FAILED and row["job"] in shown)
        ]


def _status(node: Node, option: str) -> list[dict[str, Any]]:
    """Return the rows of `stageout status`."""
    found = node.run(["/opt/stageout/bin/stageout", "status", option, "--json"]).stdout
    rows: list[dict[str, Any]] = json.loads(found)["jobs"]
    return rows


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _facts(ad: Mapping[str, Any]) -> dict[str, Any]:
    names = ("NumShadowStarts", "HoldReason", "RemoveReason")
    return {name: ad[name] for name in ad if name in names or name.startswith("StageOut")}
