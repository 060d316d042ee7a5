"""Deletion of files (``-delete``), which only ``stageout check`` asks for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stageout.core.classads import unparse_ad
from stageout.core.errors import ErrorClass as K
from stageout.testing.starter import PREALLOCATED_BYTES, read_results


def delete(executable: Path, folder: Path, url: str) -> tuple[bool, int]:
    """Delete one URL; whether it succeeded, and the error's code."""
    (folder / "in").write_text(unparse_ad({"Url": url, "LocalFileName": str(folder / "none")}))
    (folder / "out").write_text(" " * PREALLOCATED_BYTES)
    env = {"STAGEOUT_MOVER": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    words = [str(executable), "-infile", str(folder / "in"), "-outfile", str(folder / "out"), "-delete"]
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    (ad,), _ = read_results((folder / "out").read_text())
    assert (done.returncode == 0) == (ad["TransferSuccess"] is True), done.stderr
    return ad["TransferSuccess"] is True, ad["DeveloperData"].get("StageOutErrorCode", 0)


@pytest.mark.parametrize("scheme", ["http", "dav"])
def test_http(executable, nginx, tmp_path, scheme):
    nginx.file("dir").mkdir(exist_ok=True)
    nginx.file("dir").chmod(0o777)
    nginx.file("dir/gone").write_text("x")
    nginx.file("dir/stays").write_text("x")
    url = f"{scheme}://{nginx.url('dir/gone').partition('://')[2]}"
    assert delete(executable, tmp_path, url) == (True, 0)
    assert not nginx.file("dir/gone").exists()
    assert delete(executable, tmp_path, url) == (True, 0)
    assert nginx.file("dir/stays").exists()


def test_a_refusal_is_classified(executable, nginx, tmp_path):
    nginx.file("kept").write_text("x")
    nginx.refuse("no deletions here")
    try:
        assert delete(executable, tmp_path, nginx.url("kept")) == (False, K.PERMISSION_DENIED.code)
    finally:
        nginx.accept()
    assert nginx.file("kept").exists()


def test_ftp(executable, ftp, tmp_path):
    url = ftp.url("gone")
    (ftp.root / "gone").write_text("x")
    assert delete(executable, tmp_path, url) == (True, 0)
    assert not (ftp.root / "gone").exists()
    assert delete(executable, tmp_path, url) == (True, 0)


def test_ftp_refusal_of_a_file_that_is_there(executable, ftp, tmp_path):
    (ftp.root / "never").mkdir()
    (ftp.root / "never/kept").write_text("x")
    assert delete(executable, tmp_path, ftp.url("never/kept")) == (False, K.PERMISSION_DENIED.code)
    assert (ftp.root / "never/kept").exists()
    assert delete(executable, tmp_path, ftp.url("never/gone")) == (True, 0)


def test_file(executable, tmp_path):
    (tmp_path / "gone").write_text("x")
    assert delete(executable, tmp_path, f"file://{tmp_path}/gone") == (True, 0)
    assert not (tmp_path / "gone").exists()
    (tmp_path / "folder").mkdir()
    assert not delete(executable, tmp_path, f"file://{tmp_path}/folder")[0]
    assert (tmp_path / "folder").is_dir()


def test_upload_and_delete_exclude_each_other(executable, tmp_path):
    words = [str(executable), "-infile", "x", "-outfile", str(tmp_path / "out"), "-delete", "-upload"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
