"""The spool as a directory: where it may be, whose it is, what it holds and gives up."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handoff_site import ALICE, ROOT, Child, needs_root

from sandbox_manager.custody.spool import NotClaimed, Spool, SpoolError, Synced, printable
from stageout.core import durable
from stageout.model.file import StoredFile
from stageout.wire.handoff import OfferedCredential, OfferedFile, credential_link

USER = ALICE if ROOT else os.geteuid()
TICKET = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stageout-spool-") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "execute").mkdir()
        yield place


@pytest.fixture
def spool(base: Path) -> Iterator[Spool]:
    made = Spool(base / "execute" / ".." / "stageout", base / "execute")
    made.open({"EXECUTE": str(base / "execute")})
    yield made
    made.close()


def hold(spool: Spool, *contents: bytes, ticket: str = TICKET) -> list[StoredFile]:
    """Bring files through the intake as a plugin would."""
    place = spool.prepare_intake(ticket, USER, USER)
    scratch = spool.execute / f"dir_{len(list(spool.execute.iterdir()))}"
    scratch.mkdir()
    offered = []
    for number, data in enumerate(contents):
        source = scratch / f"out{number}"
        source.write_bytes(data)
        os.chown(source, USER, USER)
        os.link(source, place / str(number))
        offered.append(OfferedFile(f"s://h/{number}", str(source), len(data)))
    return spool.claim(ticket, offered, USER, USER)


# ---- place -----------------------------------------------------------------------------------------------------------


def test_directories_and_modes(spool: Spool, base: Path) -> None:
    assert spool.root == base / "stageout"
    shared = 0o711 if ROOT else 0o700
    for name in ("", "run", "intake", "sandboxes", "movers"):
        assert stat.S_IMODE((spool.root / name).stat().st_mode) == shared, name
    assert stat.S_IMODE((spool.root / "ledger").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["EXECUTE", "SPOOL", "LOG"])
@pytest.mark.parametrize("below", ["", "deep/er"])
def test_not_where_htcondor_empties(base: Path, name: str, below: str) -> None:
    (base / "link").symlink_to("condor")
    (base / "condor").mkdir()
    spool = Spool(base / "link" / below, base / "execute")
    with pytest.raises(SpoolError, match=f"inside {name} = "):
        spool.open({name: str(base / "condor")})
    assert list((base / "condor").iterdir()) == []


@needs_root
def test_not_where_others_may_rename_it(base: Path) -> None:
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    with pytest.raises(SpoolError, match="chmod go-w"):
        Spool(base / "open" / "stageout", base / "execute").open({})


@needs_root
def test_not_in_somebody_elses_directory(base: Path) -> None:
    (base / "stageout").mkdir()
    os.chown(base / "stageout", ALICE, ALICE)
    with pytest.raises(SpoolError, match="not a directory of uid 0"):
        Spool(base / "stageout", base / "execute").open({})


def test_no_symbolic_link_for_a_part_of_it(base: Path) -> None:
    (base / "stageout").mkdir()
    (base / "elsewhere").mkdir()
    (base / "stageout" / "sandboxes").symlink_to("../elsewhere")
    with pytest.raises(SpoolError, match="sandboxes is not a directory"):
        Spool(base / "stageout", base / "execute").open({})


def test_one_manager_only(spool: Spool, base: Path) -> None:
    second = Spool(base / "stageout", base / "execute")
    with pytest.raises(SpoolError, match="in use by another sandbox manager"):
        second.open({})
    spool.close()
    second.open({})
    second.close()


def test_a_place_that_cannot_be_made(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(SpoolError, match="give it a place that can be written"):
        Spool(base / "file" / "stageout", base / "execute").open({})


# ---- custody ---------------------------------------------------------------------------------------------------------


def test_held_files(spool: Spool) -> None:
    first, second = hold(spool, b"abc", b"")
    assert (first.position, first.url, first.size_bytes, second.size_bytes) == (0, "s://h/0", 3, 0)
    assert first.name == "out0" and spool.path(TICKET, 0).read_bytes() == b"abc"
    assert spool.directories() == [TICKET] and spool.free_bytes() > 0
    place = spool.path(TICKET, 0).parent.stat()
    assert stat.S_IMODE(place.st_mode) == (0o710 if ROOT else 0o700)
    assert (place.st_uid, place.st_gid) == ((0, Spool.private_group(USER)) if ROOT else (USER, place.st_gid))


def test_change_is_noticed(spool: Spool) -> None:
    [held] = hold(spool, b"abc")
    path = spool.path(TICKET, 0)
    assert spool.unchanged(held)
    before = path.stat()
    path.write_bytes(b"abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert not spool.unchanged(held)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert spool.unchanged(held), "mtime set back: only the ctime tells"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        spool.unchanged(held)
    path.write_bytes(b"abc")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not spool.unchanged(held), "another file"


def test_an_old_spool_below_one_that_is_not_mounted_says_nothing_about_files(spool: Spool) -> None:
    [held] = hold(spool, b"abc")
    place = spool.root / "sandboxes"
    place.rename(spool.root / "away")
    place.mkdir()
    with pytest.raises(OSError, match="mounted") as told:
        spool.unchanged(held)
    assert not isinstance(told.value, FileNotFoundError)
    place.rmdir()
    (spool.root / "away").rename(place)
    assert spool.unchanged(held)


def test_the_change_time_tells_what_no_other_mark_does(spool: Spool) -> None:
    [held] = hold(spool, b"abc")
    assert spool.change_mark(TICKET, 0)[1] == 2, "the scratch directory is still there"
    next(spool.execute.glob("dir_*/out0")).unlink()
    fixed, names = spool.change_mark(TICKET, 0)
    assert fixed > 0 and names == 1 and spool.unchanged(held)
    path = spool.path(TICKET, 0)
    # Clocks of filesystems are coarse: write until the kernel's has moved on.
    while path.stat().st_ctime_ns == fixed:
        path.write_bytes(b"abd")
    os.utime(path, ns=(0, held.mtime_ns))
    assert spool.change_mark(TICKET, 0) != (fixed, 1)


def test_a_hand_off_that_could_not_be_removed_is_removed_later(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    place = spool.prepare_intake(TICKET, os.getuid(), os.getgid())
    (place / "0").write_bytes(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(durable.disk, "unlink", _refuse)
        spool.withdraw(TICKET)
        spool.withdraw_again()
    assert place.exists()
    spool.withdraw_again()
    assert not place.exists()


def _refuse(*arguments: object, **more: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_claim_takes_all_or_nothing(spool: Spool) -> None:
    spool.prepare_intake(TICKET, USER, USER)
    with pytest.raises(NotClaimed):
        spool.claim(TICKET, [OfferedFile("u", "p", 1)], USER, USER)
    assert spool.directories() == [] and list((spool.root / "intake").iterdir()) == []


@pytest.mark.parametrize("offered_bytes", [2, 4])
def test_file_of_another_size_than_offered_is_not_taken(spool: Spool, offered_bytes: int) -> None:
    """The job has a process left that still writes."""
    link = spool.prepare_intake(TICKET, USER, USER) / "0"
    link.write_bytes(b"abc")
    os.chown(link, USER, USER)
    with pytest.raises(NotClaimed, match="it still changes"):
        spool.claim(TICKET, [OfferedFile("s://h/0", "p", offered_bytes)], USER, USER)
    assert spool.directories() == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_only_regular_files_are_taken(spool: Spool, make: Callable[[Path], None]) -> None:
    """The size proves nothing: a plugin that opens a FIFO waits for ever."""
    link = spool.prepare_intake(TICKET, USER, USER) / "0"
    make(link)
    os.chown(link, USER, USER, follow_symlinks=False)
    with pytest.raises(NotClaimed, match="not a regular file"):
        spool.claim(TICKET, [OfferedFile("s://h/0", "p", link.lstat().st_size)], USER, USER)


def test_more_names_than_files_are_not_taken(spool: Spool) -> None:
    """They would be counted in nobody's quota."""
    place = spool.prepare_intake(TICKET, USER, USER)
    for name in ("0", "hidden"):
        (place / name).write_bytes(b"abc")
        os.chown(place / name, USER, USER)
    with pytest.raises(NotClaimed, match="2 or more names"):
        spool.claim(TICKET, [OfferedFile("s://h/0", "p", 3)], USER, USER)


def test_a_credential_of_another_user_is_not_taken(spool: Spool) -> None:
    """The owner of a directory can rename entries that others have put there."""
    link = spool.prepare_intake(TICKET, USER, USER) / credential_link(0)
    link.write_bytes(b"key")
    os.chown(link, USER, USER)
    with pytest.raises(NotClaimed, match="not a file of the job's own"):
        spool.claim(TICKET, [], USER + 1, USER, [OfferedCredential("token", "team", 3)])
    assert spool.directories() == [] and list((spool.root / "intake").iterdir()) == []


def test_release_and_what_the_next_manager_finds(spool: Spool, base: Path) -> None:
    hold(spool, b"one")
    hold(spool, b"three", ticket="b" * 32)
    spool.prepare_intake("c" * 32, USER, USER)
    spool.close()
    again = Spool(base / "stageout", base / "execute")
    again.open({})
    assert list((again.root / "intake").iterdir()) == []
    assert again.set_aside(["b" * 32]) == again.unknown() == ["b" * 32]
    again.release(TICKET)
    again.release(TICKET)
    assert again.directories() == []
    again.remove_unknown(["b" * 32])
    assert again.unknown() == []
    assert sorted(path.name for path in base.glob("execute/*/*")) == ["out0", "out0"], "only the spool's names go"
    again.close()


def test_sync_reaches_every_file(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(spool, b"1", b"2", b"3")
    synced = []
    for call in ("fdatasync", "fsync"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda fd, real=real: (synced.append(os.fstat(fd).st_ino), real(fd)))
    spool.write_back([TICKET, OTHER])
    assert spool.sync([TICKET, OTHER]) == Synced([TICKET])
    places = [spool.path(TICKET, 0).parent, spool.root / "sandboxes", spool.root / "intake"]
    assert set(synced) == {item.inode for item in held} | {place.stat().st_ino for place in places}
    spool.release(TICKET)
    assert spool.sync([TICKET]) == Synced()


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_data_that_the_disk_refused_are_not_there_any_more(
    spool: Spool, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second sync of the same file would succeed."""
    hold(spool, b"1", b"2")
    hold(spool, b"3", ticket=OTHER)
    refused, real = [errno.EIO], getattr(os, call)

    def once(descriptor: int) -> None:
        if refused:
            raise OSError(refused.pop(), "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, call, once)
    synced = spool.sync([TICKET, OTHER])
    assert (synced.on_disk, synced.again) == ([OTHER], [])
    assert "Input/output error" in synced.lost[TICKET]
    assert spool.directories() == [OTHER]


def test_where_no_file_can_be_opened_nothing_is_lost(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(spool, b"1")
    real = os.open

    def none_left(path: Any, *how: Any, **more: Any) -> int:
        if path == "0":
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        assert spool.sync([TICKET]) == Synced(again=[TICKET])
    assert spool.sync([TICKET]) == Synced([TICKET])


def test_many_files_go(spool: Spool) -> None:
    place = spool.root / "sandboxes" / TICKET
    place.mkdir()
    (place / "0").touch()
    for number in range(1, 20_000):  # of one file: to make as many takes longer than all the rest
        os.link(place / "0", place / str(number))
    spool.release(TICKET)
    assert spool.directories() == []


@pytest.mark.parametrize("moment", ["kill-before", "kill-after"])
def test_killed_while_releasing(spool: Spool, moment: str) -> None:
    hold(spool, b"abc")
    child = Child(lambda: spool.release(TICKET), os.geteuid(), env={"STAGEOUT_FAULTS": f"spool-release={moment}"})
    assert child.result() is None
    assert spool.directories() == ([TICKET] if moment == "kill-before" else [])
    spool.release(TICKET)
    assert spool.directories() == []


@pytest.mark.parametrize("label", ["spool-release", "spool-sync"])
def test_failures_are_raised(spool: Spool, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(spool, b"abc")
    monkeypatch.setattr(durable, "_faults", durable.parse_faults(f"{label}=EIO"))
    with pytest.raises(OSError, match="planned"):
        (spool.release if label == "spool-release" else spool.sync)(TICKET)
    assert spool.directories() == [TICKET]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [("plain ü", "plain ü"), ("a\nb\x1b[31m", "a\\nb\\x1b[31m"), ("\udcff", "\\xff"), ("\u2028", "\\u2028"), ("", "")],
)
def test_printable(raw: str, shown: str) -> None:
    assert printable(raw) == shown


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("dir_1/scratch/d/out", "d/out"),
        ("dir_1/d/out", "d/out"),
        ("dir_1/out", "out"),
        ("dir_1/scratch", "scratch"),
        (None, "out"),
    ],
)
def test_names_for_people(spool: Spool, path: str | None, shown: str) -> None:
    assert spool.shown_name(f"{spool.execute}/{path}" if path else "/somewhere/else/out") == shown
