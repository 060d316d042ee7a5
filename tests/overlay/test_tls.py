"""TLS around the overlay's connections: to the end of a route, whatever relays are on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import gateway_of, read_key
from stageout.overlay.wire.messages import BLOCK_BYTES, Low
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for, relay
from tests.overlay.between import Between


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(made / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(made / "cert.pem"))
    trustme.CA().cert_pem.write_to_path(str(made / "other.pem"))
    return made


@pytest.fixture(scope="module")
def router(home: Path) -> Iterator[RouterProcess]:
    settings = {"STAGEOUT_ROUTER_CERT": str(home / "cert.pem"), "STAGEOUT_ROUTER_TLS_ONLY": "true"}
    with RouterProcess(home / "router", settings) as running:
        yield running


@pytest.fixture
def gateway(home: Path, router: RouterProcess) -> Gateway:
    key = home / "tls.key"
    key.write_text(router.key_file("site").read_text() + f"ca {home / 'ca.pem'}\n")
    return gateway_of("127.0.0.1", router.port, key, timeout_s=20)


def _source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"secret bytes " * (3 * BLOCK_BYTES // 13))
    return path


def test_files_go_there_and_back_through_a_relay_that_sees_nothing(
    gateway: Gateway, router: RouterProcess, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    with Between(router.port) as ear, relay(tmp_path / "relay", [f"127.0.0.1:{ear.port}"]) as between:
        end = dataclasses.replace(gateway, port=ear.port)
        put(end, source, "f", routes=[(between.address,)], connections=2)
        assert len(ear.heard) > source.stat().st_size, "it went this way"
        assert b"secret bytes" not in ear.heard
    assert (router.root / "f").read_bytes() == source.read_bytes()
    get(gateway, "f", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_what_the_next_hop_has_got_is_known_in_tls_too(gateway: Gateway) -> None:
    with Channel(gateway) as channel:
        channel.send(Low("0" * 32, 0))
        assert channel.acked_bytes > 0


def _refused(gateway: Gateway, source: Path, kind: ErrorClass, words: str) -> None:
    with pytest.raises(TransferFailure, match=words) as caught:
        put(gateway, source, "g", routes=[()])
    assert caught.value.kind is kind


def test_who_does_not_fit_is_told_why(gateway: Gateway, home: Path, router: RouterProcess, tmp_path: Path) -> None:
    source = _source(tmp_path)
    _refused(dataclasses.replace(gateway, ca=""), source, ErrorClass.PERMISSION_DENIED, "over TLS only")
    _refused(dataclasses.replace(gateway, ca=str(home / "other.pem")), source, ErrorClass.TLS_UNTRUSTED, "not one of")
    _refused(dataclasses.replace(gateway, ca="none.pem"), source, ErrorClass.CREDENTIAL_MISSING, "none.pem")
    _refused(dataclasses.replace(gateway, host="localhost"), source, ErrorClass.TLS_UNTRUSTED, "not one of")
    assert not (router.root / "g").exists()


def test_a_custodian_reaches_its_terminal_with_tls(
    gateway: Gateway, home: Path, router: RouterProcess, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    custodian = custodian_for(tmp_path / "custodian", [router], {"STAGEOUT_ROUTER_KEY": str(home / "tls.key")})
    with custodian:
        put(dataclasses.replace(gateway, port=custodian.port, ca=""), source, "h", terminal=router.address)
    assert (router.root / "h").read_bytes() == source.read_bytes()


def test_a_router_without_a_certificate_says_so(gateway: Gateway, tmp_path: Path) -> None:
    with RouterProcess(tmp_path / "plain") as plain:
        there = dataclasses.replace(gateway, port=plain.port)
        _refused(there, _source(tmp_path), ErrorClass.PERMISSION_DENIED, "has no certificate")


@pytest.fixture(scope="module")
def open_router(home: Path) -> Iterator[RouterProcess]:
    """It has a certificate, and takes files without TLS, too."""
    with RouterProcess(home / "open", {"STAGEOUT_ROUTER_CERT": str(home / "cert.pem")}) as running:
        yield running


def _trusting(home: Path, relay_home: Path, port: int, ca: str = "ca.pem") -> RouterProcess:
    """A relay to that port whose key file names a CA."""
    made = relay(relay_home, [f"127.0.0.1:{port}"])
    key = home / f"{relay_home.name}.key"
    made.environment.update(STAGEOUT_ROUTER_KEY=str(key), STAGEOUT_ROUTER_INTERVAL="0.3")
    key.write_text(f"hop not-secret-but-long-enough\nca {home / ca}\n")
    key.chmod(0o600)
    return made


def test_lines_between_routers_carry_nothing_plain(home: Path, open_router: RouterProcess, tmp_path: Path) -> None:
    """Their own words and what they pass on for senders without TLS; with TLS to the end one layer is enough."""
    source = _source(tmp_path)
    plainly = Gateway("127.0.0.1", open_router.port, *read_key(open_router.key_file("site")), timeout_s=20)
    with Between(open_router.port) as ear, _trusting(home, tmp_path / "trusting", ear.port) as between:
        wait_until(
            lambda: " link-measured " in between.log and len(ear.heard) > 2000, what="the neighbours to know each other"
        )
        end = dataclasses.replace(plainly, port=ear.port)
        put(end, source, "f", routes=[(between.address,)])
        assert len(ear.heard) > source.stat().st_size, "it went this way"
        for plain in (b"secret bytes", b"nonce", b"route", b"incarnation", b"manifest"):
            assert plain not in ear.heard, plain
        put(dataclasses.replace(end, ca=str(home / "ca.pem")), source, "g", routes=[(between.address,)])
        assert b"secret bytes" not in ear.heard
    for name in ("f", "g"):
        assert (open_router.root / name).read_bytes() == source.read_bytes()


def test_a_neighbour_with_another_certificate_is_named(
    home: Path, open_router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    plainly = Gateway("127.0.0.1", open_router.port, *read_key(open_router.key_file("site")), timeout_s=20)
    with _trusting(home, tmp_path / "wary", open_router.port, "other.pem") as between:
        with pytest.raises(TransferFailure, match=r"its certificate is not one of .*other.pem"):
            put(plainly, _source(tmp_path), "no", routes=[(between.address,)])
        wait_until(lambda: "neighbour-connect-failed" in between.log, what="the line to be refused")
    assert not (open_router.root / "no").exists()


def test_a_router_that_insists_wants_tls_from_the_sender_itself(
    home: Path, router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    with _trusting(home, tmp_path / "hop", router.port) as between:
        with pytest.raises(TransferFailure, match="over TLS only"):
            put(dataclasses.replace(gateway, ca=""), _source(tmp_path), "no", routes=[(between.address,)])
        put(gateway, _source(tmp_path), "yes", routes=[(between.address,)])
    assert [(router.root / name).exists() for name in ("no", "yes")] == [False, True]


def test_routers_are_not_excepted(home: Path, router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    """Custodians and other routers must use TLS, too, where a router demands it."""
    carrier = dataclasses.replace(gateway, ca="", key_name="carrier")
    _refused(carrier, _source(tmp_path), ErrorClass.PERMISSION_DENIED, "write 'ca FILE' into the file of STAGEOUT_ROUT")
    plainly = relay(tmp_path / "plainly", [f"127.0.0.1:{router.port}"])
    plainly.environment.update(STAGEOUT_ROUTER_INTERVAL="0.3")
    with plainly:
        wait_until(lambda: "over TLS only" in plainly.log, what="the line to be refused", describe=lambda: plainly.log)
        put(gateway, _source(tmp_path), "inside", routes=[(plainly.address,)])
    assert (router.root / "inside").exists(), "a circuit whose sender covers it goes on"
