"""Files of records in HTCondor's format: appended once, rotated, never forged by a text, read newest first."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stageout.core import durable, history
from stageout.core.history import FILE_NAME, HistoryFile, HistoryFollower, newest_first

#: Texts of owners and servers that try to look like something else.
HOSTILE = (
    'x"\n*** Offset = 0 ClusterId = 1 ProcId = 0 Owner = "root" CompletionDate = -1 CurrentTime = 1\nOwner = "root"',
    "\\", '\\"', '"', 'x" ', "\\n", "a\tb", "\r\n*** x\n", "\0", "\x1b[2J", "\u2028*** ", "é", "\udcff\udcfe", "\ud800",
    "*** Offset = 0", "= 5", "x" * 5000,
)  # fmt: skip


def record(number: int, **more: Any) -> dict[str, Any]:
    return {"MyType": "StageOutFile", "ClusterId": number, "ProcId": 0, "Owner": "alice", "Number": number, **more}


class Clock:
    now_s = 1_700_000_000.0

    def wall_s(self) -> float:
        return self.now_s


CLOCK = Clock()


def opened(directory: Path, max_bytes: int = 1 << 20, rotations: int = 2) -> HistoryFile:
    return HistoryFile(directory / FILE_NAME, lambda ad: ad.get("Number"), CLOCK.wall_s, max_bytes, rotations)


def numbers(directory: Path) -> list[int]:
    return [entry.attributes()["Number"] for entry in newest_first(directory / FILE_NAME)]


def test_records_have_the_form_of_condor_history(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.append([record(7), record(8)]) == 2
    text = (tmp_path / FILE_NAME).read_text()
    assert text.startswith('MyType = "StageOutFile"\nClusterId = 7\nProcId = 0\nOwner = "alice"\nNumber = 7\n*** ')
    lines = text.splitlines()
    tail = 'ProcId = 0 Owner = "alice" CompletionDate = -1 CurrentTime = 1700000000'
    first = text.index("*** ")
    assert [line for line in lines if line.startswith("***")] == [
        f"*** Offset = 0 ClusterId = 7 {tail}", f"*** Offset = {first} ClusterId = 8 {tail}",
    ]  # fmt: skip
    file.append([record(9)])
    assert f"*** Offset = {text.rindex('*** ')} ClusterId = 9" in (tmp_path / FILE_NAME).read_text()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o644
    assert numbers(tmp_path) == [9, 8, 7]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("attribute", ["TransferFileName", "Owner"])
def test_no_text_can_look_like_another_record(tmp_path: Path, text: str, attribute: str) -> None:
    opened(tmp_path).append([record(1), record(2, **{attribute: text}), record(3)])
    found = list(newest_first(tmp_path / FILE_NAME))
    assert [entry.attributes()["Number"] for entry in found] == [3, 2, 1]
    ad = found[1].attributes()
    assert set(ad) == {*record(2), attribute}
    bare = text.encode("utf-8", "replace").decode()
    assert ad[attribute] == " ".join(bare.split("\n")).replace("\0", " ").replace("\r", " ")
    assert found[1].banner.count(b'"') == 2


@pytest.mark.parametrize("text", HOSTILE)
def test_condors_parser_reads_the_same(tmp_path: Path, text: str) -> None:
    classad2 = pytest.importorskip("classad2")
    opened(tmp_path).append([record(2, TransferError=text, Flag=True, Rate=2.5)])
    (entry,) = newest_first(tmp_path / FILE_NAME)
    ad = classad2.parseOne(entry.text.decode(), classad2.ParserType.Old)
    assert dict(ad.items()) == entry.attributes()


def test_a_record_is_appended_once_also_after_a_restart(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.append([record(1), record(1)]) == 1
    assert file.append([record(1)]) == 0
    assert not file.has(2)
    again = opened(tmp_path)
    assert again.has(1)
    assert again.append([record(1), record(2)]) == 1
    assert numbers(tmp_path) == [2, 1]


def test_a_restart_looks_into_the_rotated_part_too(tmp_path: Path) -> None:
    opened(tmp_path, 600).append([record(number) for number in range(6)])
    opened(tmp_path, 400).append([record(6)])
    assert opened(tmp_path, 400).append([record(number) for number in range(7)]) == 0


def test_only_the_end_of_a_long_file_is_read_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_KNOWN", 10)
    opened(tmp_path).append([record(number) for number in range(100)])
    assert (opened(tmp_path).has(99), opened(tmp_path).has(1)) == (True, False)


def test_a_restart_knows_the_records_of_a_whole_pass(tmp_path: Path) -> None:
    text = "x" * 600
    opened(tmp_path, 20 << 20).append([record(number, Text=text) for number in range(5000)])
    assert opened(tmp_path, 20 << 20).append([record(0), record(4999)]) == 0


@pytest.mark.parametrize("method", ["open", "read"])
def test_a_rotated_part_that_cannot_be_read_is_left_out(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, 600).append([record(number) for number in range(4)])
    opened(tmp_path, 100).append([record(4)])
    newest = f"{FILE_NAME}.20991231T000000"
    if method == "open":
        (tmp_path / newest).symlink_to(newest)
    else:
        (tmp_path / newest).mkdir()
    file = opened(tmp_path)
    assert file.append([record(4), record(5)]) == 1
    assert not file.has(6)
    assert numbers(tmp_path)[:3] == [5, 4, 3]
    assert caplog.text.count("history-read-failed") == 2, "once by the writer, once by the reader"


def test_what_a_process_remembers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_KNOWN", 10)
    file = opened(tmp_path)
    file.append([record(number) for number in range(100)])
    assert (file.has(89), file.has(90)) == (False, True)


def test_parts_are_named_and_kept_as_condor_does(tmp_path: Path) -> None:
    (tmp_path / f"{FILE_NAME}.old").write_text("another file")
    file = opened(tmp_path, 1000)
    for number in range(60):
        file.append([record(number)])
    parts = sorted(path.name for path in tmp_path.glob(f"{FILE_NAME}.2*"))
    assert len(parts) == 2
    assert all(re.fullmatch(rf"{FILE_NAME}\.\d{{8}}T\d{{6}}", name) for name in parts)
    assert all(path.stat().st_size <= 1000 for path in tmp_path.glob(f"{FILE_NAME}*"))
    found = numbers(tmp_path)
    assert found == list(range(59, 59 - len(found), -1))
    assert len(found) > 12
    assert (tmp_path / f"{FILE_NAME}.old").exists()


def test_fewer_parts_are_kept_after_the_setting_was_lowered(tmp_path: Path) -> None:
    file = opened(tmp_path, 300, rotations=4)
    for number in range(20):
        file.append([record(number)])
    assert len(list(tmp_path.glob(f"{FILE_NAME}.2*"))) == 4
    file.set_limits(300, rotations=1)
    for number in range(20, 24):
        file.append([record(number)])
    assert len(list(tmp_path.glob(f"{FILE_NAME}.2*"))) == 1


@pytest.mark.parametrize("part", [b'MyType = "Stage', b"Number = 5\n*** Offset = 5 Clus", b"\0" * 5000, b"\n\n"])
def test_a_part_of_a_record_that_a_crash_left_is_cut_off(tmp_path: Path, part: bytes) -> None:
    opened(tmp_path).append([record(1)])
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + part)
    assert numbers(tmp_path) == [1]
    opened(tmp_path).append([record(2)])
    assert numbers(tmp_path) == [2, 1]
    assert path.read_bytes().startswith(whole + b"MyType")


def test_a_file_of_something_else_is_rotated(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("something else")
    opened(tmp_path).append([record(1)])
    assert numbers(tmp_path) == [1]
    (part,) = tmp_path.glob(f"{FILE_NAME}.2*")
    assert part.read_text() == "something else"


def test_a_file_that_is_rotated_or_removed_while_it_is_read(tmp_path: Path) -> None:
    file = opened(tmp_path, 600)
    for number in range(12):
        file.append([record(number)])
    rows = newest_first(tmp_path / FILE_NAME)
    first = next(rows).attributes()["Number"]
    file._rotate()
    left = [entry.attributes()["Number"] for entry in rows]
    assert left == list(range(first - 1, first - 1 - len(left), -1))


@pytest.mark.parametrize("block", [1, 7, 64, 200, 1000])
def test_blocks_of_any_length_give_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    opened(tmp_path).append([record(number, Text="x *** y" * (number % 5)) for number in range(20)])
    monkeypatch.setattr(history, "_BLOCK", block)
    assert numbers(tmp_path) == list(range(19, -1, -1))


@pytest.mark.parametrize("fault", ["ENOSPC", "short-write", "EIO"])
def test_what_cannot_be_written_leaves_nothing_and_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    file = opened(tmp_path)
    file.append([record(1)])
    monkeypatch.setitem(durable._faults, "history-append", [durable.Fault(fault, None)])
    with pytest.raises(OSError, match=r"planned"):
        file.append([record(2)])
    assert numbers(tmp_path) == [1]
    monkeypatch.setitem(durable._faults, "history-append", [])
    assert file.append([record(2)]) == 1
    assert numbers(tmp_path) == [2, 1]


class _Death(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
@pytest.mark.parametrize("label", ["history-append", "history-rotate"])
def test_a_death_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, when: str
) -> None:
    def die() -> None:
        raise _Death

    file = opened(tmp_path, 400)
    file.append([record(1), record(2), record(3)])
    monkeypatch.setattr(durable, "die", die)
    monkeypatch.setitem(durable._faults, label, [durable.Fault(when, None)])
    with pytest.raises(_Death):
        file.append([record(4)])
    monkeypatch.setitem(durable._faults, label, [])
    opened(tmp_path, 400).append([record(4)])
    assert numbers(tmp_path) == [4, 3, 2, 1]


# ---- following -------------------------------------------------------------------------------------------------------


def followed(follower: HistoryFollower, most_bytes: int = 1 << 20) -> list[int]:
    """Return the numbers of all records that are new."""
    found: list[int] = []
    while True:
        piece = follower.read(most_bytes)
        if not piece:
            return found
        found += [entry.attributes()["Number"] for entry in piece]


@pytest.mark.parametrize("most_bytes", [1, 300, 1 << 20])
def test_a_follower_reads_each_record_once_over_rotations(tmp_path: Path, most_bytes: int) -> None:
    file, follower = opened(tmp_path, max_bytes=2000, rotations=4), HistoryFollower(tmp_path / FILE_NAME)
    assert followed(follower) == []
    found: list[int] = []
    for number in range(60):
        file.append([record(number)])
        if number % 7 == 0:
            found += followed(follower, most_bytes)
    found += followed(follower, most_bytes)
    assert found == list(range(60))
    assert follower.restarts == 0


def test_a_follower_leaves_a_record_that_is_being_written(tmp_path: Path) -> None:
    file, follower = opened(tmp_path), HistoryFollower(tmp_path / FILE_NAME)
    file.append([record(1)])
    with (tmp_path / FILE_NAME).open("ab") as half:
        half.write(b'MyType = "StageOutFile"\nNumb')
    assert followed(follower) == [1]
    file.append([record(2)])
    assert followed(follower) == [2]


GARBAGE = {
    "lines": b"x" * 99 + b"\n", "one-line": b"x" * 100, "bytes": bytes(range(256)) + b"\n\xff",
    "false-banners": b"x *** in a long line\r*** ",
}  # fmt: skip


@pytest.fixture
def short_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that a test needs little garbage."""
    monkeypatch.setattr(history, "_MOST_RECORD", 2000)
    monkeypatch.setattr(history, "_BLOCK", 512)


@pytest.mark.usefixtures("short_records")
@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("most_bytes", [1, 100, 1500])
def test_garbage_costs_no_record_beside_its_neighbour(tmp_path: Path, kind: str, most_bytes: int) -> None:
    file, follower = opened(tmp_path), HistoryFollower(tmp_path / FILE_NAME)
    file.append([record(number) for number in range(4)])
    found = followed(follower, most_bytes)
    damage(tmp_path / FILE_NAME, kind)
    assert followed(follower, most_bytes) == []
    opened(tmp_path).append([record(4)])
    found += followed(follower, most_bytes)
    assert found == [0, 1, 2, 3, 4], "the writer cuts off what is no record"
    damage(tmp_path / FILE_NAME, kind)
    with (tmp_path / FILE_NAME).open("ab") as behind:
        for number in range(5, 9):
            behind.write(b"Number = %d\n*** Offset = 0 ClusterId = 1\n" % number)
    assert followed(follower, most_bytes) == [6, 7, 8]
    assert numbers(tmp_path) == [8, 7, 6, 4, 3, 2, 1, 0]
    assert follower.restarts == 0


def damage(path: Path, kind: str) -> None:
    """Append garbage."""
    with path.open("ab") as file:
        file.write(GARBAGE[kind] * 500 + b"\n")


@pytest.mark.usefixtures("short_records")
@pytest.mark.parametrize("kind", GARBAGE)
def test_a_part_of_garbage_needs_little_memory(tmp_path: Path, kind: str) -> None:
    opened(tmp_path).append([record(1)])
    part = GARBAGE[kind] * (4_000_000 // len(GARBAGE[kind]))
    (tmp_path / f"{FILE_NAME}.20200101T000000").write_bytes(part)
    del part
    follower = HistoryFollower(tmp_path / FILE_NAME)
    tracemalloc.start()
    assert followed(follower, 1000) == [1]
    assert numbers(tmp_path) == [1]
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 500_000


def test_a_follower_begins_again_after_the_file_was_replaced(tmp_path: Path) -> None:
    path, follower = tmp_path / FILE_NAME, HistoryFollower(tmp_path / FILE_NAME)
    opened(tmp_path).append([record(number) for number in range(5)])
    assert followed(follower) == [0, 1, 2, 3, 4]
    path.unlink()
    opened(tmp_path).append([record(number) for number in range(7, 14)])
    assert followed(follower) == [7, 8, 9, 10, 11, 12, 13]
    assert follower.restarts == 1
    path.write_bytes(b"")
    assert followed(follower) == []
    assert follower.restarts == 2


def unreadable(part: Path) -> None:
    """Make a part that cannot be read, also not by root."""
    part.unlink()
    part.mkdir()


@pytest.mark.parametrize("numbers_read", [0, 8])
def test_a_follower_skips_a_rotated_part_that_cannot_be_read(
    tmp_path: Path, numbers_read: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs the part once, and goes on with the others."""
    file, follower = opened(tmp_path, max_bytes=2000, rotations=9), HistoryFollower(tmp_path / FILE_NAME)
    file.append([record(number) for number in range(numbers_read)])
    found = followed(follower)
    for number in range(numbers_read, 60):
        file.append([record(number)])
    parts = sorted(part for part in tmp_path.iterdir() if part.name != FILE_NAME)
    assert len(parts) >= 3
    lost = {entry.attributes()["Number"] for entry in history._part(parts[1], set())}
    unreadable(parts[1])
    found += followed(follower)
    file.append([record(60)])
    found += followed(follower)
    assert found == [number for number in range(61) if number not in lost]
    assert follower.restarts == 0
    assert follower.unreadable == {parts[1]}
    assert caplog.text.count("history-read-failed") == 1
    parts[1].rmdir()
    assert followed(follower) == []
    assert not follower.unreadable


def test_a_follower_begins_again_when_it_stopped_in_a_part_that_cannot_be_read_any_more(tmp_path: Path) -> None:
    file, follower = opened(tmp_path, max_bytes=2000, rotations=9), HistoryFollower(tmp_path / FILE_NAME)
    file.append([record(0)])
    assert followed(follower) == [0]
    for number in range(1, 30):
        file.append([record(number)])
    unreadable(min(part for part in tmp_path.iterdir() if part.name != FILE_NAME))
    found = followed(follower)
    assert found[-1] == 29
    assert found == list(range(found[0], 30))
    assert follower.restarts == 1
    assert followed(follower) == []


def test_a_follower_says_that_the_newest_part_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(IsADirectoryError):
        followed(HistoryFollower(tmp_path / FILE_NAME))
