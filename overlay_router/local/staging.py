"""Data that is gathered for an operation, at a terminal as at a custodian: what is there, and whether it is right."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

from overlay_router.local.store import Store, Transfer
from overlay_router.local.tree import Tree
from overlay_router.rules.states import Result
from stageout.core import log
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Operation, Range

#: A pack may have a thousand files that failed for a reason each.
_REASONS, _REASON_CHARS = 200, 100


def ranges(blocks: Iterable[int]) -> tuple[Range, ...]:
    """Positions in order, as they travel."""
    found: list[Range] = []
    for block in blocks:
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return tuple(found[: messages.MAX_RANGES])


def whole(
    store: Store,
    tree: Tree,
    transfers: Iterable[Transfer],
    operation: Operation,
    elsewhere: Callable[[int], Mapping[int, bytes]] = lambda tid: {},
) -> tuple[Transfer | None, list[Transfer]]:
    """The first transfer whose data are whole and right, and those with wrong data, which begin again.

    :param elsewhere: digests of blocks of a transfer that are durable, but not here.
    """
    wrong: list[Transfer] = []
    for transfer in transfers:
        count, manifest = _manifest(store, transfer.tid, elsewhere(transfer.tid))
        if count < operation.blocks or not tree.inode(transfer.tid):
            continue
        if manifest == operation.manifest and transfer.ask.size_bytes == operation.size_bytes:
            return transfer, wrong
        log.error("manifest-check-failed", path=operation.path, tid=transfer.tid)
        store.unstage(transfer.tid)
        wrong.append(transfer)
    return None, wrong


def _manifest(store: Store, tid: int, elsewhere: Mapping[int, bytes]) -> tuple[int, str]:
    """Return how many blocks there are, and the digest of their digests, one after the other: there may be millions."""
    rows, manifest, count = store.each_staged(tid), hashlib.sha256(), 0
    if elsewhere:  # what is here counts
        rows = heapq.merge(rows, sorted(elsewhere.items()), key=itemgetter(0))
    last = -1
    for block, digest in rows:
        if block != last:
            manifest.update(digest)
            count, last = count + 1, block
    return count, manifest.hexdigest()


def as_result(origin: str, seq: int, result: Result | None) -> messages.Result:
    """A result as it travels; None is STALE: settled by its origin, and forgotten here."""
    if result is None:
        return messages.Result(origin, seq, "stale")
    return messages.Result(origin, seq, result.outcome.value, result.reason, result.generation, result.code)


def as_packed(origin: str, seq: int, results: Sequence[Result | None]) -> messages.Packed:
    """The results of a pack's files as they travel; None is STALE."""
    bad = [(position, result) for position, result in enumerate(results) if not result or result.outcome != "done"]
    codes = tuple(result.code if result else 0 for _, result in bad[:_REASONS])
    return messages.Packed(
        origin,
        seq,
        tuple(result.generation if result else 0 for result in results),
        tuple(position for position, _ in bad),
        tuple(result.outcome.value if result else "stale" for _, result in bad),
        tuple(result.reason[:_REASON_CHARS] if result else "" for _, result in bad[:_REASONS]),
        codes if any(codes) else (),
    )


def recorded_pack(store: Store, origin: str, seq: int, files: int) -> messages.Packed | None:
    """The results that a store has of a pack's files, as they travel; None unless it has all of them."""
    low, seqs = store.record(origin).low, range(seq, seq + files)
    results = store.results_of(origin, seqs)
    if not all(one <= low or one in results for one in seqs):
        return None
    return as_packed(origin, seq, [None if one <= low else results[one] for one in seqs])


def recorded(store: Store, origin: str, seq: int) -> messages.Result | None:
    """The result that a store has of an operation, as it travels; None without one."""
    if seq <= store.record(origin).low:
        return as_result(origin, seq, None)
    result = store.results_of(origin, range(seq, seq + 1)).get(seq)
    return as_result(origin, seq, result) if result is not None else None
