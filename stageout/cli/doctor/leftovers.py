"""Checks for processes that plugins have left behind. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from stageout.cli.doctor.findings import Finding, Machine, ok, reports_as, unchecked, warn
from stageout.cli.doctor.node import spool_path
from stageout.core.children import MOVER_MARK


def plugin_rest(machine: Machine) -> Iterator[Finding]:
    """Check that no process of a plugin still runs after the plugin's call has ended."""
    yield _plugin_rest(machine, spool_path(machine))


@reports_as("plugin-rest")
def router_plugin_rest(machine: Machine) -> Iterator[Finding]:
    """Check for processes of the router's plugins, as :func:`plugin_rest` does for the manager's."""
    yield _plugin_rest(machine, machine.settings.text("STAGEOUT_ROUTER_DIR"))


def _plugin_rest(machine: Machine, home: str) -> Finding:
    """Find processes that could not be killed.

    :param home: a directory of the daemon's user. Processes of a root daemon run as any user.
    """
    marked, sees_all = machine.processes(MOVER_MARK)
    looked = {pid: _has_outlived(machine, pid, place) for pid, place in marked}
    rest = sorted(pid for pid, outlived in looked.items() if outlived)
    if rest:
        numbers = ",".join(map(str, rest))
        remedy = (
            f"ps -o pid,user,stat,wchan:20,args -p {numbers}: what is in state D waits for a disk or a network"
            " filesystem, and ends with that; kill the others. What they send may come twice"
        )
        return warn("plugin-rest", f"processes of plugins that have ended could not be killed: {numbers}", remedy)
    own = machine.stat("/proc/self").st_uid
    if None in looked.values() or not (sees_all or own == _owner(machine, home) != 0):
        who = "in the namespaces of the host, with CAP_SYS_PTRACE" if own == 0 else "as root"
        text = (
            f"uid {own} may not look at all processes here: whether a plugin has left some of other users is not known"
        )
        return unchecked("plugin-rest", text, f"run the doctor {who}")
    return ok("plugin-rest", "nothing runs on that a plugin has left")


def _owner(machine: Machine, path: str) -> int:
    """Return the uid of a directory's owner; 0 if it cannot be read."""
    try:
        return machine.stat(path).st_uid
    except OSError:
        return 0


def _has_outlived(machine: Machine, pid: int, place: str) -> bool | None:
    """Tell whether the process still runs although the directory of its call no longer exists in its own mount
    namespace.

    Return None if this user may not examine it.
    """
    try:
        machine.stat(f"/proc/{pid}/root{place}")
    except FileNotFoundError:
        with suppress(OSError):
            machine.stat(f"/proc/{pid}")
            return True
    except PermissionError:
        return None
    except OSError:
        return False  # the process has ended
    return False


EXECUTE_POINT = (plugin_rest,)
