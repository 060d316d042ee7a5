"""``stageout put -r`` and ``get -r`` with ``https://``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool.waiting import wait_until
from tests.overlay.between import Between
from tests.overlay.http_site import Site, site
from tests.overlay.https_commands import Commands

_MIB = 1 << 20


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("router")) as running:
        yield running


@pytest.fixture
def run(here: Site, tmp_path: Path) -> Commands:
    return Commands(here, tmp_path)


def _tree(top: Path) -> Path:
    (top / "sub/deep").mkdir(parents=True)
    (top / "empty/inner").mkdir(parents=True)
    for number in range(200):
        (top / f"sub/f{number:03}").write_bytes(b"%d" % number)
    for name, size in (("zero", 0), ("one", _MIB), ("sub/deep/eight", 8 * _MIB), ("large", 8 * _MIB + 1)):
        (top / name).write_bytes(os.urandom(size))
    for name in ("with space", "50%", "ünï", os.fsdecode(b"no \xff text"), "a?b#c"):
        (top / "sub" / name).write_text(name, errors="surrogateescape")
    (top / "one").chmod(0o750)
    return top


def _below(place: Path) -> dict[str, tuple[bytes, int]]:
    found = {path: str(path.relative_to(place)) for path in place.rglob("*") if not path.is_symlink()}
    return {
        name: (path.read_bytes(), path.stat().st_mode & 0o777) if path.is_file() else (b"", 0)
        for path, name in found.items()
    }


def test_there_and_back(run: Commands, here: Site, tmp_path: Path) -> None:
    tree, back = _tree(tmp_path / "tree"), tmp_path / "back"
    *files, total = run("put", "-r", str(tree), run.url("t"))
    count = sum(path.is_file() for path in tree.rglob("*"))
    assert (total["kind"], total["files"], total["failed"]) == ("total", count, 0)
    assert {one["outcome"] for one in files} == {"done"} and len(files) == count
    assert _below(here.root / "t") == _below(tree)
    *files, total = run("get", "-r", run.url("t"), str(back))
    assert (total["files"], total["failed"], len(files)) == (count, 0, count)
    assert _below(back) == _below(tree) and not list(back.rglob("*.part"))


def test_entries_that_are_no_files_fail_alone(run: Commands, here: Site, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_text("content")
    (tmp_path / "tree/link").symlink_to("f")
    (here.root / "mixed/name").mkdir(parents=True)
    (tmp_path / "tree/name").write_text("a directory is in the way")
    *files, total = run("put", "-r", str(tmp_path / "tree"), run.url("mixed"), status=1)
    assert (total["files"], total["failed"]) == (1, 2)
    outcomes = {one["path"]: (one["outcome"], one["error_class"]) for one in files}
    assert outcomes["mixed/link"] == ("failed", "NOT_SUPPORTED") and outcomes["mixed/f"] == ("done", "")
    assert outcomes["mixed/name"][0] == "failed"
    (here.root / "mixed/link").symlink_to("f")
    *files, total = run("get", "-r", run.url("mixed"), str(tmp_path / "back"), status=1)
    assert (total["files"], total["failed"]) == (1, 1) and "link: is not a file" in run.err
    (none,) = run("get", "-r", run.url("none"), str(tmp_path / "none"), status=1)
    assert none["error_class"] == "NOT_FOUND" and not (tmp_path / "none").exists()


def test_connections_that_are_cut(run: Commands, here: Site, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(100):
        (tree / f"f{number}").write_bytes(os.urandom(300_000))
    with Between(here.router.port, bytes_s=5e6) as between:
        for words in (
            ("put", "-r", str(tree), f"https://localhost:{between.port}/cut"),
            ("get", "-r", f"https://localhost:{between.port}/cut", str(tmp_path / "back")),
        ):
            heard, between.bytes_s = len(between.heard), 5e6
            process = run.begun(*words)
            while len(between.heard) < heard + 6 * _MIB and process.poll() is None:
                pass
            between.cut()
            between.bytes_s = 0
            *_, total = run.ended(process)
            assert (total["files"], total["failed"]) == (100, 0)
    assert _below(here.root / "cut") == _below(tree) == _below(tmp_path / "back")


def test_update_moves_the_rest(run: Commands, here: Site, tmp_path: Path) -> None:
    tree, back = _tree(tmp_path / "tree"), tmp_path / "back"
    old = 1_600_000_000
    for path in tree.rglob("*"):
        os.utime(path, (old, old))
    count = sum(path.is_file() for path in tree.rglob("*"))

    def moved(*words: str) -> tuple[set[str], int]:
        *files, total = run(*words, "--update")
        done = {one["path"][len("u/") :] for one in files if one["outcome"] == "done"}
        assert total["files"] == len(done) and total["failed"] == 0
        return done, total["unchanged"]

    # files that were changed in the seconds before they were sent may have been changed behind that, too
    changed = max(path.stat().st_ctime for path in tree.rglob("*"))
    wait_until(lambda: time.time() > changed + 4, what="times that are told apart")
    assert moved("put", "-r", str(tree), run.url("u"))[1] == 0
    assert moved("put", "-r", str(tree), run.url("u")) == (set(), count)
    (tree / "sub/f007").write_bytes(b"longer")
    (here.root / "u/sub/f009").unlink()
    done, same = moved("put", "-r", str(tree), run.url("u"))
    assert (done, same) == ({"sub/f007", "sub/f009"}, count - 2)
    assert moved("get", "-r", run.url("u"), str(back))[1] == 0
    assert moved("get", "-r", run.url("u"), str(back)) == (set(), count)
    (back / "large").unlink()
    done, same = moved("get", "-r", run.url("u"), str(back))
    assert (done, same) == ({"large"}, count - 1)
    assert {name: one for name, one in _below(back).items() if one[0]} == {
        name: one for name, one in _below(tree).items() if one[0]
    }
