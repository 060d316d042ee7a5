"""Clocks. Durations come from the monotonic clock; wall time is for people and for what outlives a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What a daemon asks for time; tests put their own in its place."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never steps back."""

    def wall_s(self) -> float:
        """Seconds since the epoch; may jump."""


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never steps back."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since the epoch; may jump."""
        return time.time()


def boot_id() -> str:
    """Identity of the running kernel's boot; "" where the kernel does not tell (proc(5), random/boot_id)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
