"""Run one program, stop it after a time, and end each process that it leaves: ``keeper.py LOG SECONDS COMMAND...``.

Prints one JSON object (:class:`Ended`). A stopped program gets an interrupt first, so that it removes its namespaces,
control groups and directories itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stageout.movers.launch import children_of

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 30.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Ended:
    """The end of a program.

    :param status: exit status, negative for a signal. :param cpu_s: of all its processes.
    :param others_cores: cores that all other processes of the machine used meanwhile, on average.
    :param stopped: it was stopped. :param left: processes that it had left.
    """

    status: int
    took_s: float
    cpu_s: float
    others_cores: float
    stopped: bool
    left: int


def main() -> None:
    """Run it."""
    log, limit_s, command = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # a shell's background jobs ignore it, and would leave that to all below
    deadline_s = [time.monotonic() + limit_s]
    signal.signal(signal.SIGTERM, lambda *_: deadline_s.insert(0, 0.0))
    start_s, busy_s = time.monotonic(), _busy_s()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    status, stopped = _wait(process.pid, deadline_s)
    took_s = time.monotonic() - start_s
    left = _end_children()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    others_cores = max(0.0, _busy_s() - busy_s - cpu_s) / took_s
    print(json.dumps(asdict(Ended(status, took_s, cpu_s, others_cores, stopped, left))))


def _wait(pid: int, deadline_s: list[float]) -> tuple[int, bool]:
    """Return the exit status of a process, and whether it had to be stopped. The first deadline counts."""
    interrupted_s = 0.0
    while True:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == pid:
                return os.waitstatus_to_exitcode(found[1]), bool(interrupted_s)
        now_s = time.monotonic()
        if interrupted_s and now_s > interrupted_s + _GRACE_S:
            os.kill(pid, signal.SIGKILL)
        elif not interrupted_s and now_s > deadline_s[0]:
            interrupted_s = now_s
            os.kill(pid, signal.SIGINT)
        time.sleep(_LOOK_S)


def _end_children() -> int:
    """Kill all processes below this one; return how many there were. Orphans of the killed ones come here then."""
    ended: set[int] = set()
    until_s = time.monotonic() + _GRACE_S
    while time.monotonic() < until_s:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        for pid in children_of(os.getpid()):
            ended.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return len(ended)


def _busy_s() -> float:
    """Seconds of all cores since the machine started, without idle ones."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
