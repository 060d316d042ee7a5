"""A process beside a plugin that delivers under a lease: it kills the plugin when the lease is over (rule 10).

The gateway does so itself, and sooner. This one is for a gateway that is stopped while its plugin is not, and for one
that is killed: children of the plugin would go on. Each line on its standard input is a time of the boot clock,
which all processes share and which counts while the machine is suspended, until when the plugin may run; :data:`_OVER`
ends it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from stageout.core import log
from stageout.core.children import module_command
from stageout.core.clock import boot_clock_s
from stageout.core.sockets import readable
from stageout.movers.mover import kill_all

_OVER = b"over\n"
_AGAIN_S = 0.1
#: A wait does not end sooner for a machine that was suspended: so the clock is looked at this often.
_LOOK_S = 1.0
_SOON_S = 0.02
_END_S = 10.0
_SAID_EVERY_S = 60.0
_LINES_BYTES = 65536


class Guard:
    """Guards one call of a plugin. :param directory: its work directory, by which it and its children are known.

    :raises OSError: the process cannot be started.
    """

    def __init__(self, directory: Path) -> None:
        end, self._pipe = os.pipe2(os.O_CLOEXEC)
        try:
            command = module_command("overlay_router.delivery.guard", str(directory))
            self._process = subprocess.Popen(command, stdin=end, start_new_session=True)
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(end)

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The plugin has ended."""
        self._write(_OVER)
        os.close(self._pipe)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def until(self, until_s: float) -> None:
        """The plugin may run until then (boot clock)."""
        self._write(f"{until_s}\n".encode())

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed: then the gateway watches alone
            os.write(self._pipe, line)


def watch(directory: Path, orders: int) -> None:
    """Kill what runs for a work directory when its time is over, or the gateway is gone; until it is told to end.

    :param orders: descriptor of the lines.
    """
    until_s, said_s = float("inf"), float("-inf")
    while True:
        left_s = min(_LOOK_S, until_s - boot_clock_s())
        if left_s <= 0:
            left_s, killed = _AGAIN_S, kill_all(directory)
            if killed and time.monotonic() - said_s > _SAID_EVERY_S:  # what waits for a disk ends with that only
                said_s = time.monotonic()
                _say(killed)
        if not readable([orders], left_s):
            continue
        lines = os.read(orders, _LINES_BYTES).splitlines(keepends=True)
        if _OVER in lines:
            return
        if not lines:
            _end(directory)
            return
        until_s = float(lines[-1])


def _end(directory: Path) -> None:
    """Kill until nothing runs: what is killed may have begun another process since they were counted."""
    until_s, most = time.monotonic() + _END_S, 0
    while (killed := kill_all(directory)) and time.monotonic() < until_s:
        most = max(most, killed)
        time.sleep(_SOON_S)
    if most:
        _say(most)
    if killed:
        log.error("plugin-kill-failed", directory=directory, processes=killed,
                  advice="stageout doctor --role router names them, and says what to do")  # fmt: skip


def _say(killed: int) -> None:
    log.error("egress-lease-expired", killed=killed, reason="the gateway was stopped, or killed, while its plugin ran")


if __name__ == "__main__":
    log.open_child_log()
    watch(Path(sys.argv[1]), sys.stdin.fileno())
