"""Numbers as people read them. Pure."""

from __future__ import annotations

import re

#: Bytes of a megabyte, in settings, attributes and texts. Powers of 1024 have names of their own: KiB, MiB, GiB.
MB = 1_000_000
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def read_size(text: str) -> int:
    """Read a size in bytes: ``2GB``, ``50M``, ``1.5 GiB``. K, M, G, T are powers of 1000, Ki to Ti of 1024.

    :returns: 0 when it is no size.
    """
    found = _SIZE.fullmatch(text)
    base = 1024 if found and found[3] else 1000
    return int(float(found[1]) * base ** _POWERS[found[2].upper()]) if found else 0


def size(count_bytes: float) -> str:
    """Format a size for people, in powers of 1000: ``0 B``, ``1.0 MB``, ``312 GB``."""
    value = float(count_bytes)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def rate(bytes_per_s: float) -> str:
    """Format a rate for people: ``1.0 MB/s``."""
    return f"{size(bytes_per_s)}/s"


def count(number: int, what: str) -> str:
    """Format a number of things: ``1 file``, ``2 files``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def duration(seconds: float) -> str:
    """Format a duration in at most two units: ``0s``, ``45s``, ``3m20s``, ``2h05m``, ``4d03h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
