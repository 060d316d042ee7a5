"""Runs a workload on a real pool and returns the record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from stageout.core.errors import StageoutError
from tests.harness.demo.record import JobRecord, Occupation, Record, check_files, occupations, of_job
from tests.harness.demo.report import Progress
from tests.harness.demo.workload import MB, SCRIPT, JobReport, Workload
from tests.harness.narrow_destination import NarrowDestination
from tests.harness.pool import Pool, Submission

USER = "alice"
_HELD = 5


class JobsHeld(StageoutError):
    """Jobs were held; the text has the reason of the first."""


@dataclass(frozen=True)
class PoolRun:
    """One run of a workload on a pool.

    :param name: directory at the destination. :param tell: called about every second.
    """

    pool: Pool
    destination: NarrowDestination
    workload: Workload
    name: str
    title: str
    tell: Callable[[Progress], None] = lambda progress: None

    def run(self) -> Record:
        """Submit, wait until every job has left the queue, and check every file.

        :raises JobsHeld: a job is held.
        :raises PoolTimeout: a job did not leave the queue in four times the time that it all should take, plus 2 min.
        """
        root = self.destination.root / self.name
        root.mkdir()
        wanted = self.workload.put_input(root)
        began_s = time.time()
        submission = self.pool.submit(
            USER, self.workload.submit_text(f"{self.destination.url}/{self.name}"), files={"job.sh": SCRIPT}
        )
        self._wait(submission, began_s)
        record = Record(self.title, began_s, self._jobs(submission), self.workload.files)
        for job in record.jobs:
            if job.report.input_digest == wanted:
                check_files(job, root / str(job.number))
        return record

    def _wait(self, submission: Submission, began_s: float) -> None:
        load = self.workload
        transfer_s = load.jobs * load.job_bytes / MB / (self.destination.rate_mb_s or 100)
        last = 0.0

        def finished() -> bool:
            nonlocal last
            states = self._states(submission)
            if time.monotonic() - last >= 1:
                last = time.monotonic()
                self.tell(self._progress(states, began_s))
            return not states

        limit_s = 120 + 4 * (load.jobs * load.compute_s + transfer_s)
        self.pool.wait(finished, timeout_s=limit_s, what=f"the end of run {self.name}", interval_s=0.25)

    def _states(self, submission: Submission) -> list[int]:
        """JobStatus of those still in the queue; a held job ends the run, as nothing would change any more."""
        found = self.pool.jobs(f"ClusterId == {submission.cluster}", ["JobStatus", "HoldReason"])
        reasons = [str(ad["HoldReason"]) for ad in found if int(ad["JobStatus"]) == _HELD]
        if reasons:
            raise JobsHeld(f"{len(reasons)} jobs of run {self.name} are held: {reasons[0]}")
        return [int(ad["JobStatus"]) for ad in found]

    def _progress(self, states: list[int], began_s: float) -> Progress:
        root = self.destination.root / self.name
        arrived = sum(path.stat().st_size for path in root.glob("*/*.dat"))
        return Progress(
            time.time() - began_s,
            waiting=states.count(1),
            computing=states.count(2) + states.count(6),
            data_slots=states.count(4),
            done=self.workload.jobs - len(states),
            arrived_mb=arrived / MB,
        )

    def _jobs(self, submission: Submission) -> list[JobRecord]:
        held: dict[str, Occupation] = {}
        for node in self.pool.eps:
            held.update((seen.job, seen) for seen in occupations(node.log("startd")))
        transfers = self.destination.transfers()
        records = []
        for job in submission.ids:
            number = int(job.partition(".")[2])
            report = JobReport.parse((submission.dir / f"job.{number}.out").read_text())
            seen = held[job]
            moved = of_job(transfers, f"/{self.name}/{number}/")
            records.append(JobRecord(number, seen.slot, report, seen.free_s or time.time(), moved))
        return records
