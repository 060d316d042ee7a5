"""``stageout put`` and ``get`` through relays by CONNECT: one that is killed, one that is silent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.overlay.http_site import Site
from tests.overlay.https_commands import Commands, relayed

_MIB = 1 << 20
_CONTENT = os.urandom(1024) * 1024


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
