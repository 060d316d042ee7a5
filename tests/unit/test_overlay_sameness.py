"""When a file need not be transferred: only when it is the same, or was changed before the other one was made."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import asking, sameness
from stageout.overlay.asking import Asking
from stageout.overlay.channel import Gateway
from stageout.overlay.sameness import MARGIN_S, Pair, compared, is_same
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES, Answer, List, Stat
from stageout.overlay.wire.packs import MAX_FILE_BYTES

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


class _Router:
    """A router that has files, each of one byte. :ivar asked: questions that it has answered."""

    def __init__(self, paths: Iterable[str], page: int = 1000) -> None:
        self._paths, self._page = list(paths), page
        self.asked: list[tuple[type, str]] = []

    def answers(self, question: Stat | List) -> Iterator[Answer]:
        self.asked.append((type(question), question.path))
        if isinstance(question, Stat):
            is_there = question.path in self._paths
            yield _there(1, 1 << 40, 0o600) if is_there else Answer(code=ErrorClass.NOT_FOUND.code)
            return
        names = [path.rpartition("/")[2] for path in self._paths if path.rpartition("/")[0] == question.path]
        for start in range(0, max(1, len(names)), self._page):
            some = names[start : start + self._page]
            rows = ("file", 1, 0o600, 1 << 40)
            yield Answer(tuple(some), *((one,) * len(some) for one in rows), more=start + self._page < len(names))  # type: ignore[arg-type]


class _Channel:
    """A connection to it. :ivar most: questions that had no answer at the same time."""

    ahead_s, most, made = 0, 0, 0
    router: _Router
    lost_behind: ClassVar[list[int]] = []

    def __init__(self, *arguments: object) -> None:
        self._waiting: deque[Stat | List] = deque()
        self._pages: Iterator[Answer] = iter(())
        type(self).made += 1
        self._sent: dict[bytes, Stat | List] = {}

    def encoded(self, question: Stat | List) -> bytes:
        frame = f"{type(question).__name__} {question.path}".encode()
        self._sent[frame] = question
        return frame

    def send_frames(self, encoded: list[bytes]) -> None:
        self._waiting.extend(self._sent.pop(frame) for frame in encoded)
        type(self).most = max(self.most, len(self._waiting))

    def receive(self) -> Answer:
        if self.lost_behind and len(self.router.asked) == self.lost_behind[0]:
            self.lost_behind.pop()
            raise TransferFailure(ErrorClass.CONNECTION_LOST, "lost")
        page = next(self._pages, None)
        if page is None:
            self._pages = self.router.answers(self._waiting.popleft())
            page = next(self._pages)
        return page

    def close(self) -> None:
        pass


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Channel]]:
    fresh = type("Channel", (_Channel,), {"lost_behind": []})
    monkeypatch.setattr(asking, "Channel", fresh)
    monkeypatch.setattr(asking.time, "sleep", lambda seconds: None)
    yield fresh


def _pairs(place: Path, names: Iterable[str]) -> Iterator[Pair[str]]:
    for name in names:
        local = place / name
        local.parent.mkdir(exist_ok=True)
        if not local.is_symlink():
            local.write_text("x")
            local.chmod(0o600)
        yield name, local, name, None


def _same(place: Path, names: list[str]) -> list[str]:
    with Asking(_GATEWAY) as one:
        found = list(compared(one, _pairs(place, names), is_put=True))
    assert [name for name, _ in found] == names
    return [name for name, is_same in found if is_same]


def test_directories_are_listed_together_and_again_when_the_connection_is_lost(
    tmp_path: Path, channel: type[_Channel]
) -> None:
    names = [f"{directory}/{number}" for directory in "abcdef" for number in range(5)]
    there = [name for name in names if name[-1] in "024"]
    channel.router = _Router([*there, "a/other", "g/f"], page=2)
    channel.lost_behind.append(3)
    assert _same(tmp_path, names) == there
    assert channel.made == 2
    assert [path for _, path in channel.router.asked] == ["a", "b", "c", "c", "d", "e", "f"]


def test_a_directory_with_much_more_in_it_is_not_listed(tmp_path: Path, channel: type[_Channel]) -> None:
    names = ["large/1", "large/8000", "small/1", "small/9"]
    channel.router = _Router([f"large/{number}" for number in range(9000)] + ["small/1"], page=100)
    assert _same(tmp_path, names) == names[:3]
    assert channel.router.asked == [(List, "large"), *((Stat, name) for name in names[1:])]


def test_a_directory_of_very_many_files_is_not_listed_again_and_again(
    tmp_path: Path, channel: type[_Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sameness, "_TOGETHER", 100)
    names = [f"d/{number:04}" for number in range(950)]
    (tmp_path / "d").mkdir()
    (tmp_path / "d/0100").symlink_to("0102")
    channel.router = _Router(names[::2])
    assert _same(tmp_path, names) == [name for name in names[::2] if name != "d/0100"]
    assert (Stat, "d/0100") not in channel.router.asked and channel.made == 1
    assert sum(kind is List for kind, _ in channel.router.asked) <= 1
    names = ["f", *names[:40], *(f"e{number}/f" for number in range(300))]
    channel.router = _Router(names[::2])
    assert _same(tmp_path, names) == names[::2]
    assert sum(kind is List for kind, _ in channel.router.asked) > 290


def test_many_questions_are_under_way_and_not_too_many(tmp_path: Path, channel: type[_Channel]) -> None:
    names = [f"d{number}/f" for number in range(3000)]
    channel.router = _Router(names[:1500])
    assert _same(tmp_path, names) == names[:1500]
    assert 200 <= channel.most <= 256
    channel.router, channel.most = _Router([]), 0
    with Asking(_GATEWAY) as one:
        answers = list(one.answers([Stat(f"{'d' * 4000}{number}") for number in range(200)]))
    assert len(answers) == 200 and 20 <= channel.most <= 40


def test_a_router_that_answers_no_more_is_given_up(channel: type[_Channel]) -> None:
    channel.router = _Router([])

    def lost(self: object) -> Answer:
        raise TransferFailure(ErrorClass.STALLED, "silent")

    channel.receive = lost  # type: ignore[assignment,method-assign]
    with Asking(_GATEWAY) as one, pytest.raises(TransferFailure, match="silent"):
        list(one.answers([Stat("f")]))
    assert channel.made == 4


def test_only_large_files_that_may_be_the_same_are_asked_for_by_name(tmp_path: Path, channel: type[_Channel]) -> None:
    """A listing has said what is there of the others."""
    channel.router = _Router([])
    small, large, other = (tmp_path / name for name in ("small", "large", "other"))
    small.write_bytes(b"x")
    large.write_bytes(bytes(MAX_FILE_BYTES + 1))
    other.write_bytes(bytes(MAX_FILE_BYTES + 1))
    pairs = [
        (one, one, one.name, _there(size_bytes, 1))
        for one, size_bytes in ((small, 1), (large, MAX_FILE_BYTES + 1), (other, 5), (tmp_path / "none", 7))
    ]
    with Asking(_GATEWAY) as asked:
        found = {one.name: is_same for one, is_same in compared(asked, pairs, is_put=False)}
    assert found == {"small": True, "large": False, "other": False, "none": False}
    assert channel.router.asked == [(Stat, "large")]
