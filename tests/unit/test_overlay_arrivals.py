"""The part of a file that has come, before it has its name."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.core.errors import ErrorClass
from stageout.overlay import arrivals


@pytest.fixture
def strict() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize(("mode", "here"), [(0o755, 0o750), (0o666, 0o640), (0o6755, 0o750), (0o400, 0o400)])
def test_nobody_else_reads_a_part_and_the_whole_has_its_permissions(
    tmp_path: Path, strict: None, mode: int, here: int
) -> None:
    part = arrivals.part_of(tmp_path / ("\u1234" * 85))
    with open(part, "xb", opener=arrivals.private) as file:
        assert part.stat().st_mode & 0o7777 == 0o600
        arrivals.permit(file.fileno(), mode)
    assert part.stat().st_mode & 0o7777 == here


def test_a_filesystem_without_permissions_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, mode: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", refused)
    with open(tmp_path / "f", "xb") as file:
        arrivals.permit(file.fileno(), 0o755)


def test_the_umask_is_known_and_stays(monkeypatch: pytest.MonkeyPatch, strict: None) -> None:
    assert arrivals.umask() == 0o027
    real = builtins.open

    def no_proc(path: Any, *more: Any, **others: Any) -> Any:
        if str(path).startswith("/proc"):
            raise FileNotFoundError
        return real(path, *more, **others)

    monkeypatch.setattr(builtins, "open", no_proc)
    assert arrivals.umask() == 0o027
    assert os.umask(0o027) == 0o027


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, ErrorClass.NO_SPACE_LOCAL),
        (errno.EDQUOT, ErrorClass.NO_SPACE_LOCAL),
        (errno.EACCES, ErrorClass.LOCAL_FILE),
    ],
)
def test_where_there_is_no_room_a_job_may_run_elsewhere(number: int, kind: ErrorClass) -> None:
    failure = arrivals.not_written(Path("place"), OSError(number, os.strerror(number)))
    assert (failure.kind, str(failure.message)) == (kind, f"place: {os.strerror(number)}")
