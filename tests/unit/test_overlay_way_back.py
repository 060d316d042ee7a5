"""The questions to the connections of a get, and when there are more of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stageout.overlay import way_back
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.receiving import Download, Receiving
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES, Found

GATEWAY = Gateway("host", 1, "key", b"secret", timeout_s=2.0)


def _of_nobody(blocks: int, tmp_path: Path) -> Receiving:
    """A file that nobody was asked for yet."""
    with (tmp_path / "file").open("w+b") as file:
        return Receiving(
            Download(GATEWAY, "f"), Found(blocks * BLOCK_BYTES, BLOCK_BYTES, 7, 0o644), file.fileno(), print
        )


def _carriers(way: way_back.WayBack, count: int, pace: float) -> list[way_back.Carrier]:
    channel = cast(Channel, SimpleNamespace(received_bytes=0, arrived_bytes=0, parts=True))
    for number in range(count):
        way.carriers[number] = way_back.Carrier(number, number, channel, 1)
        way.carriers[number].pace = pace
    return list(way.carriers.values())


def test_a_very_long_way_does_not_stand_still_as_no_part_is_worth_a_question(tmp_path: Path) -> None:
    done = _of_nobody(12, tmp_path)
    (way,) = done.ways
    way.trip_s = 1.0
    carriers = _carriers(way, 4, pace=8e6)
    for carrier in carriers:
        assert done.take(way, carrier) is not None
    assert done.plan.left > len(carriers)
    assert done.take(way, carriers[0]) is not None, "a block takes an eighth of a second, a question a second"


def test_connections_come_back_for_parts_of_lost_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = _of_nobody(2, tmp_path)
    (way,) = done.ways
    begun = list[int]()
    monkeypatch.setattr(way, "_start", begun.append)
    monkeypatch.setattr(way, "sockets", SimpleNamespace(now=8))
    while done.plan.take_part(99, PART_BYTES) is not None:
        pass
    _carriers(way, 1, pace=8e6)
    way.man()
    assert not begun, "all of it is under way"
    done.plan.lost(99)
    way.man()
    assert begun == [0, 1]


def test_what_lay_behind_a_lost_packet_is_no_rate() -> None:
    channel = cast(Channel, SimpleNamespace(received_bytes=0, arrived_bytes=0))
    carrier = way_back.Carrier(0, 0, channel, 4)
    carrier.is_busy = True
    for _ in range(20):
        channel.received_bytes += BLOCK_BYTES // 20
        carrier.look(0.05)
    for _ in range(3):
        carrier.measured(BLOCK_BYTES, 0.001)
    assert carrier.rate > 100e6
    assert carrier.most_blocks == 1
