"""``stageout put`` and ``get`` through relays by CONNECT: one that is killed, one that is silent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool.waiting import wait_until
from tests.overlay.http_site import Site
from tests.overlay.https_commands import Commands, relayed

_MIB = 1 << 20


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, list[Site]]]:
    with relayed(tmp_path_factory.mktemp("relayed"), 2) as found:
        yield found


def _route(*relays: Site) -> str:
    return ",".join(f"localhost:{one.router.port}" for one in relays)


def test_get_by_one_relay_and_by_two_routes(sites: tuple[Site, list[Site]], tmp_path: Path) -> None:
    terminal, (one, other) = sites
    run = Commands(terminal, tmp_path)
    content = os.urandom(24 * _MIB + 1)
    (terminal.root / "f").write_bytes(content)
    for routes in (_route(one), f"{_route(one)}; {_route(other)}; direct"):
        (told,) = run("get", run.url("f"), str(tmp_path / "back"), "--routes", routes)
        assert (tmp_path / "back").read_bytes() == content
        assert next(route["by"] for route in told["routes"]) == [_route(one)]
    assert sum(route["sent_bytes"] for route in told["routes"]) == len(content)


def test_a_relay_that_refuses(sites: tuple[Site, list[Site]], tmp_path: Path) -> None:
    terminal, (one, _) = sites
    run = Commands(terminal, tmp_path, "bob")
    (terminal.root / "bob").mkdir(exist_ok=True)
    (terminal.root / "bob/f").write_bytes(b"data")
    (told,) = run("get", run.url("bob/f"), str(tmp_path / "back"), "--routes", _route(one), status=1)
    assert told["error_class"] == "CREDENTIAL_REFUSED" and "relay" in told["reason"]
    (told,) = run("get", run.url("bob/f"), str(tmp_path / "back"), "--routes", f"{_route(one)}; direct")
    assert (tmp_path / "back").read_bytes() == b"data"


def _moved_bytes(process: int) -> int:
    """Bytes that a process has read from sockets and files."""
    return int(Path(f"/proc/{process}/io").read_text().split()[1])


@pytest.mark.parametrize("fault", ["killed", "silent"])
@pytest.mark.parametrize("way", ["put", "get"])
def test_a_relay_that_is_lost_costs_two_percent(tmp_path: Path, way: str, fault: str) -> None:
    size = 256 * _MIB
    with relayed(tmp_path / "sites", 2) as (terminal, (one, other)):
        run = Commands(terminal, tmp_path)
        source, target = tmp_path / "f", terminal.root / "f"
        if way == "get":
            source, target = target, source
        with source.open("wb") as file:
            for _ in range(size // (8 * _MIB)):
                file.write(os.urandom(8 * _MIB))
        words = (str(source), run.url("f")) if way == "put" else (run.url("f"), str(target))
        process = run.begun(way, *words, "--routes", f"{_route(one)}; {_route(other)}", "--connections", "2")
        wait_until(lambda: _moved_bytes(process.pid) > size // 5, what="some of it", interval_s=0.01)
        pids = [other.router.pid, *other.router.workers()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        try:
            (told,) = run.ended(process)
        finally:
            for pid in pids if fault == "silent" else ():
                os.kill(pid, signal.SIGCONT)
        with source.open("rb") as first, target.open("rb") as second:
            assert all(first.read(_MIB) == second.read(_MIB) for _ in range(size // _MIB))
        sent = sum(route["sent_bytes"] for route in told["routes"])
        assert size <= sent <= size * 1.02
        assert told["seconds"] < 60
