"""Symbolic links below a router's root lead nobody out of it, neither a reader nor a writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from tests.harness.router import RouterProcess


@pytest.fixture
def outside(router: RouterProcess, tmp_path: Path) -> Path:
    """A directory beside the root, with links to it and to a file of it below the root."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret").write_text("secret")
    (router.root / "directory").symlink_to(place)
    (router.root / "file").symlink_to(place / "secret")
    return place


@pytest.mark.parametrize("path", ["directory/secret", "file"])
def test_nothing_outside_is_read(
    router: RouterProcess, gateway: Gateway, outside: Path, tmp_path: Path, path: str
) -> None:
    with pytest.raises(TransferFailure) as caught:
        get(gateway, path, tmp_path / "copy")
    assert caught.value.kind in (ErrorClass.NOT_FOUND, ErrorClass.PERMISSION_DENIED, ErrorClass.NOT_SUPPORTED)
    assert not (tmp_path / "copy").exists()


def test_nothing_outside_is_written(router: RouterProcess, gateway: Gateway, outside: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("new")
    with pytest.raises(TransferFailure):
        put(gateway, tmp_path / "source", "directory/new")
    put(gateway, tmp_path / "source", "file")  # the link itself is replaced
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_text() == "secret"
