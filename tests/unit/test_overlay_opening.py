"""A file at a router as Python's own, without a router: what its reader does when the bytes do not come."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import opening
from stageout.overlay.channel import Gateway
from stageout.overlay.opening import open_file

DATA = b"0123456789"


class _Session:
    """Of a router with one file."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def stat(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(kind="file", size_bytes=len(DATA), generation=3)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How each request ends: positive, it breaks behind so many bytes; negative, it ends there as if that were all."""
    wanted, closed = list[int](), list[int]()

    def read(gateway: Gateway, path: str, offset: int, **_: Any) -> Iterator[bytes]:
        end = wanted.pop(0) if wanted else -len(DATA)
        try:
            for at in range(offset, abs(end)):
                yield DATA[at : at + 1]
            if end > 0:
                raise TransferFailure(ErrorClass.CONNECTION_LOST, "reset")
        finally:
            closed.append(end)

    monkeypatch.setattr(opening, "Session", _Session)
    monkeypatch.setattr(opening, "read", read)
    wanted.extend([4, -4])
    return closed


def test_a_file_that_breaks_off_is_never_taken_for_a_shorter_one(ends: list[int]) -> None:
    with open_file(Gateway("host", 1, "key", b"secret"), "f") as file:
        for _ in range(3):
            with pytest.raises(TransferFailure, match="reset"):
                file.read()
        file.seek(0)
        with pytest.raises(TransferFailure, match="ended before its 10 bytes"):
            file.read()
        file.seek(2)
        assert file.read() == DATA[2:]


def test_a_file_that_is_closed_early_lets_go_of_its_connection(ends: list[int]) -> None:
    file = open_file(Gateway("host", 1, "key", b"secret"), "f")
    assert file.read(1) == DATA[:1]
    assert not ends
    file.close()
    assert ends


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'rb', or with 'wb'"):
        open_file(Gateway("192.0.2.1", 1, "key", b""), "f", cast(Any, "w"))
