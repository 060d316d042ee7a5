"""How much memory there is for files, as the kernel tells it of the machine and of groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageout.overlay.memory import room_bytes

MACHINE_BYTES = 1000 * 1024


class _Kernel:
    """The line of the kernel. :param here: lines of ``/proc/self/cgroup``."""

    def __init__(self, place: Path, *here: str) -> None:
        self.proc, self.groups = place / "proc", place / "groups"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir()
        (self.proc / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:  1000 kB\nHugePages_Total: 0\n")
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in here))

    def second(self, path: str, limit: object, anon: int, more: str = "") -> None:
        """A group of the second version. :param more: lines about it."""
        self._group(self.groups / path, "memory.max", limit, f"anon {anon}\nfile 7\n{more}")

    def first(self, path: str, limit: object, rss: int, more: str = "") -> None:
        """A group of the first version. :param more: as above."""
        stat = f"cache 7\nrss 3\nshmem 3\ntotal_cache 7\ntotal_rss {rss}\n{more}"
        self._group(self.groups / "memory" / path, "memory.limit_in_bytes", limit, stat)

    def _group(self, group: Path, name: str, limit: object, stat: str) -> None:
        group.mkdir(parents=True, exist_ok=True)
        (group / name).write_text(f"{limit}\n")
        (group / "memory.stat").write_text(stat)

    def room_bytes(self) -> int | None:
        return room_bytes(self.proc, self.groups)


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert _Kernel(tmp_path).room_bytes() == MACHINE_BYTES


def test_a_group_leaves_what_its_processes_do_not_hold(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "0::/slot/job")
    kernel.second("slot/job", 5000, 1000)
    assert kernel.room_bytes() == 4000


def test_what_lies_in_memory_for_good_leaves_no_room(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "4:memory:/slot", "0::/slot/job")
    kernel.second("slot/job", 5000, 1000, "shmem 500\n")
    assert kernel.room_bytes() == 3500
    kernel.first("slot", 5000, 1000, "total_shmem 1500\n")
    assert kernel.room_bytes() == 2500


def test_a_group_that_is_throttled_has_no_room_beyond_that(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "0::/slot/job")
    kernel.second("slot/job", 9000, 1000)
    (kernel.groups / "slot/job/memory.high").write_text("max\n")
    assert kernel.room_bytes() == 8000
    (kernel.groups / "slot/job/memory.high").write_text("3000\n")
    assert kernel.room_bytes() == 2000


def test_the_narrowest_group_counts_and_one_without_a_limit_does_not(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "0::/slot/job")
    kernel.second("slot/job", "max", 1000)
    kernel.second("slot", 6000, 2000)
    assert kernel.room_bytes() == 4000


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "9:cpu,cpuacct:/other", "4:memory:/slot/job", "0::/")
    kernel.first("slot/job", 9223372036854771712, 1000)
    kernel.first("slot", 6000, 2000)
    assert kernel.room_bytes() == 4000


def test_a_container_sees_its_own_group_only(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "4:memory:/docker/of-the-machine")
    kernel.first("", 5000, 1000)
    assert kernel.room_bytes() == 4000


def test_a_group_that_is_full_of_what_its_processes_hold_leaves_none(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "0::/job")
    kernel.second("job", 1000, 1001)
    assert kernel.room_bytes() == 0


def test_a_machine_that_has_less_than_the_group_may_use(tmp_path: Path) -> None:
    kernel = _Kernel(tmp_path, "0::/job")
    kernel.second("job", 2 * MACHINE_BYTES, 0)
    assert kernel.room_bytes() == MACHINE_BYTES


@pytest.mark.parametrize("here", ["0::/job", "not of any form"])
def test_where_nothing_is_told_nobody_can_say(tmp_path: Path, here: str) -> None:
    kernel = _Kernel(tmp_path, here)
    (kernel.proc / "meminfo").write_text("MemTotal:  2000 kB\n")
    assert kernel.room_bytes() is None


def test_this_machine_can_say() -> None:
    assert room_bytes() is not None
