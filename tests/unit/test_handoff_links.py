"""The plugin's side of a hand-off takes files out of the job's scratch directory, and out of no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stageout.handoff import links
from stageout.handoff.links import CannotOffer


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    place = tmp_path / "scratch"
    place.mkdir()
    return place


@pytest.mark.parametrize("elsewhere", ["scratch-of-another", "other"])
def test_link_out_of_the_scratch_directory_is_refused(scratch: Path, elsewhere: str) -> None:
    secret = scratch.parent / elsewhere / "secret"
    secret.parent.mkdir()
    secret.write_text("secret")
    (scratch / "out").symlink_to(secret)
    (scratch / "directory").symlink_to(secret.parent)
    for name in ("out", "directory/secret"):
        with pytest.raises(CannotOffer, match="outside the scratch directory"):
            links.sources([str(scratch / name)], str(scratch))


def test_link_inside_the_scratch_directory_is_followed(scratch: Path) -> None:
    (scratch / "file").write_text("abc")
    (scratch / "out").symlink_to("file")
    (found,) = links.sources([str(scratch / "out")], str(scratch))
    assert (found.path, found.size_bytes) == (str(scratch / "file"), 3)


def test_link_that_replaces_a_file_meanwhile_is_not_copied(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are made where links cannot be; between the look and the copy the job may put a link there."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "intake").mkdir()
    (scratch / "out").write_text("abc")
    found = links.sources([str(scratch / "out")], str(scratch))
    (scratch / "out").unlink()
    (scratch / "out").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(links, "_linked", lambda *arguments: False)
    with pytest.raises(OSError, match="symbolic links"):
        links.bring(found, os.fspath(tmp_path / "intake"), lambda: None)
    assert not list((tmp_path / "intake").iterdir())
