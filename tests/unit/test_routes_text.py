"""Routes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageout.overlay.wire.route import BadRoute, address, addresses, parse_routes, shown, written


def test_routes_are_read_in_order() -> None:
    assert parse_routes("gw1 ; GW2:9000, gw3:1; direct") == (("gw1:9621",), ("gw2:9000", "gw3:1"), ())
    assert parse_routes("") == ((),)
    assert parse_routes(" ; ") == ((),)
    assert addresses("a, b:7  [::1]:8 [fe80::2]") == ("a:9621", "b:7", "[::1]:8", "[fe80::2]:9621")
    assert shown(("a:1", "b:2")) == "a:1,b:2"


@given(st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,9}[a-z0-9])?", fullmatch=True) | st.just("fe80::1"), st.integers(1, 65535))
def test_an_address_comes_back(host: str, port: int) -> None:
    assert address(written(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text", ["", ":1", "a:", "a:0", "a:65536", "a:b", "a/b:1", "a b", "::1", "[]:1", "a@b:1", "[a"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadRoute, match="write"):
        address(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a,a", "once"), ("a;b;a:9621", "twice"), (",".join(f"a{n}" for n in range(8)), "at most 7"), ("a,b:x", "HOST")],
)
def test_routes_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadRoute, match=words):
        parse_routes(text)
