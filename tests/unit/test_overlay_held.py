"""Operations that wait for data, or for others: what one key may have of them, and for how long."""

from __future__ import annotations

from overlay_router.local.held import DATALESS_S, MOST, HeldOperations
from stageout.overlay.wire.messages import Operation

ORIGIN = "0a" * 16


def operation(seq: int, kind: str = "publish", manifest: str = "") -> Operation:
    return Operation(ORIGIN, seq, kind, "f", 10**9, manifest=manifest)


def test_a_key_has_its_share_and_others_theirs() -> None:
    held = HeldOperations[int]()
    assert all(held.put(operation(seq), "a/1", seq, 0) for seq in range(MOST))
    assert not held.put(operation(MOST), "a/2", MOST, 0)
    assert held.put(operation(1), "a/1", 7, 0), "it is there already"
    assert held.put(operation(MOST), "b/1", MOST, 0)
    held.release((ORIGIN, 3))
    held.release((ORIGIN, 3))
    assert held.put(operation(MOST + 1), "a/1", 0, 0)
    assert not held.put(operation(MOST + 2), "a/1", 0, 0)


def test_large_operations_are_counted_by_their_bytes() -> None:
    held = HeldOperations[int]()
    found = [held.put(operation(seq, manifest="w" * 2**20), "a/1", seq, 0) for seq in range(20)]
    assert sum(found) == 15, "with the rest of each they take more than 16 MiB"


def test_what_waits_for_data_that_nobody_sends_is_released_early() -> None:
    held = HeldOperations[int]()
    for seq, kind in ((1, "publish"), (2, "publish"), (3, "mkdir")):
        held.put(operation(seq, kind), "a/1", seq, 100)
    held.drop_dataless(100 + DATALESS_S, ())
    assert sorted(held) == [(ORIGIN, 1), (ORIGIN, 2), (ORIGIN, 3)]
    held.drop_dataless(101 + DATALESS_S, {(ORIGIN, 2)})
    assert sorted(held) == [(ORIGIN, 2), (ORIGIN, 3)]
