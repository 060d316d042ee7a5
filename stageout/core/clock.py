"""Clocks. Durations come from the monotonic clock; wall time is for people and for what outlives a restart.

The boot clock counts a lease whose end gives the resource to somebody else: it runs on while the machine is suspended.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """The clocks of a daemon. Tests have their own implementation."""

    def monotonic_s(self) -> float:
        """Return the seconds since an arbitrary start; they never step back."""

    def wall_s(self) -> float:
        """Return the seconds since the epoch; they may jump."""


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        """Return the seconds since an arbitrary start; they never step back."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return the seconds since the epoch; they may jump."""
        return time.time()


def wall_now(clock: Clock) -> int:
    """Return the whole seconds of the wall clock, as records keep them."""
    return int(clock.wall_s())


def boot_clock_s() -> float:
    """Return the seconds since the machine started, suspended ones included (clock_gettime(2), CLOCK_BOOTTIME).

    All processes of a machine share it. The monotonic clock, which stands still meanwhile, where there is none.
    """
    which = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if which is None else time.clock_gettime(which)


def asleep_s() -> float:
    """Return the seconds for which this machine was suspended since its start."""
    return boot_clock_s() - time.monotonic()


def boot_id() -> str:
    """Return the id of the running kernel's boot; "" if the kernel does not provide it (proc(5), random/boot_id)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
