"""Hosts and addresses as URLs and people have them."""

from __future__ import annotations

import pytest

from stageout.core.listening import in_url, name_of_pool


@pytest.mark.parametrize(
    ("host", "shown"),
    [("h.example", "h.example"), ("10.0.0.1", "10.0.0.1"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("", "")],
)
def test_an_ipv6_address_has_brackets_in_a_url(host: str, shown: str) -> None:
    assert in_url(host) == shown


@pytest.mark.parametrize(
    ("collectors", "name"),
    [
        ("cm.example", "cm.example"),
        ("cm.example:9618", "cm.example"),
        ("cm.example:9618?sock=collector, cm2.example", "cm.example"),
        ("[2001:db8::1]:9618", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("", ""),
    ],
)
def test_a_pool_has_the_name_of_its_first_collector(collectors: str, name: str) -> None:
    assert name_of_pool(collectors) == name
