"""A machine of its own without a machine: mount, UTS and PID namespaces over an image.

Process 1 of the namespaces does nothing but collect orphans. Killing it is a power cut: the kernel ends every
process inside and all mounts go with it, so nothing can be left behind, whatever a test did.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pool.errors import PoolError, PoolUnavailable
from tests.harness.pool.image import PATH, PREFIX, USERS, Image
from tests.harness.pool.waiting import wait_until

_BOOT_TIMEOUT_S = 30.0
_PARENTS: dict[int, subprocess.Popen[bytes]] = {}
# The command of that name is not part of every installation of util-linux; the C library's function always is there.
_PIVOT_ROOT = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).pivot_root(b".", b"."):
    sys.exit("pivot_root: " + os.strerror(ctypes.get_errno()))
"""
_INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
os.write(1, b"ready\\n")
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0); os.dup2(null, 1)
while True:
    signal.sigwaitinfo([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


@dataclass(frozen=True)
class Process:
    """A process inside a node.

    :param pid: its number on this machine.
    :param inner_pid: its number inside the node, as in the daemons' logs.
    :param argv: its command line.
    :param uid: real user id.
    """

    pid: int
    inner_pid: int
    argv: tuple[str, ...]
    uid: int

    def is_named(self, name: str) -> bool:
        """True for the program's name, with or without ``condor_`` or ``stageout-``; scripts by their own name."""
        names = {name, f"condor_{name}", f"stageout-{name}"}
        return any(part.rpartition("/")[2] in names for part in self.argv[:3])


@dataclass(frozen=True)
class Layout:
    """The parts of a namespace.

    :param name: host name inside.
    :param home: directory of this node on this machine, inside `shared`.
    :param shared: directory seen at the same path inside.
    :param hosts: text of ``/etc/hosts`` inside.
    :param binds: (path here, path inside, writable) of further directories.
    :param own_network: a network namespace of its own, without any link.
    """

    name: str
    home: Path
    shared: Path
    hosts: str
    binds: tuple[tuple[Path, str, bool], ...] = ()
    own_network: bool = False


def boot(image: Image, layout: Layout, keep_fds: Sequence[int] = ()) -> int:
    """Make the namespaces and return the pid (on this machine) of their first process.

    :param keep_fds: descriptors that stay open as long as the node lives.
    """
    for name in (".root", ".upper", ".work"):
        (layout.home / name).mkdir(exist_ok=True)
    log = layout.home / "boot.log"
    command = ["unshare", "-m", "-u", "-p", "--fork", "--kill-child", "--propagation", "private"]
    if layout.own_network:
        command.append("-n")
    with open(log, "ab") as errors:
        child = subprocess.Popen(
            [*command, "sh", "-ec", boot_script(image, layout)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            pass_fds=tuple(keep_fds),
            env={"PATH": PATH},
        )
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], _BOOT_TIMEOUT_S)
    answer = child.stdout.readline() if readable else b""
    child.stdout.close()
    if answer.strip() == b"ready":
        init_pid = _only_child(child.pid)
        _PARENTS[init_pid] = child
        return init_pid
    child.kill()
    child.wait()
    raise PoolUnavailable(
        f"Node {layout.name} could not be made (mount, UTS and PID namespaces, overlayfs or bind mounts): "
        f"{log.read_text(errors='replace')[-1500:]}"
    )


def boot_script(image: Image, layout: Layout) -> str:
    """Shell script of a node's birth, up to and with its first process."""
    new = shlex.quote(str(layout.home / ".root"))
    lines = [f"echo {shlex.quote(layout.name)} >/proc/sys/kernel/hostname", _mount_root(image, layout.home)]
    for source, inside, writable in ((layout.shared, str(layout.shared), True), *layout.binds):
        lines.append(f"mkdir -p {new}{shlex.quote(inside)}")
        lines.append(f"mount --bind {shlex.quote(str(source))} {new}{shlex.quote(inside)}")
        if not writable:
            lines.append(f"mount -o remount,bind,ro {new}{shlex.quote(inside)}")
    lines += [
        f"mount -t proc proc {new}/proc",
        f"mount --rbind /dev {new}/dev; mount -t tmpfs tmpfs {new}/dev/shm",
        f"mount --rbind /sys {new}/sys",
        f"mount -t tmpfs -o mode=755 tmpfs {new}/run; mkdir -m 1777 {new}/run/lock",
        f"printf %s {shlex.quote(layout.hosts)} >{new}/etc/hosts",
        f"cd {new}",
        # The old root ends on top of the new one, and goes with everything mounted in it.
        f"{shlex.quote(sys.executable)} -I -S -c {shlex.quote(_PIVOT_ROOT)} && umount -l . && cd /",
        *(
            f"id {name} >/dev/null 2>&1 || {{ groupadd -g {uid} {name}; useradd -m -u {uid} -g {uid} {name}; }}"
            for name, uid in USERS.items()
        ),
        f"exec env -i PATH={PATH} HOME=/root LC_ALL=C.UTF-8 python3 -I -S -c {shlex.quote(_INIT)}",
    ]
    return "\n".join(lines)


def _mount_root(image: Image, home: Path) -> str:
    """Lines that put the image at ``.root``: overlayfs, or a bind mount with what has to differ bound over it."""
    root, new, upper, work = (
        shlex.quote(str(path)) for path in (image.root, home / ".root", home / ".upper", home / ".work")
    )
    users = " ".join(f"{name}:{uid}" for name, uid in USERS.items())
    return f"""
if ! mount -t overlay overlay -o lowerdir={root},upperdir={upper},workdir={work} {new}; then
    echo 'no overlayfs here: binding the writable directories instead' >&2
    mount --bind {root} {new}
    [ -d {upper}/etc ] || cp -a {root}/etc {upper}/etc
    mkdir -p {upper}/tmp {upper}/home && chmod 1777 {upper}/tmp
    for user in {users}; do
        mkdir -p {upper}/home/${{user%:*}} && chown ${{user#*:}}:${{user#*:}} {upper}/home/${{user%:*}}
    done
    for name in etc tmp home; do mount --bind {upper}/$name {new}/$name; done
fi"""


def enter(init_pid: int, argv: Sequence[str], *, uid: int = 0, gid: int = 0, cwd: str = "/") -> list[str]:
    """Command line that runs another one inside the namespaces."""
    command = ["nsenter", "-t", str(init_pid), "-m", "-u", "-p", "-n"]
    if uid:
        command += ["-S", str(uid), "-G", str(gid)]
    return [*command, "--", "/bin/sh", "-c", 'cd "$0" && exec "$@"', cwd, *argv]


def environment(user: str, home: str, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment of a command inside a node: nothing of the caller's."""
    base = {"PATH": f"{PREFIX}/bin:{PATH}", "HOME": home, "USER": user, "LOGNAME": user, "LC_ALL": "C.UTF-8"}
    return {**base, **(extra or {})}


def account(init_pid: int, user: str) -> tuple[int, int, str]:
    """Uid, gid and home directory of a user inside."""
    for line in Path(f"/proc/{init_pid}/root/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == user:
            return int(fields[2]), int(fields[3]), fields[5]
    raise PoolError(f"There is no user {user} inside; the pool's own are {', '.join(USERS)}.")


def processes(init_pid: int) -> Iterator[Process]:
    """All processes of the namespaces but the first."""
    space = _namespace(init_pid)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == init_pid or not space or _namespace(int(entry.name)) != space:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            argv = tuple((entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
            status = (entry / "status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if argv and not fields["State"].startswith("Z"):
                yield Process(int(entry.name), int(fields["NSpid"].split()[-1]), argv, int(fields["Uid"].split()[0]))


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 when there is none; with the pid it names one process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def kill_namespace(init_pid: int, born: int) -> None:
    """End everything inside, if the first process is still the one that was born then."""
    if not init_pid or start_time(init_pid) != born or not born:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(init_pid, signal.SIGKILL)
    wait_until(
        lambda: start_time(init_pid) != born, timeout_s=20, what=f"the end of process {init_pid}", interval_s=0.01
    )
    parent = _PARENTS.pop(init_pid, None)
    if parent is not None:
        parent.wait(timeout=10)


def _namespace(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = children.read_text().split() if children.exists() else _children_by_scan(pid)
        if found:
            return int(found[0])
    raise PoolError(f"process {pid} has no child")


def _children_by_scan(pid: int) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if entry.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(entry.parent.name)
    return found


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants (a killed nsenter does not take its child along)."""
    for child in _children_by_scan(pid):
        kill_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
