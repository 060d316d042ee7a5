"""The holder of the duty to deliver, and the rule by which copies may be freed (rule 3 and the table of acks)."""

from __future__ import annotations

from collections.abc import Collection

from overlay_router.rules.states import Outcome, Release


def may_grant(blocks: int, staged: Collection[int], op_durable: bool, has_lot: bool) -> bool:
    """CUSTODY is true only when all blocks are STAGED, the operation is durable and a lot is held."""
    return op_durable and has_lot and len(staged) == blocks


def may_free(release: Release, copies: int, custodians: int, final: bool) -> bool:
    """Tell whether a holder may free its durable bytes: at the end, or at ``copies`` custodies if release=custody."""
    return final or (release is Release.CUSTODY and custodians >= copies)


def verdict_at_expiry(release: Release, custodians: int, answer: Outcome) -> Outcome:
    """The message for the owner: bytes that were freed at CUSTODY and never came are LOST, not EXPIRED (rule 3)."""
    if answer is Outcome.EXPIRED and release is Release.CUSTODY and custodians:
        return Outcome.LOST
    return answer
