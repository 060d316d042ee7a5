"""Blocks that come back are compared with those that were published, one by one and from whatever connection."""

from __future__ import annotations

import hashlib
import random
import tracemalloc

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.proof import Proof
from stageout.overlay.wire.messages import BLOCK_BYTES, Found

_KIND = "blake2b-128"
_BLOCKS = 2500
_SIZE_BYTES = (_BLOCKS - 1) * BLOCK_BYTES + 7


def _digest(block: int) -> bytes:
    return hashlib.blake2b(str(block).encode(), digest_size=16).digest()


def _length(block: int) -> int:
    return min(BLOCK_BYTES, _SIZE_BYTES - block * BLOCK_BYTES)


def _found(manifest: str = "", size_bytes: int = _SIZE_BYTES, kind: str = _KIND) -> Found:
    right = hashlib.sha256(b"".join(map(_digest, range(_BLOCKS)))).hexdigest()
    return Found(size_bytes, BLOCK_BYTES, 3, 0o644, manifest or right, kind)


def _proof(found: Found, blocks: list[int]) -> Proof:
    proof = Proof("d/f", "r:1")
    proof.begin(found, _KIND, anew=True)
    for block in blocks:
        proof.add(block, _length(block), _digest(block))
    return proof


def _refused(proof: Proof) -> None:
    with pytest.raises(TransferFailure, match=r"r:1: d/f is not what was published") as failure:
        proof.judge()
    assert failure.value.kind is ErrorClass.CONTENT_MISMATCH


def test_blocks_may_come_in_any_order_and_twice() -> None:
    order = [*range(_BLOCKS), 5, _BLOCKS - 1]
    random.Random(7).shuffle(order)
    _proof(_found(), order).judge()


def test_what_is_another_block_or_none_is_found() -> None:
    proof = _proof(_found(), list(range(_BLOCKS)))
    proof.add(1030, BLOCK_BYTES, _digest(1031))
    _refused(proof)
    _refused(_proof(_found(), list(range(1, _BLOCKS))))
    _refused(_proof(_found(), list(range(_BLOCKS - 1))))
    _refused(_proof(_found("ab" * 32), list(range(_BLOCKS))))


@pytest.mark.parametrize("found", [Found(5, BLOCK_BYTES, 3, 0o644), _found("ab" * 32, kind="xxh3-128")])
def test_a_file_of_which_nothing_is_said_is_not_judged(found: Found) -> None:
    """Nor one whose digests are of a kind that nobody computes on this connection."""
    proof = _proof(found, [])
    assert not proof.is_wanted
    proof.judge()


def test_a_block_of_another_length_or_behind_the_end_takes_no_place_and_no_memory() -> None:
    proof = _proof(_found(), list(range(_BLOCKS)))
    proof.add(3, 5, b"x" * 16)
    proof.add(_BLOCKS - 1, BLOCK_BYTES, b"x" * 16)
    proof.add(_BLOCKS, 0, b"x" * 16)
    proof.judge()
    far = Proof("d/f", "r:1")
    far.begin(_found(size_bytes=(1 << 63) - 1), _KIND, anew=True)
    tracemalloc.start()
    try:
        far.add(1 << 42, BLOCK_BYTES, b"x" * 16)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_file_that_goes_on_must_be_the_same_one() -> None:
    proof = _proof(_found(), list(range(9)))
    proof.begin(_found(), _KIND, anew=False)
    for other in (_found("cd" * 32), Found(_SIZE_BYTES, BLOCK_BYTES, 3, 0o644), _found(size_bytes=_SIZE_BYTES + 1)):
        with pytest.raises(TransferFailure) as failure:
            proof.begin(other, _KIND, anew=False)
        assert failure.value.kind is ErrorClass.CONFLICT
    proof.begin(Found(0, BLOCK_BYTES, 4, 0o644, hashlib.sha256().hexdigest(), _KIND), _KIND, anew=True)
    proof.judge()
