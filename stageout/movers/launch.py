"""Start and end of one plugin: a process of its own between the manager and the plugin's program.

Run as ``python -I -S launch.py MANAGER_PID UID GID GROUPS NICENESS NOTE DIRECTORY PROGRAM ARGUMENTS...``. Its child
switches to the job's user and executes the plugin. The process itself stays as the parent of all processes that the
plugin leaves behind (prctl(2), PR_SET_CHILD_SUBREAPER), in any session. It kills them when the plugin has ended, and
writes those that survive into the descriptor NOTE (-1: nowhere). Then it exits with the plugin's status. It passes
SIGTERM on, and kills the plugin two seconds later. If the manager dies, the kernel kills this process and the plugin.

Forking and changing the user inside the manager, which has several threads, would not be safe. The start must be fast,
so this file imports nothing of the product, and little else.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # what is in signal, without the classes that take the time
import ctypes
import os
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_SIGKILL, _SIGPIPE, _SIGXFSZ = 9, 13, 25
_WAITED = (_signal.SIGCHLD, _signal.SIGTERM)
CANNOT_START = 126
_TERM_GRACE_S = 2.0
_REST_S = 5.0
_AGAIN_S = 0.02
_DAY_S = 86400.0
#: The pipe's buffer holds this many process ids before the reader reads.
_MOST_NAMED = 100


def main(argv: list[str]) -> int:
    """Run the plugin. Return its status, or die of the same signal."""
    manager_pid, uid = int(argv[0]), int(argv[1])
    try:
        os.nice(int(argv[4]))
        if os.geteuid() not in (0, uid):
            raise PermissionError(f"the manager runs as uid {os.geteuid()} and cannot become uid {uid}")
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if not _dies_with(manager_pid):
            return CANNOT_START
        own_pid = os.getpid()
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _WAITED)  # from here on a SIGTERM also goes to the plugin
        plugin = os.fork()
    except OSError as problem:
        return _cannot(problem)
    if plugin:
        return _end_as(_watch(plugin, int(argv[5])))
    try:
        _become(own_pid, argv)
    except OSError as problem:
        _cannot(problem)
    finally:
        os._exit(CANNOT_START)


def _cannot(problem: OSError) -> int:
    print(f"stageout-launch: {problem}", file=sys.stderr, flush=True)
    return CANNOT_START


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _dies_with(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent dies. Return False when the parent has already died."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    return os.getppid() == parent


def _become(parent: int, argv: list[str]) -> None:
    """Execute the plugin. Return only when the parent has died."""
    uid, gid, note, directory, program = int(argv[1]), int(argv[2]), int(argv[5]), argv[6], argv[7:]
    os.setsid()
    if note >= 0:
        os.set_inheritable(note, False)  # this process only writes it
    if os.geteuid() == 0:
        os.setgroups([int(group) for group in argv[3].split(",") if group])
        os.setgid(gid)
        os.setuid(uid)
    os.umask(0o077)
    os.chdir(directory)
    for number in (_SIGPIPE, _SIGXFSZ):  # Python ignores them, and an ignored signal stays ignored in the plugin
        ctypes.CDLL(None).signal(number, None)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _WAITED)
    if _dies_with(parent):  # after the change of user, which would reset it
        os.execv(program[0], program)


def _watch(plugin: int, note: int) -> int:
    """Wait until the plugin has ended, and all of its processes. Return its wait status.

    :param note: descriptor for the processes that cannot be ended.
    """
    import signal  # while the plugin starts, which does not wait for this

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):  # end of file on the plugin's output shows its end
        os.dup2(nowhere, descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_at_s, status = float("inf"), _reap(plugin)
    while status is None:
        got = signal.sigtimedwait(_WAITED, max(0.0, min(_DAY_S, kill_at_s - time.monotonic())))
        if got is not None and got.si_signo == signal.SIGTERM:
            _kill_group(plugin, signal.SIGTERM)
            kill_at_s = min(kill_at_s, time.monotonic() + _TERM_GRACE_S)
        elif time.monotonic() >= kill_at_s:
            _kill_group(plugin, _SIGKILL)
            kill_at_s = float("inf")
        status = _reap(plugin)
    _end_rest(note)
    return status


def _reap(plugin: int) -> int | None:
    """Reap all ended processes. Return the plugin's wait status if it is among them, or if nothing is left."""
    status = None
    try:
        while True:
            pid, found = os.waitpid(-1, os.WNOHANG)
            if pid == plugin:
                status = found
            if not pid:
                return status
    except ChildProcessError:
        return CANNOT_START << 8 if status is None else status


def _end_rest(note: int) -> None:
    """Kill until there are no children. Children of a killed process become children of this one. Log those that
    survive.
    """
    until_s = time.monotonic() + _REST_S
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in _children():
            try:
                os.kill(pid, _SIGKILL)
            except OSError:
                continue  # of another user
        if time.monotonic() > until_s:  # it belongs to another user, or waits for a disk
            if note >= 0:
                rest = " ".join(f"{pid}:{_facts(pid)[2]}" for pid in _children()[:_MOST_NAMED])
                os.write(note, rest.encode() or b"unknown")
            return
        time.sleep(_AGAIN_S)


def _children() -> list[int]:
    """List the children of this process; empty if /proc is missing or of another namespace (pid_namespaces(7))."""
    return children_of(os.getpid()) if _facts("self")[0] == str(os.getpid()) else []


def children_of(parent: int) -> list[int]:
    """List the children of a process in /proc, except zombies."""
    facts = ((place.name, _facts(place.name)) for place in os.scandir("/proc") if place.name.isdigit())
    return [int(name) for name, (_, of, state) in facts if of == str(parent) and state not in "ZX"]


def _facts(pid: int | str) -> tuple[str, str, str]:
    """Read a process's id, its parent's and its state (proc(5)); "" when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
        state, parent = text.rpartition(")")[2].split()[:2]
        return text.partition(" ")[0], parent, state
    except (OSError, ValueError):
        return "", "", ""


def _kill_group(leader: int, how: int) -> None:
    """Kill the plugin's process group, and the plugin itself in case it has no group yet. It is not reaped yet."""
    for kill in (os.killpg, os.kill):
        try:
            kill(leader, how)
            break
        except OSError:
            continue


def _end_as(status: int) -> int:
    """Die of the same signal as a process with this wait status, without a core; otherwise return its exit status."""
    import signal

    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _prctl(_PR_SET_DUMPABLE, 0)
        if number != _SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
