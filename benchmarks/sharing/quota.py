"""Processes that get no more than a part of a core, or of a disk: the same on an idle and on a busy machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stageout.core.errors import StageoutError

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000


@contextmanager
def before_others() -> Iterator[None]:
    """This process and what it starts come before all others on this machine, as far as that may be set.

    Niceness does not do it: where the kernel groups processes by session it only counts within one.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(_group("cpu", {"cpu.shares": "262144"}, {"cpu.weight": "10000"}, "first"))
        except StageoutError as problem:
            print(f"others come first as well: {problem}", file=sys.stderr)
            yield
            return
        me = str(os.getpid())
        (folder / "cgroup.procs").write_text(me)
        try:
            yield
        finally:
            (folder.parent / "cgroup.procs").write_text(me)


@contextmanager
def part_of_a_core(part: float) -> Iterator[tuple[str, ...]]:
    """Command prefix of processes that all together get this part of one core. Needs root and control groups."""
    quota_us = int(part * _PERIOD_US)
    old = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us), "cpu.shares": "20480"}
    unified = {"cpu.max": f"{quota_us} {_PERIOD_US}", "cpu.weight": "2000"}  # before all others, up to the quota
    with _group("cpu", old, unified, "part") as folder:
        yield _inside(folder)


@contextmanager
def part_of_a_disk(device: int, bytes_per_s: int) -> Iterator[tuple[str, ...]]:
    """Likewise of processes that write no faster to a block device. :param device: its number, as in ``st_dev``."""
    name = f"{os.major(device)}:{os.minor(device)}"
    old = {"blkio.throttle.write_bps_device": f"{name} {bytes_per_s}"}
    with _group("blkio", old, {"io.max": f"{name} wbps={bytes_per_s}"}, "disk") as folder:
        yield _inside(folder)


@contextmanager
def _group(controller: str, old: dict[str, str], unified: dict[str, str], name: str) -> Iterator[Path]:
    """A control group. :param old: files and what to write there, of version 1; :param unified: of version 2."""
    of_its_own = (_ROOT / controller / "cgroup.procs").exists()
    folder = (_ROOT / controller if of_its_own else _ROOT) / f"stageout-bench-{name}-{os.getpid()}"
    try:
        if not of_its_own:
            (_ROOT / "cgroup.subtree_control").write_text("+cpu +io")
        folder.mkdir()
        for file, value in (old if of_its_own else unified).items():
            (folder / file).write_text(value)
    except OSError as problem:
        raise StageoutError(f"no limit for {controller} can be set ({problem}): run it as root") from None
    try:
        yield folder
    finally:
        _remove(folder)


def _inside(folder: Path) -> tuple[str, ...]:
    """Command prefix of what is to run in a group."""
    return ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")


def _remove(folder: Path) -> None:
    """Take a group away; for a moment its last processes may still be in it."""
    end_s = time.monotonic() + 10
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
