"""Start and end of one plugin: a process of its own between the manager and the plugin's program.

Run as ``python -I -S launch.py MANAGER_PID UID GID GROUPS NICENESS NOTE DIRECTORY PROGRAM ARGUMENTS...``. Its child
becomes the job's user and turns into the plugin. It stays, as the parent of all that the plugin leaves behind
(prctl(2), PR_SET_CHILD_SUBREAPER), whatever sessions and environments those have, and kills them when the plugin has
ended; those that do not end it names in the descriptor NOTE (-1: nowhere). Then it ends as the plugin did. SIGTERM is
passed on; what has not ended two seconds later is killed. The kernel kills it with the manager, and the plugin with it.
Forking and changing the user inside the manager, which has several threads, would not be safe. It must start fast: it
imports nothing of the product, and little else.
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
#: A pipe that nobody reads yet takes their names at once.
_MOST_NAMED = 100


def main(argv: list[str]) -> int:
    """Run the plugin. Returns its status; dies of the signal that it died of."""
    manager_pid, uid = int(argv[0]), int(argv[1])
    try:
        os.nice(int(argv[4]))
        if os.geteuid() not in (0, uid):
            raise PermissionError(f"the manager runs as uid {os.geteuid()} and cannot become uid {uid}")
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if not _dies_with(manager_pid):
            return CANNOT_START
        own_pid = os.getpid()
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _WAITED)  # from here on a SIGTERM is the plugin's, too
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
    """Let the kernel kill this process with its parent from now on. Return False when the parent has already died."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    return os.getppid() == parent


def _become(parent: int, argv: list[str]) -> None:
    """Turn into the plugin; returns only when the parent has died."""
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
    for number in (_SIGPIPE, _SIGXFSZ):  # Python ignores them, and what is ignored stays so in the plugin
        ctypes.CDLL(None).signal(number, None)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _WAITED)
    if _dies_with(parent):  # after the change of user: that would take the setting back
        os.execv(program[0], program)


def _watch(plugin: int, note: int) -> int:
    """Wait until the plugin has ended, and nothing of it runs any more. Returns its wait status.

    :param note: descriptor for those that cannot be ended.
    """
    import signal  # while the plugin starts: it does not wait for that

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):  # the end of what the plugin prints is the plugin's end
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
    """Reap all that have ended. The plugin's wait status when it is among them, or nobody is left."""
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
    """Kill until there are no children: whose parent is killed becomes one. Processes that stay are logged."""
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
        if time.monotonic() > until_s:  # of another user, or the disk keeps it
            if note >= 0:
                rest = " ".join(f"{pid}:{_facts(pid)[2]}" for pid in _children()[:_MOST_NAMED])
                os.write(note, rest.encode() or b"unknown")
            return
        time.sleep(_AGAIN_S)


def _children() -> list[int]:
    """List the children of this process; none where /proc is missing or of another namespace (pid_namespaces(7))."""
    return children_of(os.getpid()) if _facts("self")[0] == str(os.getpid()) else []


def children_of(parent: int) -> list[int]:
    """List the children of a process in /proc, without those that have ended and are only not reaped yet."""
    facts = ((place.name, _facts(place.name)) for place in os.scandir("/proc") if place.name.isdigit())
    return [int(name) for name, (_, of, state) in facts if of == str(parent) and state not in "ZX"]


def _facts(pid: int | str) -> tuple[str, str, str]:
    """Read a process's number, its parent's and its state, as proc(5) has them; "" when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
        state, parent = text.rpartition(")")[2].split()[:2]
        return text.partition(" ")[0], parent, state
    except (OSError, ValueError):
        return "", "", ""


def _kill_group(leader: int, how: int) -> None:
    """Kill the plugin with its group; before it has made one, itself: it is a child that is not reaped yet."""
    for kill in (os.killpg, os.kill):
        try:
            kill(leader, how)
            break
        except OSError:
            continue


def _end_as(status: int) -> int:
    """Die of the signal that a process of this wait status died of, without a core; else its exit status."""
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
