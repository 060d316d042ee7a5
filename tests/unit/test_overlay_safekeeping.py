"""Which custodians are asked, again and instead of others, until enough of them have a file."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import safekeeping


def _search(monkeypatch: pytest.MonkeyPatch, copies: int, answers: dict[str, list[Any]], until_s: float = 60.0) -> Any:
    """Ended; ``asked`` says how often each custodian was. Of the answers of one the last is repeated."""
    monkeypatch.setattr(safekeeping, "_FIRST_PAUSE_S", 0.001)
    asked: Counter[str] = Counter()

    def give(custodian: Any, place: int) -> Any:
        server = custodian.gateway.server
        answer = answers[server][min(asked[server], len(answers[server]) - 1)]
        asked[server] += 1
        assert asked[server] < 10
        if isinstance(answer, BaseException):
            raise answer
        return SimpleNamespace(router=answer)

    custodians: list[Any] = [SimpleNamespace(gateway=SimpleNamespace(server=server)) for server in answers]
    candidates = [safekeeping._Candidate(custodian) for custodian in custodians]
    search = safekeeping._Search(candidates, copies, time.monotonic() + until_s, give)
    search.run()
    return SimpleNamespace(asked=asked, kept=sorted(one.router for one in search.kept), problems=search.problems)


def _fails(kind: ErrorClass) -> TransferFailure:
    return TransferFailure(kind, "planned")


def test_who_is_busy_is_asked_again_and_who_refuses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, no = _fails(ErrorClass.SERVER_BUSY), _fails(ErrorClass.PERMISSION_DENIED)
    found = _search(monkeypatch, 2, {"a": [busy, busy, "A"], "b": [no], "c": ["C"]})
    assert found.kept == ["A", "C"]
    assert found.asked == {"a": 3, "b": 1, "c": 1}
    assert found.problems["b"] is no


def test_nobody_is_asked_again_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _search(monkeypatch, 1, {"a": [_fails(ErrorClass.SERVER_BUSY)]}, until_s=-1.0)
    assert (found.kept, found.asked) == ([], {"a": 1})


def test_two_addresses_of_one_router_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _search(monkeypatch, 2, {"a": ["R"], "again": ["R"]})
    assert found.kept == ["R"]
    assert len(found.problems) == 1


def test_a_fault_of_ones_own_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        _search(monkeypatch, 1, {"a": [ZeroDivisionError()]})
