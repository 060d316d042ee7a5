"""Memory that this process may fill: that of the machine, bounded by its control groups (cgroups(7))."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def room_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Return the bytes that files may take before something else leaves the memory; None when unknown.

    Of a group that is its limit, or that above which it is throttled, without what its processes hold themselves, and
    what lies in a tmpfs: neither can be dropped as files can.

    :param proc: where the kernel tells of processes. :param groups: where groups are, of either version.
    """
    rooms = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        rooms.append(_numbers(proc / "meminfo")["MemAvailable:"] * 1024)
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                rooms += _rooms(groups, path, ("memory.max", "memory.high"), ("anon", "shmem"))
            elif "memory" in controllers.split(","):
                rooms += _rooms(groups / "memory", path, ("memory.limit_in_bytes",), ("total_rss", "total_shmem"))
    return max(0, min(rooms)) if rooms else None


def _rooms(top: Path, path: str, limits: Sequence[str], held: Sequence[str]) -> list[int]:
    """Of a group, and of all that it is in.

    Within a container its path may be that of the machine outside: then only the top is here, the container's own.

    :param held: the first one every kernel tells.
    """
    rooms, place = [], top / path.strip("/")
    for group in (place, *place.parents):
        for limit in limits:
            with contextlib.suppress(OSError, ValueError, KeyError):  # it is not here, or its limit is "max"
                room, stat = int((group / limit).read_text()), _numbers(group / "memory.stat")
                rooms.append(room - stat[held[0]] - sum(stat.get(name, 0) for name in held[1:]))
        if group == top:
            break
    return rooms


def _numbers(path: Path) -> dict[str, int]:
    """Of lines with a name and a number."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
