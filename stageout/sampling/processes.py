"""CPU time and memory of a process and all that came from it, as /proc tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """User and system time so far, and memory now, of a family of processes."""

    cpu_s: float = 0.0
    rss_bytes: int = 0


def usage_of(pid: int) -> Usage:
    """Sum the usage of a process, its descendants, and those that have ended; nothing for 0 or one that is gone."""
    cpu_s, rss_bytes = 0.0, 0
    for member in _family(pid) if pid else ():
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        cpu_s += sum(int(fields[index]) for index in (11, 12, 13, 14)) / _TICKS_PER_S
        rss_bytes += int(fields[21]) * _PAGE_BYTES
    return Usage(cpu_s, rss_bytes)


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [
            word for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended meanwhile
        return
    for child in children:
        yield from _family(int(child))


def listener_on(port: int) -> int:
    """Find the pid of the process here that listens on a TCP port, the oldest of several; 0 when it cannot be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    owners = [int(path.name) for path in Path("/proc").glob("[0-9]*") if inodes and _holds(path, inodes)]
    return min(owners, default=0)


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in inodes for link in (process / "fd").iterdir())
    except OSError:
        return False
