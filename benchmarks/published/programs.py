"""The programs behind the headlines: their parts, how long they take, and which of them may run beside another."""

from __future__ import annotations

from dataclasses import dataclass

from published.schedule import Job


@dataclass(frozen=True)
class Program:
    """One program of a run.

    :param script: file in this directory's parent; several programs may run parts of one script.
    :param parts: of the script; all without a list. :param quick_s: expected seconds of a quick run; 0: no part of it.
    :param full_s: of a full run. :param cores: that it uses on average; 2 also where it saturates the disk.
    :param quick_rounds: measurements behind a figure of a quick run. :param full_rounds: of a full run.
    :param exact: its figures with goals are counts, which another round would not change.
    :param varies: equal rounds differ several times, so figures of fewer than three decide and compare nothing.
    """

    script: str
    quick_s: float
    full_s: float
    cores: float
    parts: tuple[str, ...] = ()
    quick_rounds: int = 1
    full_rounds: int = 3
    exact: bool = False
    varies: bool = False

    def job(self, name: str, quick: bool) -> Job:
        """Return what the schedule needs to know."""
        return Job(name, self.quick_s if quick else self.full_s, self.cores)

    def rounds(self, quick: bool) -> int:
        """Return the number of measurements behind a figure."""
        return self.quick_rounds if quick else self.full_rounds


#: Seconds and cores are those of runs on two cores. Full seconds follow from rounds and sizes where none was timed.
PROGRAMS: dict[str, Program] = {
    "demo": Program("demo", 180, 180, 0.6, quick_rounds=8, full_rounds=8),
    "adapt": Program("adapt", 140, 880, 0.2, ("8 clients",), varies=True),
    "adapt-one": Program("adapt", 60, 340, 0.2, ("one client",), varies=True),
    "overlay_wan": Program("overlay_wan", 70, 660, 0.4, ("1", "4", "default", "get", "get bbr")),
    "overlay_gridftp": Program("overlay_gridftp", 60, 620, 0.2),
    "overlay_routes": Program(
        "overlay_routes", 95, 960, 0.5, ("equal", "4 to 1", "a relay is killed", "a link falls silent")
    ),
    "overlay_hops": Program("overlay_hops", 80, 320, 0.4, ("five_hops", "overlap"), full_rounds=1),
    "overlay_hops-writers": Program("overlay_hops", 50, 310, 1.0, ("eighteen",)),
    "overlay_hops-custodians": Program("overlay_hops", 95, 360, 0.3, ("away", "middle"), full_rounds=1),
    "estimator": Program("estimator", 145, 480, 0.4, ("rate", "RTT", "downloads")),
    "globus_batching": Program("globus_batching", 33, 240, 0.1, exact=True),
    "profiles-far": Program("profiles", 0, 430, 0.4, ("GridFTP-far",)),
    "profiles": Program("profiles", 55, 330, 2.0, ("GridFTP", "directory", "router")),
    "overlay_lots": Program("overlay_lots", 25, 90, 2.0, quick_rounds=5, full_rounds=21),
}


def needed(quick: bool) -> list[str]:
    """Return the programs of a whole run."""
    return [name for name, program in PROGRAMS.items() if program.quick_s or not quick]
