"""Tokens of HTCondor at a real router: whose it takes, and until when."""

from __future__ import annotations

import json
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stageout.core.errors import StageoutError, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.wire import token
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Found, Get, Open, Opened, Stat, Via
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess

_POOL, _IDENTITY = "pool.example.org", "alice@pool.example.org"
_LASTS_S = 4


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    home = tmp_path_factory.mktemp("router")
    signing, keys = home / "overlay", home / "keys-of-tokens"
    signing.write_bytes(os.urandom(64))
    keys.write_text(f"token:*@{_POOL} {signing} / router\nsite not-secret-but-long-enough /\n")
    for path in (signing, keys):
        path.chmod(0o600)
    settings = {"STAGEOUT_ROUTER_KEYS": str(keys), "TRUST_DOMAIN": _POOL, "STAGEOUT_ROUTER_ADDRESS": "gw.example.org"}
    with RouterProcess(tmp_path_factory.mktemp("far")) as far:
        on = {"STAGEOUT_ROUTER_NEIGHBOURS": far.address, "STAGEOUT_ROUTER_KEY": str(far.key_file("hop"))}
        with RouterProcess(home, {**settings, **on}) as running:
            yield running


def holder(router: RouterProcess, **said: object) -> Gateway:
    """A gateway with a token that says so, signed by the key that the router trusts."""
    parts = ({"alg": "HS256", "kid": "overlay"}, {"sub": _IDENTITY, "iss": _POOL, "iat": int(time.time()), **said})
    text = ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    signature = token.secret(token.MARK + text, "overlay", (router.home / "overlay").read_bytes()).decode()
    return Gateway("127.0.0.1", router.port, *token.key_of(f"{text}.{signature}"), timeout_s=20)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"iss": "other.example.org"}, "is of the issuer 'other.example.org', and this router takes those of 'pool"),
        ({"iss": ""}, "is of the issuer ''"),
        ({"aud": "https://storage.example.org"}, "is for another service"),
        ({"aud": ["a", "b"]}, "is for another service"),
        ({"aud": []}, "is for another service"),
        ({"nbf": time.time() + 3600}, "is not valid yet"),
        ({"iat": time.time() + 3600}, "is not valid yet"),
        ({"nbf": "tomorrow"}, "is not valid yet"),
    ],
)
def test_tokens_of_others_are_refused(router: RouterProcess, said: dict[str, object], words: str) -> None:
    with pytest.raises(TransferFailure, match=words), Channel(holder(router, **said)) as channel:
        channel.send(Stat("f"))
        channel.receive()


@pytest.mark.parametrize(
    "said", [{}, {"aud": "gw.example.org"}, {"aud": ["x", "gw.example.org:9621"]}, {"nbf": time.time() - 5}]
)
def test_tokens_for_this_router_are_taken(router: RouterProcess, said: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x")
    put(holder(router, **said), tmp_path / "source", "f")
    assert (router.root / "f").read_bytes() == b"x"


def test_a_router_without_an_issuer_takes_no_lines_for_tokens(router: RouterProcess, tmp_path: Path) -> None:
    settings = {**router.environment, "TRUST_DOMAIN": ""}
    other = RouterProcess(tmp_path / "other", settings)
    with pytest.raises(StageoutError, match="TRUST_DOMAIN"), other:
        pass


def _control(router: RouterProcess, channel: Channel) -> None:
    channel.send(Stat("read"))
    channel.receive()


def _receive(router: RouterProcess, channel: Channel) -> None:
    with Channel(holder(router)) as control:
        control.send(Open(os.urandom(16).hex(), 1, "never", 2 * BLOCK_BYTES, BLOCK_BYTES, int(time.time()) + 60))
        opened = control.receive()
        assert isinstance(opened, Opened), opened
    channel.send(Attach(opened.tid))


def _get_twice(router: RouterProcess, channel: Channel) -> None:
    """The second time by a connection that the router knows already."""
    for _ in range(2):
        channel.send(Get("read"))
        assert isinstance(channel.receive(), Found)
        channel.receive_block(memoryview(bytearray(5)))


def _circuit(router: RouterProcess, channel: Channel) -> None:
    channel.send(Via((router.environment["STAGEOUT_ROUTER_NEIGHBOURS"],)))


@pytest.mark.parametrize("use", [_control, _receive, _get_twice, _circuit])
def test_a_connection_ends_with_its_token(router: RouterProcess, use: Callable[[RouterProcess, Channel], None]) -> None:
    """Those of the same identity with a token that lasts go on."""
    (router.root / "read").write_bytes(b"12345")
    ends = int(time.time()) + _LASTS_S
    with Channel(holder(router, exp=ends + 600)) as lasting, Channel(holder(router, exp=ends)) as short:
        for channel in (lasting, short):
            use(router, channel)
        wait_until(lambda: not short.is_open, what="its end", timeout_s=_LASTS_S + 30)
        assert ends <= time.time() < ends + 10
        assert lasting.is_open
    with pytest.raises(TransferFailure, match="has expired"), Channel(holder(router, exp=ends)) as late:
        late.send(Stat("read"))
        late.receive()
