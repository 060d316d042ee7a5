"""The narrow destination: its rate holds for all connections together, and files appear only when whole."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.harness.narrow_destination import NarrowDestination
from tests.polling import wait_for

MB = 1_000_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NarrowDestination]:
    with NarrowDestination(tmp_path / "store", rate_mb_s=5) as running:
        yield running


def test_two_uploads_share_the_rate_fairly(server: NarrowDestination) -> None:
    def put(name: str) -> None:
        assert requests.put(f"{server.url}/{name}", data=bytes(5 * MB), timeout=60).status_code == 201

    start = time.monotonic()
    threads = [threading.Thread(target=put, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - start
    assert took > 1.9, "10 MB at 5 MB/s"
    first, second = server.transfers()
    assert second.end_s - first.end_s < 0.3 * took, "each got half of the rate; one after the other, half of the time"
    assert first.size_bytes == second.size_bytes == 5 * MB
    assert server.most_uploads_at_once() == 2


def test_the_rate_changes_in_the_middle_of_a_transfer(server: NarrowDestination) -> None:
    server.set_rate(0.1)
    start = time.monotonic()
    thread = threading.Thread(target=lambda: requests.put(f"{server.url}/a", data=bytes(5 * MB), timeout=60))
    thread.start()
    wait_for(lambda: list(server.root.glob(".*.part")), "the body at the server")
    server.set_rate(0)
    thread.join()
    assert time.monotonic() - start < 30, "50 s at the first rate"
    assert server.most_uploads_at_once() == 1


def test_size_etag_and_content_can_be_asked_for(server: NarrowDestination) -> None:
    requests.put(f"{server.url}/x", data=b"old", timeout=60)
    stored = requests.put(f"{server.url}/x", data=b"hello", timeout=60)
    head = requests.head(f"{server.url}/x", timeout=60)
    assert head.headers["Content-Length"] == "5"
    assert head.headers["ETag"] == stored.headers["ETag"]
    assert requests.get(f"{server.url}/x", timeout=60).content == b"hello"
    assert requests.put(f"{server.url}/new/place/x", data=b"hello", timeout=60).status_code == 201
    assert (server.root / "new/place/x").read_bytes() == b"hello"


def test_half_a_file_is_never_seen(server: NarrowDestination) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("PUT", "/half")
    connection.putheader("Content-Length", str(MB))
    connection.endheaders(bytes(MB // 2))
    wait_for(lambda: list(server.root.glob(".*.part")), "the body at the server")
    assert requests.head(f"{server.url}/half", timeout=60).status_code == 404
    connection.close()
    wait_for(lambda: not list(server.root.iterdir()), "the broken upload to leave nothing")
    assert server.transfers() == []


def test_it_comes_back_on_the_same_port(server: NarrowDestination) -> None:
    before = server.url
    server.close()
    with pytest.raises(requests.ConnectionError):
        requests.head(f"{before}/x", timeout=60)
    server.start()
    assert server.url == before
    assert requests.put(f"{before}/x", data=b"again", timeout=60).status_code == 201
