"""Start of one plugin: a process of its own between the manager and the plugin's program.

Run as ``python -I -S launch.py MANAGER_PID UID GID GROUPS NICENESS DIRECTORY PROGRAM ARGUMENTS...``. It becomes the
job's user, sees to it that the kernel kills it with the manager, and turns into the plugin. Forking and changing the
user inside the manager, which has several threads, would not be safe. Imports nothing of the product: it must start
fast.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
CANNOT_START = 126


def main(argv: list[str]) -> int:
    """Become the plugin; returns only when that is impossible."""
    manager_pid, uid, gid = map(int, argv[:3])
    groups = [int(group) for group in argv[3].split(",") if group]
    niceness, directory, program = int(argv[4]), argv[5], argv[6:]
    try:
        os.nice(niceness)
        if os.geteuid() == 0:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
        elif os.geteuid() != uid:
            raise PermissionError(f"the manager runs as uid {os.geteuid()} and cannot become uid {uid}")
        os.umask(0o077)
        os.chdir(directory)
        # After the change of user: that would take the setting back.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != manager_pid:
            return CANNOT_START  # the manager died before the kernel knew that we go with it
        os.execv(program[0], program)
    except OSError as problem:
        print(f"stageout-launch: {problem}", file=sys.stderr)
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
