"""A router's own key, or token, that was renewed: every part that connects to others shows the new one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router import daemon
from overlay_router.copying import copier as copying
from overlay_router.custodians import forwarder, pack_carrier, pack_forwarder
from overlay_router.custodians.pack_turns import Lane
from overlay_router.delivery import lessee as leasing
from overlay_router.peers import circuits
from overlay_router.peers.keys import Credential, OwnCredential
from overlay_router.routing import neighbours as links
from stageout.core.clock import SystemClock
from stageout.core.config import mapping_settings
from stageout.core.errors import ErrorClass, StageoutError, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.wire.messages import Operation, Via
from tests.in_loop import in_loop

OLD, NEW = (
    Credential(("old", b"old-secret-of-this-router")),
    Credential(("new", b"new-secret-of-this-router"), "/new.ca"),
)
KEY = ("0a" * 16, 1)
NOBODY = cast(Any, None)


class _Stop(Exception):
    """A result that was looked at has been seen."""


@pytest.fixture
def own() -> OwnCredential:
    return OwnCredential(OLD)


def _shown(order: dict[str, Any]) -> Credential:
    return Credential((order["key_name"], bytes.fromhex(order["secret"])), order["ca"])


class _Process:
    """Takes orders, and does nothing."""

    def __init__(self) -> None:
        self.orders = list[dict[str, Any]]()

    def write(self, order: dict[str, Any]) -> None:
        self.orders.append(order)


@pytest.mark.parametrize(
    "named", ["STAGEOUT_ROUTER_NEIGHBOURS", "STAGEOUT_ROUTER_TERMINALS", "STAGEOUT_ROUTER_EGRESS_LEASES"]
)
def test_sighup_reads_the_own_key_again(tmp_path: Path, named: str, own: OwnCredential) -> None:
    keys, key, ca = tmp_path / "keys", tmp_path / "own.key", tmp_path / "ca"
    keys.write_text("site a-secret-that-is-long-enough /\n")
    keys.chmod(0o600)
    settings = mapping_settings(
        {"STAGEOUT_ROUTER_KEYS": str(keys), "STAGEOUT_ROUTER_KEY": str(key), named: "other.example.org:9621"}
    )
    router: Any = SimpleNamespace(have_neighbours=lambda them: setattr(router, "neighbours", them))
    router.have_keys = router.have_custody = lambda *told: None
    router.rights, router.neighbours = SimpleNamespace(become=lambda rights: None), circuits.Neighbours()
    it = in_loop(lambda: daemon.Daemon(lambda: settings))
    it._router, it._own = router, own
    key.write_text(f"new new-secret-of-this-router\nca {ca}\n")
    asyncio.run(it.reload())
    assert own.now == Credential(NEW.key, str(ca))
    key.write_text("half-a-line\n")
    with pytest.raises(StageoutError):
        asyncio.run(it.reload())
    assert own.now == Credential(NEW.key, str(ca)), "what cannot be used changes nothing"
    settings = mapping_settings({"STAGEOUT_ROUTER_KEYS": str(keys)})
    asyncio.run(it.reload())
    assert own.now == Credential(NEW.key, str(ca)), "what it still has must leave"


def test_who_connects_to_nobody_needs_no_key_of_its_own() -> None:
    assert daemon.credential_of(mapping_settings({"STAGEOUT_ROUTER_KEY": "/nowhere"})) == Credential()


def test_files_in_custody_are_delivered_with_it(own: OwnCredential) -> None:
    one = in_loop(lambda: forwarder.Forwarder(NOBODY, NOBODY, NOBODY, own, 1, SystemClock()))
    one._carrier = process = cast(Any, _Process())
    for own.now in (OLD, NEW):
        one._give(forwarder._Order(KEY, "f", "t:1", 1), Operation(*KEY, "publish", "f", 1))
    assert [_shown(order) for order in process.orders] == [OLD, NEW]


def test_packs_in_custody_are_delivered_with_it(own: OwnCredential) -> None:
    one = in_loop(lambda: pack_forwarder.PackForwarder(NOBODY, NOBODY, NOBODY, own, SystemClock()))
    one._carrier = process = cast(Any, _Process())
    given = pack_forwarder._Given(1, NOBODY, Lane("t:1", False))
    for own.now in (OLD, NEW):
        one._give(given, {"pack": "{}", "file": "f", "digest": "d"})
    assert [_shown(order) for order in process.orders] == [OLD, NEW]


def test_the_next_connection_for_packs_is_made_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that delivers them lives as long as the router."""
    seen, answers, losses = list[tuple[str, bytes]](), Queue[pack_carrier.Answer](), Queue[TransferFailure]()
    lost = pack_carrier.Way._lost

    def told(way: pack_carrier.Way, failure: TransferFailure) -> None:
        lost(way, failure)
        losses.put(failure)

    def refused(gateway: Gateway, **rest: object) -> None:
        seen.append((gateway.key_name, gateway.secret))
        raise TransferFailure(ErrorClass.CREDENTIAL_REFUSED, "no such key")

    monkeypatch.setattr(pack_carrier, "Channel", refused)
    monkeypatch.setattr(pack_carrier.Way, "_lost", told)
    monkeypatch.setattr(pack_carrier, "as_pack", lambda text: SimpleNamespace(origin=KEY[0], seq=1, paths=("f",)))
    gateways = [Gateway("t", 1, *one.key) for one in (OLD, NEW)]
    way = pack_carrier.Way(gateways[0], answers.put)
    for gateway in gateways:
        way.gateway = gateway
        way.take(pack_carrier.Order(1, "t:1", gateway.key_name, "", "{}", "f", "d", asks=True))
        assert answers.get(timeout=60).code == ErrorClass.CREDENTIAL_REFUSED.code
        losses.get(timeout=60)  # what is taken before that is lost, too
    assert seen == [OLD.key, NEW.key]


def test_files_are_copied_with_it_and_its_name_is_told(own: OwnCredential, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async def ways(terminal: str) -> Any:
            return ((),)

        async def ordered(order: copying.Order, *rest: object) -> dict[str, Any]:
            seen.append(Credential((order.key_name, bytes.fromhex(order.secret)), order.ca))
            return {}

        seen = list[Credential]()
        copies: Any = SimpleNamespace(cancelled={KEY}, is_late=lambda one: False)
        one = copying.Copier(copies, NOBODY, NOBODY, NOBODY, ways, own, 1)
        monkeypatch.setattr(one, "_run", ordered)
        copy = SimpleNamespace(terminal="t:1")
        commanded: Any = SimpleNamespace(key=KEY, reached=True, copy=copy, sender=f"k/{KEY[0]}")
        for own.now in (OLD, NEW):
            await one._carried_out(commanded, copying._Try())
            assert one.bearer == own.now.key[0]
        assert seen == [OLD, NEW]

    asyncio.run(run())


def test_leases_are_asked_for_with_it(own: OwnCredential, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Gateway] = []

    def channel(gateway: Gateway) -> None:
        seen.append(gateway)
        raise TransferFailure(ErrorClass.CONNECT_FAILED, "away")

    monkeypatch.setattr(leasing, "Channel", channel)
    lessee = daemon.lessee_of(mapping_settings({"STAGEOUT_ROUTER_EGRESS_LEASES": "r.example.org:9621"}), "me:1", own)
    assert lessee is not None
    for own.now in (OLD, NEW):
        with pytest.raises(leasing.NotLeased):
            lessee.ask(("u",), held=True)
    assert [Credential((one.key_name, one.secret), one.ca) for one in seen] == [OLD, NEW]


def test_neighbours_see_it(own: OwnCredential, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[object, ...]]()

    async def introduced(sock: socket.socket, node: str, *key: object) -> None:
        seen.append(key)
        raise _Stop

    async def dial(address: str) -> socket.socket:
        return socket.socket()

    async def run() -> None:
        book: Any = SimpleNamespace(address="me:1")
        around = links.Neighbourhood("me", book, own, 1.0, ())
        around.dial = dial
        allowed = circuits.Neighbours(frozenset({"r:1"}), own)
        for own.now in (OLD, NEW):
            for made in (
                around._dial("r:1"),
                around._probed("r:1", 1),
                circuits.onward("me", Via(("r:1", "t:1")), allowed, dial),
            ):
                with pytest.raises(_Stop):
                    await made

    for module in (links, circuits):
        monkeypatch.setattr(module, "introduce", introduced)
    asyncio.run(run())
    assert seen == [OLD.key] * 3 + [NEW.key] * 3


def test_a_neighbour_that_draws_out_its_greeting_is_given_up_and_tried_again(
    own: OwnCredential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then kept the line busy for hours, without a word in the log."""

    async def introduced(*facts: object) -> None:
        await asyncio.Event().wait()

    async def dial(address: str) -> socket.socket:
        return socket.socket()

    async def run() -> None:
        book: Any = SimpleNamespace(address="me:1")
        around = links.Neighbourhood("me", book, own, 1.0, ())
        around.dial = dial
        dialling = asyncio.ensure_future(around._dial("r:1"))
        await asyncio.wait([dialling], timeout=60)
        assert isinstance(dialling.exception(), asyncio.TimeoutError)

    monkeypatch.setattr(links, "introduce", introduced)
    monkeypatch.setattr(links, "_INTRODUCED_S", 0.01)
    asyncio.run(run())


def test_a_line_that_ends_waits_for_no_neighbour_that_reads_nothing(own: OwnCredential) -> None:
    """Its socket, and what was to be said, stayed as long as the neighbour liked."""

    async def run() -> None:
        book: Any = SimpleNamespace(address="me:1", forwardable=lambda now_s: [])
        around = links.Neighbourhood("me", book, own, 1.0, ())
        mine, far = socket.socketpair()
        with far:
            reader, writer = await asyncio.open_connection(sock=mine)
            writer.write(bytes(4 << 20))
            peer: Any = SimpleNamespace(checksum="crc32", node="r")
            far.shutdown(socket.SHUT_WR)
            await around._serve(links._Line("r:1", peer, writer, None), reader, None)
            await asyncio.wait_for(writer.wait_closed(), 20)
            assert mine.fileno() == -1

    asyncio.run(run())
