"""Files that come in: which blocks count, for whom, and what is left of them after a death."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay_router.operations.receiving import Block, Differs, Receiving, Staging, Taken
from overlay_router.operations.table import Stored, Table
from stageout.overlay.http.operations import BLOCK_BYTES
from stageout.overlay.rules.operations import Fields, Identity, Kind, Row
from tests.unit.test_overlay_destination import Crash, _dying

SIZE = 3 * BLOCK_BYTES + 5
FIELDS = Fields("0" * 32, 1, Kind.FILE, "f", "gw", 1_000, 2_000, size=SIZE)
ROW = Row(Identity("key:a", FIELDS.origin, FIELDS.seq), FIELDS)


class Place:
    """A table and its files, as after a start."""

    def __init__(self, home: Path) -> None:
        self.table = Table(home / "operations.sqlite")
        self.receiving = Receiving(self.table, home / "staging")

    def close(self) -> None:
        self.receiving.close()
        self.table.close()  # twice is harmless

    def stored(self) -> Stored:
        found = self.table.find(ROW.identity)
        if found is None:
            self.receiving.reserve(ROW.identity, SIZE)
            with self.table.changing("operation-row"):
                found = self.table.put(Stored(ROW, share="alice", size=SIZE))
        return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def place(home: Path) -> Iterator[Place]:
    found = Place(home)
    yield found
    found.close()


def block(number: int, letter: bytes = b"a") -> Block:
    return Block(number, letter * 16, letter.upper() * 32)


def bring(place: Place, one: Staging, *blocks: Block) -> None:
    for item in blocks:
        place.receiving.claim(one, "x", item.number, 1, [item.digest])
        place.receiving.received(one, "x", item.number, 1, [item])


def sync(place: Place, one: Staging) -> None:
    file, blocks = place.receiving.begin_sync(one)
    os.close(file)
    place.receiving.synced(one, blocks)


def test_blocks_count_after_a_start_when_they_were_synced(home: Path, place: Place) -> None:
    one = place.receiving.staging(place.stored())
    bring(place, one, block(0), block(2))
    sync(place, one)
    bring(place, one, block(1))
    assert place.receiving.have(place.stored()) == ((0, 0), (2, 2))
    place.close()
    again = Place(home)
    stored = again.stored()
    assert again.receiving.have(stored) == ((0, 0), (2, 2))
    found = again.receiving.staging(stored)
    assert (found.digest(2), found.digest(1)) == (b"a" * 16, bytes(16)) and not found.is_whole(SIZE)
    bring(again, found, block(1, b"b"), block(3))
    assert found.is_whole(SIZE) and not found.is_whole(SIZE + BLOCK_BYTES)
    again.close()


def test_a_file_that_has_ended_is_not_synced(place: Place) -> None:
    one = place.receiving.staging(place.stored())
    bring(place, one, block(0))
    place.receiving.end(place.stored())
    assert place.receiving.begin_sync(one) == (-1, [])


def test_the_first_digest_stays(place: Place) -> None:
    one = place.receiving.staging(place.stored())
    bring(place, one, block(0))
    assert place.receiving.claim(one, "y", 0, 2, [b"a" * 16, b"c" * 16]) == {0: b"a" * 16}
    with pytest.raises(Differs):
        place.receiving.claim(one, "y", 0, 1, [b"b" * 16])


def test_a_block_is_brought_by_one_connection(place: Place) -> None:
    one = place.receiving.staging(place.stored())
    place.receiving.claim(one, "x", 0, 1, [b"a" * 16])
    place.receiving.claim(one, "y", 0, 1, [b"a" * 16])  # the same bytes
    for digests in ([b"b" * 16], []):
        with pytest.raises(Taken):
            place.receiving.claim(one, "z", 0, 1, digests)
    place.receiving.release("y")
    place.receiving.claim(one, "z", 0, 1, [])


def test_the_list_decides(place: Place) -> None:
    one = place.receiving.staging(place.stored())
    bring(place, one, *map(block, range(4)))
    listed = b"A" * 64 + b"B" * 32 + b"A" * 32
    assert one.wrong(b"A" * 128) == [] and one.wrong(listed) == [2]
    place.receiving.claim(one, "x", 0, 1, [])
    place.receiving.clear(one, [2])
    assert not one.is_whole(SIZE)
    bring(place, one, block(2, b"b"))
    assert one.wrong(listed) == []


def test_shares_are_counted(home: Path, place: Place) -> None:
    stored = place.stored()
    assert place.table.share("alice") == (1, 0, 0, SIZE)
    place.close()
    again = Place(home)
    assert again.table.share("alice") == (1, 0, 0, SIZE)
    with again.table.changing("operation-forget"):
        again.table.drop(stored)
    assert again.table.share("alice") == (0, 0, 0, 0)
    again.close()


@pytest.mark.parametrize("label", ["operation-reserve", "operation-blocks", "operation-discard"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_each_step(home: Path, label: str, when: str) -> None:
    def live() -> None:
        place = Place(home)
        try:
            one = place.receiving.staging(place.stored())
            bring(place, one, *map(block, range(4)))
            sync(place, one)
            with place.table.changing("operation-end"):
                place.table.drop_blocks(one.at)
            place.receiving.end(place.stored())
        finally:
            place.close()

    with _dying(label, 1, when), pytest.raises(Crash):
        live()
    place = Place(home)
    stored = place.stored()
    assert place.receiving.have(stored) in ((), ((0, 3),))
    place.receiving.discard_strays(iter([stored.row.identity]))
    place.close()
    live()
    assert list((home / "staging").iterdir()) == []
