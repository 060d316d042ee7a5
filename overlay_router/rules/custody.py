"""Who holds the duty to deliver, and who may free what when (rule 3 and the table of acks)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from overlay_router.rules.states import Outcome, Release


@dataclass(frozen=True)
class Summary:
    """What is in custody. Sizes in bytes. :param single: files whose only copy is here."""

    files: int = 0
    size_bytes: int = 0
    single: int = 0
    single_bytes: int = 0
    damaged: int = 0
    oldest_s: int = 0


def may_grant(blocks: int, staged: Collection[int], op_durable: bool, has_lot: bool) -> bool:
    """CUSTODY is true only when all blocks are STAGED, the operation is durable and a lot is held."""
    return op_durable and has_lot and len(staged) == blocks


def may_free(release: Release, copies: int, custodians: int, final: bool) -> bool:
    """Whether a holder may free its durable bytes: at the end, or at ``copies`` custodies if release=custody."""
    return final or (release is Release.CUSTODY and custodians >= copies)


def verdict_at_expiry(release: Release, custodians: int, answer: Outcome) -> Outcome:
    """What the owner is told: bytes that were freed at CUSTODY and never came are LOST, not EXPIRED (rule 3)."""
    if answer is Outcome.EXPIRED and release is Release.CUSTODY and custodians:
        return Outcome.LOST
    return answer
