"""A put that finds the number of its connections, and one with a priority, to a real router."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.sending import report
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.messages import Low
from tests.harness.router import RouterProcess

MIB = 1 << 20
_BLOCK_S = 0.1
_SEND_PART = Channel.send_part


def test_connections_are_added_while_a_file_is_sent(tmp_path: Path, router: RouterProcess, gateway: Gateway) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"stage-out" * (48 * MIB // 9))

    def slow(sent_bytes: int) -> None:
        time.sleep(_BLOCK_S)  # each connection for itself, so more of them are better

    done = put(gateway, source, "f", connections=2, most_connections=16, progress=slow, priority=3)
    assert (router.root / "f").read_bytes() == source.read_bytes()
    (share,) = done.shares
    assert 1 <= share.connections <= 16
    assert f"{share.connections} connections ({share.reason})" in report(done.shares)


def test_the_end_of_a_file_goes_in_parts_over_all_connections(
    tmp_path: Path, router: RouterProcess, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sent = tmp_path / "source", list[int]()
    source.write_bytes(os.urandom(6 * MIB + 5))

    def send_part(channel: Channel, tid: int, start: int, data: memoryview) -> None:
        sent.append(start)
        _SEND_PART(channel, tid, start, data)

    monkeypatch.setattr(Channel, "prompt_bytes", PART_BYTES)  # as on a slow link
    monkeypatch.setattr(Channel, "send_part", send_part)
    done = put(gateway, source, "parts", connections=4)
    assert (router.root / "parts").read_bytes() == source.read_bytes()
    assert sent and min(sent) >= MIB and done.sent_bytes == 6 * MIB + 5


def test_a_congestion_control_that_is_not_there_costs_nothing(router: RouterProcess) -> None:
    key = router.key_file("site").read_text().split()
    strange = Gateway("127.0.0.1", router.port, key[0], key[1].encode(), congestion="none-such")
    with Channel(strange) as channel:
        channel.send(Low("0" * 32, 0))
        assert channel.acked_bytes > 0
