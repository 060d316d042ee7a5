"""The relays by which routers are asked for a file on its way, and for how long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import finding, searching
from stageout.overlay.channel import Gateway
from stageout.overlay.routes import Network
from stageout.overlay.searching import MOST_FURTHER, Place, Said, named, paths, search
from stageout.overlay.wire.fields import KnownRow
from stageout.overlay.wire.messages import Answer
from stageout.overlay.wire.route import MAX_HOPS, Route

END = Gateway("end", 1, "key", b"secret")


def links(*pairs: str) -> list[KnownRow]:
    return [(f"{pair[0]}:1", f"{pair[1]}:1", 1, 1, 0) for pair in pairs]


def test_shortest_ways_come_first_and_circles_end() -> None:
    found = list(paths("a:1", links("ab", "bc", "ca", "ad", "dc", "ce", "fg")))
    assert found == [
        ("a:1", "b:1"), ("a:1", "d:1"), ("a:1", "b:1", "c:1"), ("a:1", "b:1", "c:1", "e:1")
    ]  # fmt: skip
    assert list(paths("g:1", links("fg"))) == []


def test_a_chain_that_is_longer_than_any_route_is_not_followed() -> None:
    known: list[KnownRow] = [(f"r{number}:1", f"r{number + 1}:1", 1, 1, 0) for number in range(8192)]
    found = list(paths("r0:1", [*known, ("r8192:1", "r0:1", 1, 1, 0)]))
    assert [len(path) for path in found] == list(range(2, MAX_HOPS + 2))


def test_a_router_that_names_a_chain_without_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    chain: list[KnownRow] = [("a:1", "r0:1", 1, 1, 0)]
    chain += [(f"r{number}:1", f"r{number + 1}:1", 1, 1, 0) for number in range(100)]
    mesh = Mesh(monkeypatch, [], chain)
    said = mesh.search(("a:1",))
    assert (len(said.nothing), len(said.problems)) == (MAX_HOPS, 1)
    assert max(len(route) for _, route in mesh.asked) == MAX_HOPS - 1
    assert "a:1 knows routers behind more than 7 relays" in str(said)


def test_routers_on_a_way_are_asked_directly_or_by_those_before_them() -> None:
    one, two, three = named(END, [("a:1", "b:2"), ("c:3", "a:1")])
    assert [(place.gateway.server, place.routes) for place in (one, two, three)] == [
        ("a:1", ((),)), ("b:2", ((), ("a:1",))), ("c:3", ((),))
    ]  # fmt: skip


class Mesh:
    """The files and the knowledge of routers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has: Sequence[str], known: list[KnownRow]) -> None:
        self._has, self._known = has, known
        self.asked: list[tuple[str, Route]] = []
        self.calls_itself = ""
        self.broken: set[tuple[str, Route]] = set()
        self.hung = threading.Event()
        monkeypatch.setattr(searching, "ask_links", self.links)

    def links(self, gateway: Gateway, route: Route = ()) -> Network:
        return Network(self.calls_itself or gateway.server, self._known)

    def ask(self, gateway: Gateway, route: Route) -> str | None:
        self.asked.append((gateway.server, route))
        if gateway.host == "h":
            self.hung.wait(60)
        if (gateway.server, route) in self.broken:
            raise TransferFailure(ErrorClass.CONNECT_FAILED, f"{gateway.server} refused")
        return gateway.server if gateway.server in self._has else None

    def search(self, *ways: Route, by_end: bool = False, within_s: float = 60) -> Said[str]:
        return search(END, named(END, ways), self.ask, guide=Place(END) if by_end else None, within_s=within_s)


def test_what_lies_behind_is_asked_by_the_one_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(monkeypatch, ["c:1"], links("ab", "bc", "ax", "xe"))
    mesh.broken = {("b:1", ("a:1",)), ("b:1", ())}
    said = mesh.search(("a:1",))
    assert (said.found, said.problems, sorted(said.nothing)) == (["c:1"], ["b:1 refused"], ["a:1", "e:1", "x:1"])
    assert ("c:1", ("a:1", "b:1")) in mesh.asked
    assert [route for server, route in mesh.asked if server == "b:1"] == [("a:1",), ()], (
        "directly when not by the relay"
    )
    assert "nothing of it at " in str(said)
    assert "; b:1 refused" in str(said)


def test_a_router_may_call_itself_otherwise_than_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(monkeypatch, [], links("ab"))
    mesh.calls_itself = "a:1"
    mesh.search(("127.0.0.1:9",))
    assert mesh.asked[1:] == [("b:1", ("127.0.0.1:9",))]


def test_who_has_it_is_not_asked_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(monkeypatch, ["a:1"], links("ab"))
    assert mesh.search(("a:1",)).found == ["a:1"]
    assert mesh.asked == [("a:1", ())]


def test_a_destination_that_is_there_says_only_who_its_neighbours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(monkeypatch, [], [("end:1", "a:1", 1, 1, 0), ("a:1", "end:1", 1, 1, 0)])
    said = mesh.search(by_end=True)
    assert (mesh.asked, said.nothing) == ([("a:1", ("end:1",))], ["a:1"])
    assert str(Mesh(monkeypatch, [], []).search(by_end=True)) == ""


def test_a_router_that_writes_its_name_in_other_letters_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [("a:1", "END:1", 1, 1, 0), ("a:1", "A:01", 1, 1, 0), ("a:1", "B:1", 1, 1, 0), ("b:1", "b:01", 1, 1, 0)]
    mesh = Mesh(monkeypatch, [], known)
    said = mesh.search(("a:1",), by_end=True)
    assert (sorted(said.nothing), said.problems) == (["a:1", "b:1"], [])


def test_not_everybody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [("a:1", f"r{number}:1", 1, 1, 0) for number in range(200)]
    mesh = Mesh(monkeypatch, [], many)
    assert len(mesh.search(("a:1",)).nothing) == 1 + MOST_FURTHER


def test_who_is_silent_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(monkeypatch, [], [])
    try:
        said = mesh.search(("h:1",), within_s=0.01)
    finally:
        mesh.hung.set()
    assert said.problems == ["h:1 has not answered in time"]


@pytest.mark.parametrize("answer", [Answer(), Answer(("f",), ("file",), (1,), (0o644,), (2**53,))])
def test_an_answer_that_is_none_of_one_file_is_a_problem_of_that_router(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the search ended with it, or nobody could be told of what was found."""
    said = SimpleNamespace(send=lambda message: None, receive=lambda: answer)
    monkeypatch.setattr(finding, "Channel", lambda gateway, route: contextlib.nullcontext(said))
    with pytest.raises(TransferFailure, match="not of one file"):
        finding.find(END, "end:1", "f")
