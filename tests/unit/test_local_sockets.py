"""A local socket appears whole at its path, and nothing else stays open for it."""

from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path

import pytest

from stageout.core.sockets import connect_to, listen_at


def _open_below(directory: Path) -> list[str]:
    """Return what this process holds open of a directory."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(str(link.readlink()))
    return [target for target in found if target.startswith(str(directory))]


@pytest.mark.parametrize("deep", ["", "d" * 120])
def test_a_socket_is_reached_by_its_path_and_holds_no_directory(tmp_path: Path, deep: str) -> None:
    path = tmp_path / deep / "control"
    path.parent.mkdir(exist_ok=True)
    with listen_at(path, 0o640) as listener, socket.socket(socket.AF_UNIX) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        connect_to(client, path)
        listener.setblocking(True)
        listener.accept()[0].close()
        assert [one.name for one in path.parent.iterdir()] == ["control"]
        assert _open_below(tmp_path) == []


def test_a_socket_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    with pytest.raises(OSError):
        listen_at(tmp_path / "control", 0o600)
    assert _open_below(tmp_path) == []
