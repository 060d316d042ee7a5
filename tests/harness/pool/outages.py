"""Links that are cut and disks that are full, for the pools of a process that has namespaces of its own.

All nodes of a pool share the loopback interface. Here each execute point has an address of its own on it. While its
link is cut, a rule of routing sends all between that address and the access point into a hole: packets vanish without
a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pool.errors import PoolError

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_AP = "127.0.0.1"
_HOLE, _TABLE = "hole0", "77"
_BLOCK_BYTES = 1 << 20


def enter_own_network() -> None:
    """Give this process a network and mounts of its own. It reaches no other machine from now on.

    Everything that it starts shares them. Only a process without other threads may call it.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWNET):
        raise PoolError(f"no namespaces of its own: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")
    _ip("link", "set", "lo", "up")
    # Rules of one priority are asked in the order in which they came, and that for local addresses is the first of all.
    _ip("rule", "add", "pref", "10", "lookup", "local")
    _ip("rule", "del", "pref", "0")
    _ip("link", "add", _HOLE, "type", "veth", "peer", "name", "hole1")
    for end in (_HOLE, "hole1"):
        _ip("link", "set", end, "arp", "off", "up")
    Path(f"/proc/sys/net/ipv4/conf/{_HOLE}/route_localnet").write_text("1")
    _ip("route", "add", "default", "dev", _HOLE, "table", _TABLE)


@dataclass(frozen=True)
class Link:
    """The link between an execute point and the access point. The node reaches web servers while it is cut.

    :param number: of the execute point in its pool.
    """

    number: int

    @property
    def address(self) -> str:
        """Address of the execute point."""
        return f"127.0.1.{self.number}"

    @property
    def config(self) -> str:
        """Settings of the execute point."""
        return f"NETWORK_INTERFACE = {self.address}\n"

    def cut(self) -> None:
        """Drop every packet, also of connections that are open."""
        self._rules("add")

    def mend(self) -> None:
        """Let packets pass again."""
        self._rules("del")

    def _rules(self, command: str) -> None:
        for source, target in ((self.address, _AP), (_AP, self.address)):
            _ip("rule", command, "pref", "5", "from", source, "to", target, "lookup", _TABLE)


@dataclass(frozen=True)
class SmallDisk:
    """A small filesystem with the jobs' directories and the spool of an execute point.

    :param place: directory at which it is mounted; a pool needs it among its ``binds``.
    :param owner: ids of the user condor.
    """

    place: Path
    size_mb: int
    owner: tuple[int, int]

    @property
    def config(self) -> str:
        """Settings of the execute point."""
        return f"EXECUTE = {self.place}/execute\n"

    @property
    def _ballast(self) -> Path:
        return self.place / "ballast"

    def mount(self) -> None:
        """Make it."""
        self.place.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self.size_mb}m,mode=755", "tmpfs", str(self.place))
        self._populate()

    def unmount(self) -> None:
        """Take it away."""
        _run("umount", "-l", str(self.place))

    def fill(self, left_bytes: int) -> None:
        """Put a ballast onto it that leaves so much room."""
        # Others write meanwhile: it ends when there is no room for a block.
        with open(self._ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while (room_bytes := self._free_bytes() - left_bytes) > 0:
                file.write(bytes(min(room_bytes, _BLOCK_BYTES)))

    def relieve(self) -> None:
        """Remove the ballast."""
        self._ballast.unlink(missing_ok=True)

    def replace(self) -> None:
        """Make it an empty one, while the node is off."""
        for path in self.place.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._populate()

    def _populate(self) -> None:
        execute = self.place / "execute"
        execute.mkdir(mode=0o755)
        os.chown(execute, *self.owner)

    def _free_bytes(self) -> int:
        found = os.statvfs(self.place)
        return found.f_bavail * found.f_frsize


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PoolError(f"{' '.join(command)}: {done.stderr.strip()}")
