"""When a file need not be transferred: only when it is the same, or was changed before the other one was made."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import sameness
from stageout.overlay.channel import Gateway
from stageout.overlay.sameness import MARGIN_S, compared, is_same
from stageout.wire import frames
from stageout.wire.overlay import BLOCK_BYTES, Answer, Stat

_NOW = 1_800_000_000
_GATEWAY = Gateway("h", 1, "k", b"s")
_KIND = next(iter(frames.digests()))


def _there(size_bytes: int, modified: int, mode: int = 0o644, **more: object) -> Answer:
    return Answer(("f",), ("file",), (size_bytes,), (mode,), (modified,), **more)  # type: ignore[arg-type]


def _here(size_bytes: int, modified: float, changed: float = 0.0) -> os.stat_result:
    times = (modified, modified, changed or modified)
    return os.stat_result(
        (0o100644, 1, 1, 1, 0, 0, size_bytes, *map(int, times), *times, *(int(t * 1e9) for t in times))
    )


@pytest.mark.parametrize(
    ("here", "there", "ahead_s", "same"),
    [
        (_here(3, _NOW), _there(3, _NOW + MARGIN_S), 0, True),
        (_here(3, _NOW), _there(3, _NOW + MARGIN_S - 1), 0, False),
        (_here(3, _NOW), _there(3, _NOW + MARGIN_S + 99), 100, False),
        (_here(3, _NOW), _there(3, _NOW + MARGIN_S - 100), -100, True),
        (_here(3, _NOW - 100, _NOW), _there(3, _NOW), 0, False),
        (_here(4, _NOW), _there(3, _NOW + 100), 0, False),
        (_here(3, _NOW), _there(3, _NOW + 100, 0o755), 0, False),
        (_here(3, _NOW), _there(3, _NOW + 100, note="as it was delivered"), 0, False),
        (_here(3, _NOW), Answer(("f",), ("directory",), (3,), (0o644,), (_NOW + 100,)), 0, False),
        (_here(3, _NOW), Answer(code=ErrorClass.NOT_FOUND.code), 0, False),
    ],
)
def test_without_digests_what_is_to_go_there_is_older(
    here: os.stat_result, there: Answer, ahead_s: int, same: bool
) -> None:
    assert is_same(Path("f"), here, there, ahead_s, is_put=True) is same


def test_without_digests_what_has_come_from_there_is_newer() -> None:
    for here_s, ahead_s, same in ((MARGIN_S, 0, True), (MARGIN_S - 1, 0, False), (0, MARGIN_S, True)):
        assert is_same(Path("f"), _here(3, _NOW + here_s), _there(3, _NOW, 0o755), ahead_s, is_put=False) is same


@pytest.mark.parametrize("size_bytes", [0, 5, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_with_digests_times_say_nothing(tmp_path: Path, size_bytes: int) -> None:
    local, data = tmp_path / "f", os.urandom(size_bytes)
    local.write_bytes(data)
    local.chmod(0o644)
    blocks = (data[start : start + BLOCK_BYTES] for start in range(0, size_bytes, BLOCK_BYTES))
    manifest = hashlib.sha256(b"".join(map(frames.digests()[_KIND], blocks))).hexdigest()
    for modified in (0, 1 << 40):
        for said, same in ((manifest, True), ("0" * 64, False)):
            there = _there(size_bytes, modified, manifest=said, digest=_KIND)
            for is_put in (True, False):
                assert is_same(local, local.stat(), there, 0, is_put) is same
    there = _there(size_bytes, 1 << 40, manifest="0" * 64, digest="of the future")
    assert is_same(local, local.stat(), there, 0, is_put=True), "as if nothing were known"


def test_names_are_asked_for_together_and_again_when_the_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [TransferFailure(ErrorClass.CONNECTION_LOST, "lost")]
    made, asked = [], list[str]()

    class Channel:
        ahead_s = 0

        def __init__(self, *arguments: object) -> None:
            made.append(self)
            self._waiting: list[str] = []

        def send(self, ask: Stat) -> None:
            self._waiting.append(ask.path)

        def receive(self) -> Answer:
            if len(asked) == 70 and lost:
                raise lost.pop()
            asked.append(self._waiting.pop(0))
            return _there(1, 1 << 40, 0o600) if asked[-1][-1] in "02468" else Answer(code=ErrorClass.NOT_FOUND.code)

        def close(self) -> None:
            pass

    monkeypatch.setattr(sameness, "Channel", Channel)
    monkeypatch.setattr(sameness.time, "sleep", lambda seconds: None)
    for number in range(200):
        (tmp_path / f"{number:03}").write_text("x")
        (tmp_path / f"{number:03}").chmod(0o600)
    (tmp_path / "100").unlink()
    (tmp_path / "100").symlink_to("102")
    found = compared(_GATEWAY, ((n, tmp_path / f"{n:03}", f"{n:03}") for n in range(201)), is_put=True)
    assert list(found) == [(n, n % 2 == 0 and n not in (100, 200)) for n in range(201)]
    assert len(made) == 2 and "100" not in asked
