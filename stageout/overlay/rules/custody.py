"""Custody: when it begins, what the custodian does with answers, how it ends, and when bytes may go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from stageout.overlay.rules.operations import KEPT_S, Row, moved, touches
from stageout.overlay.rules.states import DUTY, ENDS, Role, State
from stageout.overlay.rules.terminal import EPOCH_MARGIN_S, new_epoch

#: Ranges begin on this grid (bytes).
BLOCK_SIZE = 1 << 20
#: The durable steps before a custodian answers ``custody``.
CUSTODY_STEPS = ("sync", "directory", "row", "answer")
#: Clocks that differ by more refuse custody (seconds).
MOST_DIFFERENCE_S = 600
#: A custodian's own announced pause between attempts (seconds), from the first to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1, 120


class BlockDiffers(Exception):
    """409: the block has another digest here."""


def keep_digest(kept: Mapping[int, str], number: int, digest: str) -> dict[int, str]:
    """Return the digests with one more; the first one stays. :raises BlockDiffers: another one came before."""
    if kept.get(number, digest) != digest:
        raise BlockDiffers(f"block {number} has another digest here")
    return {**kept, number: digest}


def whole_blocks(start: int, moved_size: int, size: int) -> range:
    """Return the numbers of the blocks that a range brought whole. A cut one counts up to its last whole block.

    :param start: of the range, on the grid. :param moved_size: bytes that came. :param size: of the file.
    """
    end = min(start + moved_size, size)
    return range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE) if end == size else end // BLOCK_SIZE)


def after_power_failure(row: Row, stored: frozenset[int]) -> Row:
    """Return the row with the blocks of the stored bitmap only: others were never received, nor their digests seen."""
    return replace(row, blocks={number: digest for number, digest in row.blocks.items() if number in stored})


def wrong_blocks(blocks: Mapping[int, str], manifest: tuple[str, ...]) -> list[int]:
    """Return the numbers of blocks that differ from the signed list: they lose their bit and their digest (422)."""
    return [number for number, digest in blocks.items() if number >= len(manifest) or manifest[number] != digest]


def is_whole(row: Row) -> bool:
    """Tell whether this router holds all bytes itself. Blocks at other routers do not count."""
    return row.manifest is not None and dict(row.blocks) == dict(enumerate(row.manifest))


def may_take(row: Row, difference_s: float) -> bool:
    """Tell whether a custodian may answer ``custody``. :param difference_s: between its clock and the terminal's."""
    return row.custody and row.state is State.RECEIVING and is_whole(row) and abs(difference_s) <= MOST_DIFFERENCE_S


def is_blocked(row: Row, rows: Iterable[Row]) -> bool:
    """Tell whether an earlier version of the same owner has to be delivered first. A refused one does not block."""
    return any(
        other.identity.owner == row.identity.owner
        and other.hop[1:3] < row.hop[1:3]
        and other.state in (State.CUSTODY, State.DELIVERING)
        and touches(other.fields, row.fields)
        for other in rows
    )


def on_answer(row: Row, state: State | None, reason: str, now: int) -> Row:
    """Return a custodian's row after an answer of the terminal. :param state: None: no answer, or not ended yet."""
    if row.state in ENDS:
        return row
    if state in ENDS:
        return moved(Role.CUSTODIAN, row, state, reason=reason, ended=now)
    if row.state is not State.DELIVERING:
        return row
    if state is State.REFUSED:
        return moved(Role.CUSTODIAN, row, State.REFUSED, reason=reason)
    return moved(Role.CUSTODIAN, row, State.CUSTODY)


def cancel(row: Row) -> Row:
    """Return a custodian's row after ``DELETE O``: the terminal decides, also if this router never offered it.

    The same operation may be at the terminal by another route.
    """
    return row if row.state in ENDS else moved(Role.CUSTODIAN, row, State.CANCELLING)


def asks_for_end(row: Row, now: int) -> bool:
    """Tell whether a custodian asks the terminal for the end of an operation, in place of offering it."""
    return row.state not in ENDS and (row.state is State.CANCELLING or now > row.fields.expires)


def give_up(row: Row, now: int) -> Row:
    """Return the row as ``expired, outcome unknown`` when the terminal has not answered after ``expires``."""
    if row.state in ENDS or now <= row.fields.expires + EPOCH_MARGIN_S:
        return row
    return moved(Role.CUSTODIAN, row, State.EXPIRED_UNKNOWN, ended=now)


def may_drop_bytes(row: Row, now: int, by_owner: bool = False) -> bool:
    """Tell whether a custodian may delete the bytes. Those of a failed file stay until ``expires``."""
    if row.state in (State.DONE, State.SUPERSEDED, State.CANCELLED):
        return True
    return row.state in ENDS and (by_owner or now > row.fields.expires)


def is_only_copy(row: Row) -> bool:
    """Tell whether deleting the bytes is an ERROR that names the file: nobody else is known to have them."""
    return row.custody and row.state in (State.FAILED, State.EXPIRED, State.EXPIRED_UNKNOWN)


def rebuild(directories: Iterable[Row], now: int) -> tuple[int, list[Row]]:
    """Return a new epoch and a row for each staging directory, in the old order. Nothing is deleted.

    Each directory holds its operation, order and manifest, so the rows keep them; new ones get higher numbers.
    """
    rows = sorted(directories, key=lambda row: row.hop[1:3])
    epoch = new_epoch(now, max((row.hop.epoch for row in rows), default=0))
    return epoch, [replace(row, state=State.CUSTODY, reason="", ended=0) for row in rows]


def may_forget(row: Row, now: int, has_bytes: bool) -> bool:
    """Tell whether a custodian may drop a row."""
    return row.state in ENDS and not has_bytes and now > row.fields.expires + KEPT_S


def has_duty(row: Row) -> bool:
    """Tell whether a custodian has to deliver."""
    return row.custody and row.state in DUTY
