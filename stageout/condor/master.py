"""Tell condor_master that a daemon is alive, with the message that HTCondor's own daemons send.

A master that has never heard of a daemon believes that it is still starting: ``IsReady`` of ``condor_who`` stays false,
and a daemon that hangs is never restarted. From the first message on the master kills a daemon that has been silent for
the time that the message names (HTCondor's manual, ``NOT_RESPONDING_TIMEOUT``).

A process of its own sends the message, because HTCondor's bindings hold the interpreter while they wait. Only the event
loop starts it, so that a loop that stands still is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

from stageout.condor import bindings, limits
from stageout.condor.configuration import condor_settings
from stageout.core import log
from stageout.core.children import module_command
from stageout.core.config import Settings, condor_ids

_TIMEOUT = "NOT_RESPONDING_TIMEOUT"


def silence_s(settings: Settings, subsystem: str) -> int:
    """Return the seconds of silence after which the master kills a daemon.

    A time of this daemon counts as it is; one of all daemons counts as five minutes at least. HTCondor also takes an
    expression there; then its default counts, because no daemon may fail to start for this.
    """
    for name, least_s in ((f"{subsystem}_{_TIMEOUT}", 1), (_TIMEOUT, limits.NOT_RESPONDING_MIN_S)):
        text = settings.condor(name).strip()
        if text.isdecimal():
            return max(int(text), least_s)
    return limits.NOT_RESPONDING_S


def has_master(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True when condor_master, or another daemon of HTCondor, has started this process."""
    return "CONDOR_INHERIT" in environment


async def keep_telling(timeout_s: int) -> None:
    """Tell the master again and again that this process is alive. :param timeout_s: of :func:`silence_s`."""
    told = True
    while True:
        problem = await _tell(timeout_s)
        if problem and told:
            log.warn("master-tell-failed", problem=problem)
        told = not problem
        await asyncio.sleep(timeout_s / 3 if told else limits.ALIVE_AGAIN_S)


async def _tell(timeout_s: int) -> str:
    """Send one message. Return why it failed, or ""."""
    command = module_command("stageout.condor.master", str(os.getpid()), str(timeout_s))
    pipe = asyncio.subprocess.PIPE
    try:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as problem:
        return str(problem)
    try:
        output, _ = await asyncio.wait_for(child.communicate(), limits.ALIVE_S)
    except asyncio.TimeoutError:
        return f"no answer within {limits.ALIVE_S:.0f} s"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    lines = output.decode(errors="replace").split("\n")
    return "" if child.returncode == 0 else " ".join(lines).strip()[-500:] or f"exit status {child.returncode}"


def main() -> int:
    """Send one message for the process of the command line.

    HTCondor's own daemons authenticate as the user condor, the only one whom older masters let say it.
    """
    pid, timeout_s = int(sys.argv[1]), int(sys.argv[2])
    problem = ""
    for is_condor in (True, False) if os.geteuid() == 0 else (False,):
        try:
            with _as_condor() if is_condor else contextlib.nullcontext():
                bindings.htcondor().send_alive(pid=pid, timeout=timeout_s)
            return 0
        except Exception as fault:
            problem = str(fault)
    print(problem)
    return 1


@contextlib.contextmanager
def _as_condor() -> Iterator[None]:
    uid, gid = condor_ids(condor_settings(""))
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


if __name__ == "__main__":
    sys.exit(main())
