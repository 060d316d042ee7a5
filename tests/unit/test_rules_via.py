"""Chains of routers in paths: read, bounded, without circles, and checked before anything is stored."""

from __future__ import annotations

import pytest

from stageout.overlay.rules import via
from stageout.overlay.rules.operations import Malformed
from stageout.overlay.rules.rights import NoRight

KNOWN = frozenset({"a", "B", "archive", "c", "d"})


@pytest.mark.parametrize(
    ("path", "hops", "rest"),
    [
        ("/alice/f", (), "/alice/f"), ("/", (), "/"), ("/.viaduct/T/f", (), "/.viaduct/T/f"),
        ("/.via/T/alice/f", ("t",), "/alice/f"), ("/.VIA/T/alice/%2Evia/T", ("t",), "/alice/%2Evia/T"),
        ("/%2Evia/gw2/.via/archive/a%20b", ("gw2", "archive"), "/a%20b"), ("/.via/T", ("t",), "/"),
        ("/.via/T/", ("t",), "/"), ("/.via/gw:9617/.stageout/v1/o/1", ("gw:9617",), "/.stageout/v1/o/1"),
        ("/.via/a//f", ("a",), "//f"),
    ],
)  # fmt: skip
def test_the_path_names_the_chain(path: str, hops: tuple[str, ...], rest: str) -> None:
    assert via.split(path) == (hops, rest)
    assert via.split(via.joined(hops, rest)) == (hops, rest)


@pytest.mark.parametrize(
    "path",
    ["/.via", "/.via/", "/.via//f", "/.via/a%2Fb/f", "/.via/a%00/f", "/.via/a b", "/.via/T/.via"],
)
def test_a_chain_without_a_name(path: str) -> None:
    with pytest.raises(Malformed):
        via.split(path)


@pytest.mark.parametrize(
    "path",
    [
        "/.via/a/.via/b/.via/a/f", "/.via/a/.via/A/f", "/.via/gw/f", "/.via/a/.via/GW/f",
        "/.via/a/.via/b/.via/c/.via/d/.via/archive/f",
    ],
)  # fmt: skip
def test_circles_and_long_chains_are_malformed(path: str) -> None:
    with pytest.raises(Malformed):
        via.check_hops(via.split(path)[0], "Gw", KNOWN)


def test_the_next_router_is_one_of_the_list() -> None:
    via.check_hops((), "gw", ())
    via.check_hops(("A", "b", "elsewhere", "archive"), "gw", KNOWN)
    with pytest.raises(NoRight, match="elsewhere"):
        via.check_hops(("elsewhere", "a"), "gw", KNOWN)
