"""The order of programs: two run at a time if both mostly wait, and all others alone. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Programs at a time: on two cores, a third one would have to wait for a core.
AT_ONCE = 2
#: Cores that programs beside each other may use together, on average: the rest is for their peaks.
_SHARED_CORES = 1.2


@dataclass(frozen=True)
class Job:
    """A program to run. :param expected_s: that it takes. :param cores: that it uses on average."""

    name: str
    expected_s: float
    cores: float = 0.0

    @property
    def alone(self) -> bool:
        """Tell whether it runs without any other."""
        return self.cores > _SHARED_CORES


@dataclass(frozen=True)
class Span:
    """The time of one program, in seconds from the beginning."""

    name: str
    start_s: float
    end_s: float


def next_job(left: Sequence[Job], running: Sequence[Job]) -> Job | None:
    """Return the job to start now: the longest that leaves enough cores, lonely ones last; None to wait."""
    if len(running) >= AT_ONCE:
        return None
    used = sum(job.cores for job in running)
    fitting = [job for job in left if not running or job.cores + used <= _SHARED_CORES]
    return max(fitting, key=lambda job: (not job.alone, job.expected_s), default=None)


def plan(left: Sequence[Job], running: Sequence[tuple[Job, float]] = ()) -> list[Span]:
    """Return when each job starts and ends if all take the expected time.

    :param running: jobs that already run, each with the seconds since its start.
    """
    todo, now_s = list(left), 0.0
    active = [(job, Span(job.name, -since_s, max(0.0, job.expected_s - since_s))) for job, since_s in running]
    done: list[Span] = []
    while todo or active:
        job = next_job(todo, [job for job, _ in active])
        if job is not None:
            todo.remove(job)
            active.append((job, Span(job.name, now_s, now_s + job.expected_s)))
            continue
        first = min(active, key=lambda one: one[1].end_s)
        active.remove(first)
        done.append(first[1])
        now_s = first[1].end_s
    return done


def total_s(spans: Sequence[Span]) -> float:
    """Return the seconds until the last one ends."""
    return max((span.end_s for span in spans), default=0.0)


def beside(spans: Sequence[Span]) -> dict[str, list[str]]:
    """Return the names of those that ran beside each one, in the order of their starts."""
    ordered = sorted(spans, key=lambda span: span.start_s)
    return {
        one.name: [
            other.name
            for other in ordered
            if other is not one and other.start_s < one.end_s and one.start_s < other.end_s
        ]
        for one in ordered
    }


def limit_s(expected_s: float) -> float:
    """Return the seconds after which a program is stopped."""
    return 3 * expected_s + 60
