"""The demonstration's output: progress, the table and the last line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.harness.demo.record import Record


@dataclass(frozen=True)
class Progress:
    """A moment of a run.

    :param elapsed_s: since submission. :param computing: jobs on a CPU slot, their output transfer included.
    :param data_slots: jobs that have ended and whose output is not yet all delivered. :param done: jobs that left.
    """

    elapsed_s: float
    waiting: int
    computing: int
    data_slots: int
    done: int
    arrived_mb: float


@dataclass
class Teller:
    """Display of progress: one line that changes on a terminal, a line every ten seconds elsewhere."""

    title: str
    total_mb: float
    _next_s: float = field(default=0.0, init=False)

    def __call__(self, now: Progress) -> None:
        """Show it, when it is time."""
        jobs = f"{now.waiting} waiting, {now.computing} on CPU slots, {now.data_slots} in data slots, {now.done} done"
        line = f"  {now.elapsed_s:5.0f} s  {jobs}; {now.arrived_mb:.0f} of {self.total_mb:.0f} MB at the destination"
        if sys.stdout.isatty():
            print(f"\r{line}\x1b[K", end="" if now.waiting + now.computing + now.data_slots else "\n", flush=True)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + 10
            print(line, flush=True)


def table(synchronous: Record, stage_out: Record) -> str:
    """Both runs side by side."""
    rows: list[tuple[str, Callable[[Record], str]]] = [
        ("slot held after a job's end, median", lambda run: f"{run.held_s:.2f} s"),
        ("slot held after a job's end, longest", lambda run: f"{max(job.held_s for job in run.jobs):.2f} s"),
        ("slots free for other work after", lambda run: f"{run.slots_free_s:.1f} s"),
        ("makespan: last file at the destination after", lambda run: f"{run.makespan_s:.1f} s"),
        ("jobs delivered", lambda run: f"{run.delivered}/{len(run.jobs)}"),
        ("files verified (SHA-256)", lambda run: f"{run.verified}/{run.files}"),
    ]
    lines = [f"{'':46}{'synchronous':>14}{'stage-out':>14}", "-" * 74]
    lines += [f"{what:46}{show(synchronous):>14}{show(stage_out):>14}" for what, show in rows]
    return "\n".join(lines)


def last_line(runs: Sequence[Record]) -> str:
    """The one line that the demonstration ends with; counts are those of both runs."""
    synchronous, stage_out = runs
    jobs, files = sum(len(run.jobs) for run in runs), sum(run.files for run in runs)
    return (
        f"demo: delivered {sum(run.delivered for run in runs)}/{jobs} jobs, "
        f"{sum(run.verified for run in runs)}/{files} files verified; "
        f"slot held after exit: synchronous {synchronous.held_s:.2f} s, stage-out {stage_out.held_s:.2f} s; "
        f"makespan: synchronous {synchronous.makespan_s:.1f} s, stage-out {stage_out.makespan_s:.1f} s"
    )


def shortfalls(synchronous: Record, stage_out: Record) -> list[str]:
    """Return the faults of the runs, in sentences; empty without faults."""
    found = [
        f"{run.title}: job {job.number} has {job.verified} of {run.files_per_job} files right at the destination."
        for run in (synchronous, stage_out)
        for job in run.jobs
        if job.verified != run.files_per_job
    ]
    held = [job.number for job in stage_out.jobs if job.moved_s[1] <= job.free_s]
    if held:
        found.append(f"{stage_out.title}: the output of jobs {held} was sent while the job still held its slot.")
    return found
