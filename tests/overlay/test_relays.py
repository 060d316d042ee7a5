"""Circuits through real relays: whole files there and back, refusals that name the hop, never an open proxy."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overlay_router.data import splice
from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import many
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Put, put
from stageout.overlay.fetch import get
from stageout.overlay.kept import kept
from stageout.overlay.key_file import read_key
from stageout.overlay.sending import Sending
from stageout.overlay.way import Way
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Message, Open, Result, Status, Via
from stageout.overlay.wire.route import Route
from tests.harness.router import RouterProcess, relay
from tests.overlay.between import Between
from tests.polling import wait_for

BOTH = {splice._splice_of_libc, splice.splice}


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("terminal")) as running:
        yield running


@pytest.fixture(scope="module")
def inner(tmp_path_factory: pytest.TempPathFactory, terminal: RouterProcess) -> Iterator[RouterProcess]:
    with relay(tmp_path_factory.mktemp("inner"), [terminal, "127.0.0.1:1"]) as running:
        yield running


@pytest.fixture(scope="module")
def outer(tmp_path_factory: pytest.TempPathFactory, inner: RouterProcess) -> Iterator[RouterProcess]:
    with relay(tmp_path_factory.mktemp("outer"), [inner]) as running:
        yield running


@pytest.fixture
def gateway(terminal: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", terminal.port, *read_key(terminal.key_file("site")), timeout_s=60)


def _answers(gateway: Gateway, route: Route) -> bool:
    """Whether the terminal at the end of a route says that an operation came too late."""
    origin = os.urandom(16).hex()
    with Channel(gateway, route) as channel:
        channel.send(Open(origin, 1, "f", 10, BLOCK_BYTES, 1))
        answer = channel.receive()
    return answer == Result(origin, 1, "expired")


def test_messages_pass_relays(outer: RouterProcess, inner: RouterProcess, gateway: Gateway) -> None:
    for route in ((), (inner.address,), (outer.address, inner.address)):
        assert _answers(gateway, route)


def test_a_tree_comes_back_through_relays_small_files_many_at_once(
    outer: RouterProcess, inner: RouterProcess, terminal: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"a/{number % 7}/f{number}": os.urandom(number % 900) for number in range(600)}
    files |= {f"b/large{number}": os.urandom(65_530 + 5 * number) for number in range(4)}
    for name, data in files.items():
        (terminal.root / "many" / name).parent.mkdir(parents=True, exist_ok=True)
        (terminal.root / "many" / name).write_bytes(data)
    single: list[str] = []

    def by_itself(gateway: Gateway, path: str, local: Path, **more: Any) -> int:
        single.append(path)
        return get(gateway, path, local, **more)

    monkeypatch.setattr(many, "get", by_itself)
    key = ["--key", str(terminal.key_file("site")), "--routes", f"{outer.address},{inner.address}"]
    back = tmp_path / "back"
    assert main(["get", "-r", f"overlay://{terminal.address}/many", str(back), *key]) == 0
    found = {str(path.relative_to(back)): path.read_bytes() for path in back.rglob("*") if path.is_file()}
    assert found == files
    assert sorted(single) == ["many/b/large2", "many/b/large3"], "larger than 64 KiB"


def _refused(gateway: Gateway, route: Route, kind: ErrorClass, *words: str) -> None:
    with pytest.raises(TransferFailure) as caught:
        Channel(gateway, route)
    assert caught.value.kind is kind, caught.value
    for word in words:
        assert word in caught.value.message


def test_a_hop_that_is_not_there_is_worth_another_try(
    outer: RouterProcess, inner: RouterProcess, gateway: Gateway
) -> None:
    nobody = dataclasses.replace(gateway, port=1)
    words = ("cannot reach 127.0.0.1:1", "refused", "is a router running there")
    _refused(nobody, (inner.address,), ErrorClass.CONNECT_FAILED, *words)
    _refused(nobody, (outer.address, inner.address), ErrorClass.CONNECT_FAILED, *words)


def test_only_neighbours_are_connected_to(outer: RouterProcess, inner: RouterProcess, gateway: Gateway) -> None:
    words = ("does not pass anything on to", "STAGEOUT_ROUTER_NEIGHBOURS")
    _refused(gateway, (outer.address,), ErrorClass.PERMISSION_DENIED, gateway.server, *words)
    _refused(gateway, (inner.address, outer.address), ErrorClass.PERMISSION_DENIED, outer.address, *words)


def test_a_relay_keeps_no_files(inner: RouterProcess, gateway: Gateway) -> None:
    origin = "0a" * 16
    with Channel(dataclasses.replace(gateway, port=inner.port)) as channel:
        channel.send(Status(origin, 1))
        with pytest.raises(TransferFailure, match="is a relay and keeps no files") as caught:
            channel.receive()
    assert caught.value.kind is ErrorClass.PERMISSION_DENIED


def test_each_end_of_a_circuit_proves_its_own_key(inner: RouterProcess, gateway: Gateway) -> None:
    """A peer that passed a relay counts at the terminal only by the key that it proves there: here one that may name no
    path."""
    hop = dataclasses.replace(gateway, key_name="hop")
    with pytest.raises(TransferFailure, match="the key 'hop' is not for 'f'"):
        get(hop, "f", Path("unused"))
    unknown = dataclasses.replace(gateway, key_name="stranger")
    _refused(unknown, (inner.address,), ErrorClass.PERMISSION_DENIED, "no key of the name 'stranger'")


def test_relays_whose_keys_differ_say_whose(tmp_path: Path, terminal: RouterProcess, gateway: Gateway) -> None:
    with relay(tmp_path, [terminal]) as other:
        (tmp_path / "hop.key").write_text("hop another-secret-than-the-neighbour-has\n")
        os.kill(other.pid, signal.SIGHUP)
        _until(lambda: "configuration-reloaded" in other.log)
        words = (terminal.address, "does not have the key 'hop'", "administrator")
        _refused(gateway, (other.address,), ErrorClass.PERMISSION_DENIED, *words)
        (tmp_path / "hop.key").write_text("nobody another-secret-than-the-neighbour-has\n")
        os.kill(other.pid, signal.SIGHUP)
        _until(lambda: other.log.count("configuration-reloaded") == 2)
        words = (f"{terminal.address} refuses", "no key of the name 'nobody'")
        _refused(gateway, (other.address,), ErrorClass.PERMISSION_DENIED, *words)


def _until(condition: Callable[[], bool]) -> None:
    from tests.harness.pool.waiting import wait_until

    wait_until(condition, what="the router to say so")


@pytest.mark.parametrize(
    ("route", "words"),
    [(("a:1", "a:1"), "passes each router once"), (tuple(f"a:{n}" for n in range(1, 9)), "at most 7 relays")],
)
def test_routes_that_cannot_be(gateway: Gateway, route: Route, words: str) -> None:
    _refused(gateway, route, ErrorClass.BAD_REQUEST, words)


SIZE = 3 * BLOCK_BYTES + 7


@pytest.fixture
def way(outer: RouterProcess, inner: RouterProcess) -> Iterator[tuple[Between, Route]]:
    """A route by two relays, whose first link is watched; nothing of an earlier test is kept."""
    kept().close()
    with Between(outer.port) as between:
        yield between, (f"127.0.0.1:{between.port}", inner.address)
    kept().close()


def _put(gateway: Gateway, route: Route, folder: Path, name: str) -> Put:
    (folder / name).write_bytes(os.urandom(SIZE))
    return put(gateway, folder / name, name, routes=[route])


def _are_there(terminal: RouterProcess, folder: Path, names: Iterable[str]) -> bool:
    return all((terminal.root / name).read_bytes() == (folder / name).read_bytes() for name in names)


def _left_all(step: Callable[[], object], connections: int) -> None:
    """Repeat it until it leaves all of its connections: a file does not wait for one that is just coming back."""

    def left() -> bool:
        kept().close()
        step()
        return len(kept()) == connections

    wait_for(left, "connections that are left to the next file")


def test_files_one_after_the_other_go_by_one_circuit(
    tmp_path: Path,
    way: tuple[Between, Route],
    terminal: RouterProcess,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    between, route = way
    monkeypatch.setattr(kept(), "_idle_s", 60.0)  # a busy machine may take long from one file to the next
    monkeypatch.setattr("stageout.overlay.way._TRIAL_S", 60.0)
    names = ["k0", "k1"]
    for name in names:
        (tmp_path / name).write_bytes(os.urandom(SIZE))

    def send(name: str) -> None:
        put(gateway, tmp_path / name, name, routes=[route], connections=1)

    def fetch(name: str) -> None:
        get(gateway, name, tmp_path / f"back-{name}", routes=[route], priority=2, deadline=1 << 40)
        assert (tmp_path / f"back-{name}").read_bytes() == (tmp_path / name).read_bytes()

    for step, connections in ((send, 2), (fetch, 1)):
        _left_all(lambda step=step: step("k0"), connections)  # type: ignore[misc]
        before = between.connections
        step("k1")
        assert between.connections == before, "it makes none"
        assert _are_there(terminal, tmp_path, ["k0"])
    assert _are_there(terminal, tmp_path, names)


def test_a_file_on_a_circuit_of_before_is_one_flow_to_the_relays(
    tmp_path: Path, way: tuple[Between, Route], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that it adds were another flow, and had a part of the link of their own."""
    asked: list[str] = []

    def via(route: Route, flow: str, *more: Any) -> Via:
        asked.append(flow)
        return Via(route, flow, *more)

    monkeypatch.setattr("stageout.overlay.channel.Via", via)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(8 * BLOCK_BYTES))
    while not len(kept()):  # a file that does not wait for one that is just coming back leaves none
        put(gateway, source, "flow", routes=[way[1]], connections=1)
    before, made = asked[-1], len(asked)
    put(gateway, source, "flow", routes=[way[1]], connections=3)
    assert set(asked[made:]) == {before}


def test_one_that_came_just_after_the_end_of_its_file_is_not_kept(
    tmp_path: Path, way: tuple[Between, Route], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router has refused it, and the next file would find that out by its first block."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 * BLOCK_BYTES))
    send, hear, has_more = Channel.send, Sending.hear, Channel.has_more

    def left() -> list[Channel]:
        """Connections for blocks that a file leaves, whose second one came behind its end."""
        kept().close()
        is_done, came, behind = threading.Event(), list[Channel](), list[Channel]()

        def late(channel: Channel, message: Message) -> None:
            if isinstance(message, Attach):
                came.append(channel)
                if len(came) > 1:
                    assert is_done.wait(60)
                    behind.append(channel)
            send(channel, message)

        def hears(channel: Channel, within_s: float) -> bool:
            """A late connection does not know yet that it was refused."""
            return channel not in behind and has_more(channel, within_s)

        def held(sending: Sending, of: Way, message: Message) -> None:
            if isinstance(message, Result):
                is_done.set()
                wait_for(lambda: len(of._channels - of._busy) == 2)
            hear(sending, of, message)

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", late)
            patch.setattr(Sending, "hear", held)
            patch.setattr(Channel, "has_more", hears)
            put(gateway, source, "late", routes=[way[1]], connections=2)
        found = [channel for _, circuit in kept()._circuits for channel in circuit.carriers]
        assert behind
        assert not set(behind).intersection(found)
        return found

    # A file waits for none that is just coming back: then it leaves neither of the two.
    assert len(wait_for(left, "a connection that is left to the next file")) == 1
    assert put(gateway, source, "next", routes=[way[1]], connections=2).size_bytes == 2 * BLOCK_BYTES


def test_circuits_that_ended_while_nobody_used_them_cost_nothing(
    tmp_path: Path, way: tuple[Between, Route], terminal: RouterProcess, gateway: Gateway
) -> None:
    between, route = way
    for name in ("c0", "c1"):
        assert _put(gateway, route, tmp_path, name).size_bytes == SIZE
        get(gateway, name, tmp_path / "back", routes=[route])
        between.cut()
    assert _are_there(terminal, tmp_path, ["c0", "c1"])


def test_a_relay_that_was_killed_meanwhile(tmp_path: Path, terminal: RouterProcess, gateway: Gateway) -> None:
    kept().close()
    with relay(tmp_path / "relay", [terminal]) as between:
        route = (between.address,)
        _put(gateway, route, tmp_path, "d0")
        get(gateway, "d0", tmp_path / "back", routes=[route])
        between.kill()
        between.start()
        assert _put(gateway, route, tmp_path, "d1").size_bytes == SIZE
        get(gateway, "d1", tmp_path / "back", routes=[route])
    assert _are_there(terminal, tmp_path, ["d0", "d1"])


@pytest.fixture(params=sorted(BOTH, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def spliced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, ...]]:
    """Both outer ends of a circuit that this process splices, and the thread that does."""
    monkeypatch.setattr(splice, "splice", request.param)
    ends: list[socket.socket] = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            ends.append(socket.create_connection(listening.getsockname(), 20))
            ends.append(listening.accept()[0])
    yield tuple(ends)
    for end in ends:
        end.close()


def _running(ends: tuple[socket.socket, ...], idle_s: float = 60.0) -> threading.Thread:
    thread = threading.Thread(target=splice.Circuit(ends[1], ends[3], idle_s).run, daemon=True)
    thread.start()
    return thread


def test_bytes_and_ends_pass_one_direction_after_the_other(spliced: tuple[socket.socket, ...]) -> None:
    near, far = spliced[0], spliced[2]
    thread = _running(spliced)
    data = os.urandom(3_000_000)
    sender = threading.Thread(target=lambda: (near.sendall(data), near.shutdown(socket.SHUT_WR)))
    sender.start()
    got = b"".join(iter(lambda: far.recv(1 << 20), b""))
    sender.join()
    assert got == data
    far.sendall(data[:1000])  # the other direction goes on
    far.shutdown(socket.SHUT_WR)
    assert b"".join(iter(lambda: near.recv(1 << 20), b"")) == data[:1000]
    thread.join(20)
    assert not thread.is_alive()


def test_what_comes_behind_a_pause_is_passed_on_at_once(
    spliced: tuple[socket.socket, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are gathered leave too, and then a single byte: nobody waits for more to come."""
    monkeypatch.setattr(splice, "_LOOK_S", 3600)  # else whoever waits for more would look again
    near, far = spliced[0], spliced[2]
    thread = _running(spliced, idle_s=3600)
    for size_bytes in (2000, 1, 50_000, 1, 200_000, 1):
        near.sendall(bytes(size_bytes))
        got = 0
        while got < size_bytes:
            got += len(far.recv(1 << 20))
        assert got == size_bytes
    near.close()
    far.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_reader_that_stops_holds_its_sender_up(spliced: tuple[socket.socket, ...]) -> None:
    """The bytes under way stay within the sockets' buffers and a pipe: nothing is heaped up in the relay."""
    near, far = spliced[0], spliced[2]
    for end in spliced:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    thread = _running(spliced)
    near.settimeout(1)
    sent = 0
    with pytest.raises(socket.timeout):
        while sent < 64 << 20:
            sent += near.send(bytes(65536))
    assert sent < 4 << 20
    far.close()
    near.close()
    thread.join(20)
    assert not thread.is_alive()


def test_silence_ends_a_circuit(spliced: tuple[socket.socket, ...]) -> None:
    thread = _running(spliced, idle_s=0.3)
    assert spliced[0].recv(1) == b""
    assert spliced[2].recv(1) == b""
    thread.join(20)
    assert not thread.is_alive()
