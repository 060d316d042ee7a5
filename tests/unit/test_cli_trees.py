"""``stageout put -r`` and ``get -r``: where the files end, whatever they are called, and whatever a router says."""

from __future__ import annotations

import itertools
import tracemalloc
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from stageout.cli.exits import UsageError
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.asking import Asking
from stageout.overlay.channel import Gateway
from stageout.overlay.cli import spooled, trees
from stageout.overlay.cli.tally import Tally
from stageout.overlay.wire.fields import MAX_PATH_BYTES
from stageout.overlay.wire.messages import Answer, List

_GATEWAY = Gateway("h", 9621, "k", b"secret")
_HOSTILE = ("n" * 256, "", ".", "..", "../out", "/out", "a/b", "nul\0", "\ud800", "\udc2f")


class _Names:
    """A router that names what it likes."""

    def __init__(self, directories: dict[str, list[tuple[str, str]] | ErrorClass]) -> None:
        self._directories = directories

    def answers(self, questions: Sequence[List]) -> Iterator[Answer]:
        for question in questions:
            found = self._directories[question.path]
            if isinstance(found, ErrorClass):
                yield Answer(code=found.code, message="not to be had")
                continue
            for start in range(0, len(found), 2):
                names, kinds = zip(*found[start : start + 2])
                numbers = (1,) * len(names)
                yield Answer(names, kinds, numbers, numbers, numbers, more=start + 2 < len(found))

    def refusal(self, answer: Answer) -> TransferFailure:
        return Asking(_GATEWAY).refusal(answer)

    def close(self) -> None:
        pass


def _fetched(place: Path, directories: dict[str, list[tuple[str, str]] | ErrorClass]) -> int:
    fetched = trees._Fetched(place / "into", Tally(str(place / "into"), False))
    for key, _, local, _ in fetched.all_below(cast(Any, _Names(directories)), "d"):
        fetched.ended(key, Path(local).write_bytes(b"x"))
    return fetched.tally.failures


def _found(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def test_a_router_cannot_name_what_is_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [(name, kind) for name in _HOSTILE for kind in ("file", "directory")]
    assert _fetched(tmp_path, {"d": [*entries, ("good", "file")]}) == len(entries)
    assert _found(tmp_path) == {"into", "into/good"}
    assert capsys.readouterr().err.count("what is no name of a file") == len(entries)


def test_a_directory_that_cannot_be_had_is_said_and_the_others_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "into/here").touch()
    inside = [("one", "directory"), ("two", "directory"), ("here", "directory"), ("f", "file")]
    directories = {"d": inside, "d/one": ErrorClass.PERMISSION_DENIED, "d/two": [("g", "file")], "d/here": inside[3:]}
    assert _fetched(tmp_path, cast(Any, directories)) == 2
    assert _found(tmp_path / "into") == {"two", "two/g", "f", "here"}
    said = capsys.readouterr().err
    assert "d/one: not to be had" in said and "into/here is there, and no directory" in said
    with pytest.raises(TransferFailure, match="not to be had"):
        _fetched(tmp_path, {"d": [("e", "directory")], "d/e": ErrorClass.SERVER_BUSY})


def _sent(url: str, path: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []

    class Tree:
        def __init__(self, gateway: Gateway, local: Path, path: str, *more: object) -> None:
            sent.append(path)

        def send(self, *more: object) -> int:
            return 0

    monkeypatch.setattr(trees, "_Tree", Tree)
    trees.send_trees(_GATEWAY, path, Namespace(files=names, url=url, json=False), (), _GATEWAY, "")
    return sent


def test_a_directory_goes_into_a_directory_or_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run7").mkdir()
    (tmp_path / "newest").symlink_to("run7")
    monkeypatch.chdir(tmp_path / "run7")
    for url, path, name, there in (
        ("overlay://h", "", "../run7", "run7"),
        ("overlay://h/", "", ".", "run7"),
        ("overlay://h/a/", "a", "../newest/", "a/newest"),
        ("overlay://h/a", "a", ".", "a"),
    ):
        assert _sent(url, path, [name], monkeypatch) == [there]
    assert _sent("overlay://h/a", "a", ["b", "c"], monkeypatch) == ["a/b", "a/c"]
    with pytest.raises(UsageError, match="2 of these would be a/run there"):
        _sent("overlay://h/a/", "a", ["b/run", "c/run"], monkeypatch)


class _Endless:
    """A router whose listing of one directory never ends."""

    def __init__(self) -> None:
        self.named = 0

    def answers(self, questions: Sequence[List]) -> Iterator[Answer]:
        while True:
            self.named += 100
            names = tuple(f"{number:0200}" for number in range(self.named, self.named + 100))
            yield Answer(names, ("file",) * 100, (1,) * 100, more=True)

    def close(self) -> None:
        pass


def test_a_listing_that_never_ends_has_an_end_and_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooled, "_MEMORY_BYTES", 100_000)
    monkeypatch.setattr(trees, "MOST_ENTRIES", 20_000)
    names = _Endless()
    fetched = trees._Fetched(tmp_path / "into", Tally("into", False))
    tracemalloc.start()
    try:
        with pytest.raises(TransferFailure, match="more than 20000 entries") as caught:
            list(fetched.all_below(cast(Any, names), "d"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.kind is ErrorClass.TOO_LARGE and names.named == 20_100
    assert peak_bytes < 2_000_000
    assert not list(tmp_path.iterdir()), "nothing is made of a directory that cannot be read"


def test_empty_pages_of_a_listing_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_ENTRIES", 1000)

    class Empty:
        def answers(self, questions: Sequence[List]) -> Iterator[Answer]:
            return itertools.repeat(Answer(more=True))

        def close(self) -> None:
            pass

    with pytest.raises(TransferFailure, match="more than 1000 entries"):
        list(trees._Fetched(tmp_path / "into", Tally("into", False)).all_below(cast(Any, Empty()), "d"))


@pytest.mark.parametrize("name", ["n" * 255, "\u1234" * 85])
def test_a_path_is_as_long_as_the_protocol_allows(tmp_path: Path, name: str) -> None:
    for spare_bytes, failures in ((0, 0), (-1, 1)):
        there = "d" * (MAX_PATH_BYTES - 256 - spare_bytes)
        fetched = trees._Fetched(tmp_path / "into", Tally("into", False))
        listed = _Names({there: [(name, "file"), ("short", "file")]})
        found = [path for _, path, _, _ in fetched.all_below(cast(Any, listed), there)]
        assert (found, fetched.tally.failures) == (
            [f"{there}/{one}" for one in (name, "short")[failures:]], failures
        )  # fmt: skip


def test_a_listing_that_was_cut_off_is_taken_once(tmp_path: Path) -> None:
    def page(*names: str, more: bool = False) -> Answer:
        numbers = (1,) * len(names)
        return Answer(names, ("file",) * len(names), numbers, numbers, numbers, more=more)

    class Cut(_Names):
        def answers(self, questions: Sequence[List]) -> Iterator[Answer]:
            if questions[0].path == "d":
                yield Answer(("a", "b"), ("directory",) * 2, (1, 1), (1, 1), (1, 1))
            else:
                yield from (page("f"), page("g", "h", more=True), cast(Any, None), page("g", more=True), page("i"))

    assert _found_by(tmp_path, Cut({})) == ["d/a/f", "d/b/g", "d/b/i"]


def test_much_is_not_listed_before_the_first_file_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that do not fit are listed later, and each has its files nevertheless."""
    monkeypatch.setattr(trees, "_TOGETHER_BYTES", 500)
    directories = [f"d{number}" for number in range(20)]
    asked: list[int] = []

    class Asked(_Names):
        def answers(self, questions: Sequence[List]) -> Iterator[Answer]:
            asked.append(len(questions))
            return super().answers(questions)

    listed = {f"d/{name}": [(f"f{number}", "file") for number in range(10)] for name in directories}
    names = Asked({"d": [(name, "directory") for name in directories], **listed})
    assert _found_by(tmp_path, names) == [f"d/{name}/f{number}" for name in directories for number in range(10)]
    assert len(asked) > 5 and asked[:2] == [1, 20]


def _found_by(place: Path, names: _Names) -> list[str]:
    fetched = trees._Fetched(place / "into", Tally("into", False))
    return [path for _, path, _, _ in fetched.all_below(cast(Any, names), "d")]


def test_many_rows_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled, "_MEMORY_BYTES", 100)
    with spooled.Spooled(tmp_path) as rows:
        for start in (0, 50):
            for number in range(start, start + 50):
                rows.add((f"\udc2f\n{number}", number))
            assert [rows.pop() for _ in range(20)] == [
                [f"\udc2f\n{one}", one] for one in range(start // 50 * 20, start // 50 * 20 + 20)
            ]
        assert len(rows) == 60 and not list(tmp_path.iterdir())
        end = rows.end()
        rows.add((1,))
        rows.cut(end)
        assert len(rows) == 60
        rows.clear()
        assert not rows
        rows.add((1,))
        assert rows.pop() == [1]
