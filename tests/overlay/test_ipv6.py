"""Routers that are reached by IPv6, and by both kinds of addresses at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stageout.cli.main import main
from stageout.core.errors import TransferFailure
from stageout.core.signing import load_or_make_key
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.key_file import read_key
from stageout.overlay.wire.messages import Stat
from stageout.overlay.wire.route import written
from tests.harness.router import RouterProcess, relay

_HERE = "::1"


def _has_ipv6() -> bool:
    try:
        with socket.create_server((_HERE, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")


def address_of(router: RouterProcess) -> str:
    return written(_HERE, router.port)


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RouterProcess, RouterProcess, RouterProcess]]:
    """A terminal, a custodian for it and a relay to it, with IPv6 alone."""
    homes = [tmp_path_factory.mktemp(name) for name in ("terminal", "custodian", "relay")]
    issuer = load_or_make_key("capability-key", homes[0] / "issuer.key")
    (homes[0] / "issuers").write_text(f"vo {issuer.public} /vo\n")
    here = {"STAGEOUT_ROUTER_HOST": _HERE, "STAGEOUT_ROUTER_ISSUERS": str(homes[0] / "issuers")}
    with ExitStack() as stack:
        terminal = RouterProcess(homes[0], {**here, "STAGEOUT_ROUTER_ADDRESS": "[0:0::1]:9621"})
        stack.enter_context(terminal)
        through = {
            "STAGEOUT_ROUTER_TERMINALS": address_of(terminal),
            "STAGEOUT_ROUTER_KEY": str(homes[1] / "carrier.key"),
        }
        custodian = stack.enter_context(RouterProcess(homes[1], {**here, **through}))
        yield terminal, custodian, stack.enter_context(relay(homes[2], [address_of(terminal)], host=_HERE))


def test_commands_and_custodians_and_relays_by_ipv6(
    routers: tuple[RouterProcess, RouterProcess, RouterProcess],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal, custodian, hop = routers
    source, key = tmp_path / "source", str(terminal.key_file("site"))
    source.write_bytes(b"by IPv6")
    url = f"overlay://{address_of(terminal)}"
    assert main(["put", "--key", key, str(source), f"{url}/direct"]) == 0
    through, route = ["--through", address_of(custodian)], ["--routes", address_of(hop)]
    assert main(["put", "--key", key, *through, str(source), f"{url}/custody"]) == 0
    assert main(["put", "--key", str(terminal.key_file("carrier")), *route, str(source), f"{url}/routed"]) == 0
    capsys.readouterr()
    assert main(["ls", "--key", key, f"{url}/"]) == 0
    assert capsys.readouterr().out.split() == ["custody", "direct", "routed"]
    assert main(["get", "--key", key, f"{url}/routed", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back").read_bytes() == b"by IPv6"


def test_a_capability_names_a_router_by_ipv6(
    routers: tuple[RouterProcess, RouterProcess, RouterProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, key = routers[0], tmp_path / "alice.key"
    made = ["capability", str(terminal.home / "issuer.key"), "--prefix", "/vo", "--terminal", "[::1]"]
    assert main(made) == 0
    key.write_text(terminal.key_file("hop").read_text() + capsys.readouterr().out)
    (tmp_path / "source").write_bytes(b"signed")
    url = f"overlay://{address_of(terminal)}/vo/f"
    assert main(["put", "--key", str(key), str(tmp_path / "source"), url]) == 0
    assert (terminal.root / "vo/f").read_bytes() == b"signed"


def test_a_router_listens_on_both_kinds_of_addresses(tmp_path: Path) -> None:
    """Without a setting. A peer by IPv4 is known by its plain address."""
    (tmp_path / "source").write_bytes(b"x")
    with RouterProcess(tmp_path / "both", {"STAGEOUT_ROUTER_HOST": ""}) as router:
        key = read_key(router.key_file("site"))
        for name, host in (("four", "127.0.0.1"), ("six", _HERE)):
            put(Gateway(host, router.port, *key, timeout_s=20), tmp_path / "source", name)
            assert (router.root / name).read_bytes() == b"x"
            wrong = Gateway(host, router.port, "nobody", b"s" * 16, timeout_s=20)
            with pytest.raises(TransferFailure, match="no key of the name"), Channel(wrong) as channel:
                channel.send(Stat("f"))
                channel.receive()
            assert f"peer-refused peer={host} " in router.log
        assert "ffff" not in router.log


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_address_of_ipv4_is_for_ipv4_alone(tmp_path: Path, host: str) -> None:
    with RouterProcess(tmp_path / "one", {"STAGEOUT_ROUTER_HOST": host}) as router:
        key = read_key(router.key_file("site"))
        with pytest.raises(TransferFailure, match="Connection refused"):
            Channel(Gateway(_HERE, router.port, *key, timeout_s=20))
