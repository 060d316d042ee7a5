"""Several routers: links appear at all of them, a killed one goes, and comes back with a new incarnation."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.key_file import read_key
from stageout.overlay.routes import found_routes
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Known, Open, Opened, Routed, Routes
from stageout.wire.address import split_address
from tests.harness.pool.waiting import wait_until
from tests.harness.router_graph import RouterGraph

#: s is where clients ask, t the terminal; t knows nobody.
_EDGES = {"s": ("a", "b"), "a": ("t",), "b": ("t",)}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterGraph]:
    with RouterGraph(tmp_path_factory.mktemp("graph"), _EDGES, interval_s=0.3) as running:
        yield running


def gateway(graph: RouterGraph, name: str) -> Gateway:
    key = read_key(graph.routers[name].key_file("site"))
    return Gateway(*split_address(graph.addresses[name]), *key, timeout_s=20)


def links(graph: RouterGraph, name: str) -> set[tuple[str, str]]:
    """Measured links that a router knows of, by names."""
    with Channel(gateway(graph, name)) as channel:
        channel.send(Routes())
        answer = channel.receive()
    assert isinstance(answer, Known)
    names = {address: name for name, address in graph.addresses.items()}
    return {(names[a], names[b]) for a, b, rate, rtt, _ in answer.links if rate and rtt}


def routed(graph: RouterGraph, name: str, terminal: str) -> Routed:
    with Channel(gateway(graph, name)) as channel:
        channel.send(Routes(graph.addresses[terminal]))
        answer = channel.receive()
    assert isinstance(answer, Routed)
    return answer


def routes(graph: RouterGraph, name: str, terminal: str) -> set[str]:
    names = {address: name for name, address in graph.addresses.items()}
    return {"".join(names[hop] for hop in route) for route in routed(graph, name, terminal).routes}


def test_links_appear_everywhere_a_killed_router_goes_and_returns(graph: RouterGraph) -> None:
    everything = {("s", "a"), ("s", "b"), ("a", "t"), ("b", "t")}
    for name in "stab":
        wait_until(lambda name=name: links(graph, name) == everything, timeout_s=60, what=f"all links at {name}")
    wait_until(lambda: routes(graph, "s", "t") == {"at", "bt"}, timeout_s=60, what="both routes")
    graph.routers["a"].kill()
    wait_until(lambda: routes(graph, "s", "t") == {"bt"}, timeout_s=60, what="the dead router's route to go")
    assert "is down" in routed(graph, "s", "t").reason
    left = {("s", "b"), ("b", "t")}
    wait_until(lambda: links(graph, "t") == left, timeout_s=60, what="the dead router to age out")
    graph.routers["a"].start()
    wait_until(lambda: links(graph, "t") == everything, timeout_s=60, what="its links to be back")
    answer = routed(graph, "s", "t")
    assert len(answer.routes) + len(answer.others) == 2
    assert len(answer.reasons) == 2


def test_each_interval_leaves_a_record_of_each_link(graph: RouterGraph) -> None:
    router = graph.routers["b"]
    wait_until(lambda: router.log.count(" link-measured to=" + graph.addresses["t"]) >= 3, timeout_s=60, what="records")
    line = [line for line in router.log.splitlines() if " link-measured to=" in line][-1]
    fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
    assert float(fields["rate_mb_s"]) > 0
    assert float(fields["rtt_ms"]) > 0
    assert fields["source"] == "probe"


def test_what_a_relay_passes_on_is_counted(graph: RouterGraph) -> None:
    relay, end = graph.routers["b"], gateway(graph, "t")
    block, blocks = bytes(BLOCK_BYTES), itertools.cycle(range(8))
    with Channel(end) as control, Channel(end, (graph.addresses["b"],)) as data:
        control.send(Open("0a" * 16, 1, "counted", 8 * BLOCK_BYTES, BLOCK_BYTES, int(time.time()) + 600))
        opened = control.receive()
        assert isinstance(opened, Opened)
        data.send(Attach(opened.tid))

        def counted() -> bool:
            data.send_block(opened.tid, next(blocks), block)
            return any(
                f" link-measured to={end.server}" in line and "moved_bytes=0" not in line
                for line in relay.log.splitlines()
            )

        wait_until(counted, timeout_s=60, what="bytes of a transfer in a record", interval_s=0.05)


def test_where_no_link_leads_nothing_is_promised(graph: RouterGraph) -> None:
    assert routed(graph, "s", "s").routes == ((),)
    assert routed(graph, "t", "s").routes == ()
    assert "no router that" in routed(graph, "t", "s").reason


def test_the_command_shows_links_and_routes(graph: RouterGraph, capsys: pytest.CaptureFixture[str]) -> None:
    wait_until(lambda: len(links(graph, "s")) == 4, timeout_s=60, what="all links")
    address, key = graph.addresses, str(graph.routers["s"].key_file("site"))
    assert main(["routes", address["s"], "--key", key]) == 0
    text = capsys.readouterr().out
    assert f"Links known to {address['s']}" in text
    assert [line for line in text.splitlines() if line.split()[:2] == [address["t"], "yes"]]
    assert main(["routes", address["s"], address["b"], "--json", "--key", key]) == 0
    (route,) = json.loads(capsys.readouterr().out)["routes"]
    assert (route["to"], route["used"], route["by"]) == (address["b"], True, [])
    assert main(["routes", "127.0.0.1:1", "--key", key]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert main(["routes", "no address", "--key", key]) == 64


def test_a_sender_that_knows_no_routes_asks(
    graph: RouterGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: routes(graph, "s", "t"), timeout_s=60, what="a route")
    end, asked = gateway(graph, "t"), graph.addresses["s"]
    found = found_routes([asked], end)
    assert {route[0] for route in found} == {asked}
    assert {route[1] for route in found} <= {graph.addresses["a"], graph.addresses["b"]}
    source, key = tmp_path / "source", str(graph.routers["t"].key_file("site"))
    source.write_bytes(b"x" * (3 * BLOCK_BYTES))
    url = f"overlay://{end.server}/asked"
    assert main(["put", "--key", key, "--routes", f"ask {asked}", str(source), url]) == 0
    assert (graph.routers["t"].root / "asked").read_bytes() == source.read_bytes()
    with pytest.raises(TransferFailure, match=r"no route to .* is known: no router that") as caught:
        found_routes([end.server], gateway(graph, "s"))
    assert caught.value.kind is ErrorClass.CONNECT_FAILED
    assert main(["put", "--key", key, "--routes", "ask", str(source), url]) == 1
    assert "ask HOST" in capsys.readouterr().err
