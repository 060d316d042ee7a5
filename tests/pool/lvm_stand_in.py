"""LVM's commands as HTCondor 25.14 calls them, over loop devices: one volume group of thick volumes.

A copy of this file is run as ``vgs``, ``lvs``, ``lvcreate`` or ``lvremove`` inside a node. HTCondor formats, mounts,
measures and unmounts the volumes itself (``src/condor_startd.V6/VolumeManager.cpp``). Volumes end with the node.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GROUP = "condor_vg"
_SIZE_BYTES = 400 << 20
_EXTENT_BYTES = 4 << 20
_MAPPER = Path("/dev/mapper")
_STATE = Path("/run/volumes")
_SEPARATOR = "\x1f"


class _Failed(Exception):
    """LVM's message for a command that it cannot do."""


def _device(name: str) -> Path:
    return _MAPPER / f"{GROUP}-{name.replace('-', '--')}"


def _volumes() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(_STATE.glob("*.json"))}


def _free_bytes() -> int:
    return _SIZE_BYTES - sum(int(volume["bytes"]) for volume in _volumes().values())


def _rows(fields: Sequence[dict[str, object]]) -> None:
    for row in fields:
        print("  " + _SEPARATOR.join(f"LVM2_{name.upper()}='{value}'" for name, value in row.items()))


def vgs(_words: Sequence[str]) -> None:
    """Print the volume group."""
    sizes = {"vg_size": f"{_SIZE_BYTES}B", "vg_free": f"{_free_bytes()}B", "vg_extent_size": f"{_EXTENT_BYTES}B"}
    _rows([{"vg_name": GROUP, **sizes}])


def lvs(_words: Sequence[str]) -> None:
    """Print the volumes."""
    _rows(
        [
            {
                "vg_name": GROUP,
                "lv_name": name,
                "pool_lv": "",
                "lv_tags": ",".join(volume["tags"]),
                "lv_size": f"{volume['bytes']}B",
                "data_percent": "",
                "vg_extent_size": f"{_EXTENT_BYTES}B",
            }
            for name, volume in _volumes().items()
        ]
    )


def lvcreate(words: Sequence[str]) -> None:
    """Make a volume, rounded up to whole extents. :raises _Failed: the group has no room."""
    name, wanted = words[words.index("-n") + 1], int(words[words.index("-L") + 1].rstrip("k")) * 1024
    size_bytes = -(-wanted // _EXTENT_BYTES) * _EXTENT_BYTES
    if size_bytes > _free_bytes():
        raise _Failed(f'Volume group "{GROUP}" has insufficient free space.')
    backing = _STATE / name
    backing.touch()
    os.truncate(backing, size_bytes)
    command = ["losetup", "--find", "--show", str(backing)]
    loop = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    # Detached while a process of the node has it open: the kernel frees the device with that process and the mounts.
    with open(loop, "rb") as opened:
        holder = subprocess.Popen(
            ["sleep", "infinity"],
            stdin=opened,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    subprocess.run(["losetup", "-d", loop], check=True)
    os.mknod(_device(name), stat.S_IFBLK | 0o600, Path(loop).stat().st_rdev)
    tags = [words[at + 1] for at, word in enumerate(words) if word == "--addtag"]
    (_STATE / f"{name}.json").write_text(json.dumps({"bytes": size_bytes, "tags": tags, "holder": holder.pid}))


def lvremove(words: Sequence[str]) -> None:
    """Remove a volume. :raises _Failed: there is none, or it is mounted somewhere."""
    name = next(word for word in words if word.startswith(f"{GROUP}/")).partition("/")[2]
    volume = _volumes().get(name)
    if volume is None:
        raise _Failed(f'Failed to find logical volume "{GROUP}/{name}"')
    try:
        os.close(os.open(_device(name), os.O_RDWR | os.O_EXCL))
    except OSError:
        raise _Failed(f"Logical volume {GROUP}/{name} contains a filesystem in use.") from None
    os.kill(volume["holder"], signal.SIGKILL)
    for path in (_device(name), _STATE / name, _STATE / f"{name}.json"):
        path.unlink()


def main(command: str, words: Sequence[str]) -> int:
    """Run a command as LVM would: exit status 5 and a message on stderr when it fails."""
    _STATE.mkdir(exist_ok=True)
    with open(_STATE / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.ismount(_MAPPER):
            _MAPPER.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,dev", "tmpfs", str(_MAPPER)], check=True)
        try:
            {"vgs": vgs, "lvs": lvs, "lvcreate": lvcreate, "lvremove": lvremove}[command](words)
        except _Failed as problem:
            print(f"  {problem}", file=sys.stderr)
            return 5
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
