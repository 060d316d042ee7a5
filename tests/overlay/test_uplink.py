"""A router that is told what its uplink carries: no more leaves, by whatever way, and one sees who has what of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.cli.main import main
from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import read_key
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, relay

_MB_S = 3.0
_BYTES = 3_000_000
#: The least time that these take by it: what may be made up for, and a piece, are less than the rest.
_LEAST_S = 0.9


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RouterProcess, RouterProcess]]:
    """A terminal without a limit, and a relay in front of it with one."""
    home = tmp_path_factory.mktemp("uplink")
    with RouterProcess(home / "end") as end:
        middle = relay(home / "relay", [end])
        middle.environment["STAGEOUT_ROUTER_UPLINK_MB_S"] = str(_MB_S)
        with middle:
            yield end, middle


def _gateway(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=60)


def _shown(router: RouterProcess, key: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["routes", router.address, "--json", "--key", str(router.key_file(key))]) == 0
    return dict(json.loads(capsys.readouterr().out)["uplink"])


def test_a_relay_sends_no_more_than_its_uplink_carries_and_says_who_sends(
    routers: tuple[RouterProcess, RouterProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end, middle = routers
    source, took_s = tmp_path / "source", list[float]()
    seen: dict[str, Any] = {}
    source.write_bytes(bytes(_BYTES))

    def send() -> None:
        started_s = time.monotonic()
        put(_gateway(end), source, "f", routes=((middle.address,),), priority=3)
        took_s.append(time.monotonic() - started_s)

    sending = threading.Thread(target=send)
    sending.start()

    def sharers() -> dict[str, Any]:
        seen.update(_shown(middle, "site", capsys))
        return seen if seen["sharers"] or not sending.is_alive() else {}

    wait_until(sharers, timeout_s=60, what="somebody to send")
    hidden = _shown(middle, "small", capsys)
    sending.join(60)
    assert took_s[0] > _LEAST_S
    assert seen["rate_bytes_s"] == hidden["rate_bytes_s"] == _MB_S * 1e6
    assert seen["sharers"][0]["priority"] == 3
    assert seen["sharers"][0]["to"] == end.address
    assert hidden["sharers"] == []
    started_s = time.monotonic()
    get(_gateway(end), "f", tmp_path / "back", routes=((middle.address,),))
    assert time.monotonic() - started_s > _LEAST_S
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert _shown(end, "site", capsys)["rate_bytes_s"] == 0
