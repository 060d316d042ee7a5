"""A small disk of its own for tests that have it fail, or taken away. Needs root, and loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.pool.waiting import wait_until

needs_loop_disk = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not Path("/dev/loop-control").exists(),
    reason="mounts a disk of its own: needs root and loop devices",
)
_SIZE_BYTES = 96 * 1024 * 1024


@dataclass(frozen=True)
class LoopDisk:
    """A mounted ext4. :param image: the file that it is in. :param place: where it is mounted."""

    image: Path
    place: Path

    def mount(self) -> None:
        """Mount it, with what a crash or an error left in its journal, when nobody has it open any more."""
        wait_until(lambda: not _run("losetup", "-j", str(self.image)), what="the end of all who had the disk open")
        _run("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.place))

    def unmount(self) -> None:
        """Take it away, also from mount namespaces that were made meanwhile; files that are open stay so."""
        _run("umount", "-l", str(self.place))
        for process in _with_the_mount(str(self.place)):
            command = "nsenter", f"--mount=/proc/{process}/ns/mnt", "umount", "-l", str(self.place)
            subprocess.run(command, capture_output=True, check=False)

    def only_read(self) -> None:
        """As an administrator does, when no file is open to be written any more."""
        command = "mount", "-o", "remount,ro", str(self.place)
        wait_until(lambda: not subprocess.run(command, capture_output=True, check=False).returncode, what="remount")

    def write_again(self) -> None:
        """The end of that."""
        _run("mount", "-o", "remount,rw", str(self.place))

    def fail(self) -> None:
        """It finds itself damaged, and takes no more writes, also of files that are open, until it is mounted anew."""
        device = _run("findmnt", "-no", "SOURCE", str(self.place)).strip()
        Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("1")


@contextmanager
def loop_disk(image: Path, place: Path) -> Iterator[LoopDisk]:
    """A new one, mounted at a directory, which is made."""
    image.parent.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(_SIZE_BYTES)
    _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(image))
    place.mkdir(parents=True, exist_ok=True)
    disk = LoopDisk(image, place)
    disk.mount()
    try:
        yield disk
    finally:
        while place.is_mount():
            disk.unmount()


def _with_the_mount(place: str) -> list[str]:
    """One process of each mount namespace that has something mounted at ``place``."""
    found: dict[str, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f" {place} " in (process / "mountinfo").read_text():
                found[str((process / "ns/mnt").readlink())] = process.name
    return list(found.values())


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
