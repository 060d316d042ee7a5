"""Requests of owners as text in the job's ad."""

from __future__ import annotations

import pytest

from stageout.wire.owner_requests import OwnerRequest, Verb, parse_request

_URL = "https://new/d/"


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("retry run=3", OwnerRequest(Verb.RETRY, 3)),
        ("retry", OwnerRequest(Verb.RETRY)),
        ("cancel run=2147483647", OwnerRequest(Verb.CANCEL, 2147483647)),
        (f"redirect run=3 r1 {_URL}", OwnerRequest(Verb.REDIRECT, 3, "r1", _URL)),
        (f"redirect run=3 r1 {_URL} a file", OwnerRequest(Verb.REDIRECT, 3, "r1", _URL, "a file")),
        # Requests of earlier versions name no run. An id of digits alone is none.
        (f"redirect r1 {_URL} a file", OwnerRequest(Verb.REDIRECT, 0, "r1", _URL, "a file")),
        (f"redirect 12345678 {_URL}", OwnerRequest(Verb.REDIRECT, 0, "12345678", _URL)),
    ],
)
def test_a_request_is_read_and_written(text: str, request_: OwnerRequest) -> None:
    assert parse_request(text) == request_
    assert str(request_) == text


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "fly", "fly run=1", "Retry", "retry run=1 more", "retry more", "retry 3", "retry run=0",
        "retry run=-1", "retry run=", "retry run=1x", "retry run=\u0661", "retry run=99999999999",
        "retry  run=1", "run=1",
    ],
)  # fmt: skip
def test_any_other_text_is_no_request(text: str) -> None:
    assert parse_request(text).verb is None


@pytest.mark.parametrize(
    ("text", "name"),
    [("retry run=3", "retry run=3"), ("retry", ""), (f"redirect run=3 r1 {_URL}", "r1"), ("redirect", ""), ("", "")],
)
def test_an_answer_names_its_request(text: str, name: str) -> None:
    assert parse_request(text).name == name
