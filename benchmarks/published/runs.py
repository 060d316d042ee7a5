"""The programs of a report, run in the order of the schedule, with a line of progress at each start and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from published.measured import path_of
from published.programs import PROGRAMS
from published.schedule import Job, Span, beside, limit_s, next_job, plan, total_s

ROOT = Path(__file__).resolve().parents[2]
_KEEPER = Path(__file__).with_name("keeper.py")
_RECORD = "programs.json"
_LOOK_S = 0.2
_MOST_REASON = 300


@dataclass(frozen=True)
class Ran:
    """One program of a report.

    :param reason: why it left no figures; "" when it did. :param cores: that it used on average.
    :param others_cores: likewise of all other processes of the machine, those that ran beside it included.
    :param beside: programs that ran at the same time.
    """

    took_s: float
    cores: float
    others_cores: float
    reason: str = ""
    beside: list[str] = field(default_factory=list)


def read_runs(folder: Path) -> dict[str, Ran]:
    """Return the programs that ran in a directory, also those that failed."""
    path = folder / _RECORD
    return {name: Ran(**data) for name, data in json.loads(path.read_text()).items()} if path.exists() else {}


class Runner:
    """Programs that run two at a time or alone.

    :param say: called with each line of progress.
    """

    def __init__(self, folder: Path, names: Sequence[str], quick: bool, say: Callable[[str], None]) -> None:
        self._folder, self._quick, self._say = folder, quick, say
        self._left = [PROGRAMS[name].job(name, quick) for name in names]
        self._count = len(names)
        self._active: dict[str, tuple[Job, float, subprocess.Popen[str]]] = {}
        self._spans: list[Span] = []
        self._ran: dict[str, Ran] = {}
        self._start_s = time.monotonic()

    def run(self) -> dict[str, Ran]:
        """Run them all, also when some fail; return what ran. An interrupt stops those that run."""
        try:
            while self._left or self._active:
                job = next_job(self._left, [active[0] for active in self._active.values()])
                if job is not None:
                    self._begin(job)
                    continue
                time.sleep(_LOOK_S)
                for name, (_, _, process) in list(self._active.items()):
                    if process.poll() is not None:
                        self._end(name)
        finally:
            for _, _, process in self._active.values():
                process.terminate()
            for _, _, process in self._active.values():
                process.wait()
        return self._record()

    def _begin(self, job: Job) -> None:
        self._left.remove(job)
        path_of(self._folder, job.name).unlink(missing_ok=True)
        others = " and ".join(self._active)
        words = [sys.executable, str(_KEEPER), str(_log(self._folder, job.name)), str(limit_s(job.expected_s))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
        process = subprocess.Popen(
            [*words, *_command(job.name, self._quick, self._folder)],
            stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self._active[job.name] = (job, time.monotonic(), process)
        self._progress(f"{job.name}: started{f' beside {others}' if others else ', alone' if job.alone else ''}")

    def _end(self, name: str) -> None:
        job, start_s, process = self._active.pop(name)
        told, _ = process.communicate()
        now_s = time.monotonic()
        self._spans.append(Span(name, start_s, now_s))
        if not told:
            self._ran[name] = Ran(now_s - start_s, 0.0, 0.0, "the process above it ended early")
        else:
            ended = json.loads(told)
            reason = "" if path_of(self._folder, name).exists() else self._reason(job, ended["stopped"])
            cores = ended["cpu_s"] / ended["took_s"]
            self._ran[name] = Ran(ended["took_s"], cores, ended["others_cores"], reason)
        ran = self._ran[name]
        outcome = f"not measured: {ran.reason}" if ran.reason else "measured"
        self._progress(f"{name}: {outcome}, {ran.took_s:.0f} s, {ran.cores:.2f} cores")

    def _reason(self, job: Job, stopped: bool) -> str:
        if stopped:
            return f"stopped after its limit of {limit_s(job.expected_s):.0f} s"
        return reason_of(_log(self._folder, job.name).read_text(errors="replace"))

    def _progress(self, what: str) -> None:
        now_s = time.monotonic()
        running = [(job, now_s - start_s) for job, start_s, _ in self._active.values()]
        left_s = total_s(plan(self._left, running))
        rest = f"about {clock(left_s)} left" if self._left or running else "nothing left"
        self._say(f"{what} ({len(self._ran)} of {self._count}; {clock(now_s - self._start_s)} elapsed, {rest})")

    def _record(self) -> dict[str, Ran]:
        """Write what ran beside what, with what earlier calls have recorded of other programs."""
        others = beside(self._spans)
        self._ran = {name: replace(ran, beside=others[name]) for name, ran in self._ran.items()}
        known = {**read_runs(self._folder), **self._ran}
        text = json.dumps({name: asdict(ran) for name, ran in known.items()}, indent=1)
        (self._folder / _RECORD).write_text(text + "\n")
        return self._ran


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def reason_of(log: str) -> str:
    """Return the reason that a program's output ends with."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    said = [line.partition(": ")[2] for line in lines if "could not be measured: " in line]
    return (said or lines)[-1].removeprefix("could not be measured: ")[:_MOST_REASON]


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _command(name: str, quick: bool, folder: Path) -> list[str]:
    program = PROGRAMS[name]
    if program.script == "demo":
        return [sys.executable, "-m", "tests.harness.demo", "--out", str(folder / "demo")]
    command = [sys.executable, str(ROOT / f"benchmarks/{program.script}.py"), *(["--quick"] if quick else [])]
    command += ["--json", str(path_of(folder, name))]
    return command + [word for part in program.parts for word in ("--only", part)]
