"""Lots: space in a spool, reserved whole before data moves (rule 8). Times are seconds of a monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEASE_S = 60.0
KEPT_SHARE = 0.05
RETRY_AFTER_S = 5.0


@dataclass
class Lot:
    """Bytes reserved by one transfer until ``until_s``; a pinned lot holds custody and does not run out."""

    size_bytes: int
    until_s: float
    pinned: bool = False


@dataclass
class Spool:
    """The lots of one spool."""

    size_bytes: int
    lots: dict[object, Lot] = field(default_factory=dict)


def usable_bytes(spool: Spool) -> int:
    """The bytes that intake may use: 5 % stay for output."""
    return int(spool.size_bytes * (1 - KEPT_SHARE))


def reserved_bytes(spool: Spool) -> int:
    """Sum of all lots."""
    return sum(lot.size_bytes for lot in spool.lots.values())


def reserve(spool: Spool, owner: object, size_bytes: int, now_s: float) -> float | None:
    """All or nothing. None = granted (or renewed), else seconds after which to ask again (NOSPACE).

    An owner that holds a lot already extends it to ``size_bytes`` if that fits.
    """
    return reserve_all(spool, {owner: size_bytes}, now_s)


def reserve_all(spool: Spool, wanted: Mapping[object, int], now_s: float) -> float | None:
    """As :func:`reserve`, for some owners together: the lots of a full spool are looked through once for all."""
    held = {owner: spool.lots[owner] for owner in wanted if owner in spool.lots}
    have_bytes = sum(lot.size_bytes for lot in held.values())
    if reserved_bytes(spool) - have_bytes + sum(wanted.values()) > usable_bytes(spool):
        return RETRY_AFTER_S
    for owner, size_bytes in wanted.items():
        before = held.get(owner, Lot(0, 0.0))
        spool.lots[owner] = Lot(max(size_bytes, before.size_bytes), now_s + LEASE_S, before.pinned)
    return None


def renew(spool: Spool, owner: object, now_s: float) -> bool:
    """Traffic renews the lease. False when the lot has gone."""
    lot = spool.lots.get(owner)
    if lot is not None:
        lot.until_s = now_s + LEASE_S
    return lot is not None


def pin(spool: Spool, owner: object) -> None:
    """CUSTODY was granted: the bytes stay until :func:`release`."""
    spool.lots[owner].pinned = True


def release(spool: Spool, owner: object) -> None:
    """Give the bytes back; twice is harmless."""
    spool.lots.pop(owner, None)


def expire(spool: Spool, now_s: float) -> list[object]:
    """Drop the lots whose lease ran out without custody; returns their owners, whose data may be removed."""
    gone = [owner for owner, lot in spool.lots.items() if not lot.pinned and lot.until_s < now_s]
    for owner in gone:
        del spool.lots[owner]
    return gone
