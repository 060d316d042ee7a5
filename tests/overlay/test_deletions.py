"""Directories that are deleted at a real router: any depth, any number of files, and nobody waits for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.core.errors import TransferFailure
from stageout.movers import trees
from stageout.overlay.channel import Gateway
from stageout.overlay.operations import Session
from tests.harness.router import RouterProcess
from tests.polling import wait_for

#: As deep as a path of the protocol may be, nearly.
LEVELS = 1500
FILES = 30_000


@pytest.fixture
def router(router: RouterProcess) -> Iterator[RouterProcess]:
    """At the end nothing is left that would be too deep for whoever removes the directories of tests."""
    yield router
    router.stop()
    for path in router.root.iterdir():
        trees.remove(router.root, path.name)


def left(router: RouterProcess) -> list[Path]:
    """The deleted names that still exist."""
    return [*(router.root / ".stageout/trash").iterdir()]


def gone(router: RouterProcess) -> None:
    wait_for(lambda: not left(router), "what was deleted to be removed")


def make_deep(parent: Path, name: str, depth: int) -> None:
    """Directories in each other; paths of such a depth are longer than the kernel takes."""
    inner = os.open(parent, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=inner)
        outer, inner = inner, os.open(name, os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)


def test_a_deep_directory_is_deleted(router: RouterProcess, gateway: Gateway) -> None:
    with Session(gateway) as session:
        session.mkdir("/".join(["d"] * LEVELS), parents=True)
        session.push()
        session.delete("d")
        session.push()
        gone(router)
        session.mkdir("d")
        session.push()
    router.stop()
    router.start()
    assert [path.name for path in router.root.iterdir() if path.name != ".stageout"] == ["d"]


def test_two_that_were_put_into_each_other_are_deleted(router: RouterProcess, gateway: Gateway) -> None:
    """Deeper than any path that could be named."""
    deep = "/".join(["d"] * LEVELS)
    with Session(gateway) as session:
        session.mkdir(f"one/{deep}", parents=True)
        session.mkdir(f"other/{deep}", parents=True)
        session.rename("other", f"one/{deep}/other")
        session.delete("one")
        session.push()
        assert list(session.entries("")) == []
    gone(router)


def test_a_router_starts_with_a_deep_tree_in_its_trash(router: RouterProcess, gateway: Gateway) -> None:
    router.stop()
    make_deep(router.root / ".stageout/trash", "1.1", 2 * LEVELS)
    router.start()
    with Session(gateway) as session:
        assert list(session.entries("")) == []
    gone(router)


def test_a_router_that_is_killed_meanwhile_goes_on_at_its_next_start(router: RouterProcess, gateway: Gateway) -> None:
    fill(router.root / "many", FILES // 10)
    router.kill()
    armed = router.home / "armed"
    armed.touch()
    router.environment["STAGEOUT_FAULTS"] = f"overlay-empty=kill-before@{armed}"
    router.start()
    with Session(gateway) as session, contextlib.suppress(TransferFailure):
        session.delete("many")
        session.push()
    router.wait_for_end()
    assert left(router)
    router.start()
    with Session(gateway) as session:
        assert list(session.entries("")) == []
    gone(router)


def fill(directory: Path, files: int) -> None:
    directory.mkdir()
    place = os.open(directory, os.O_RDONLY)
    for number in range(files):
        os.close(os.open(f"f{number}", os.O_WRONLY | os.O_CREAT, dir_fd=place))
    os.close(place)


def test_others_go_on_while_many_files_are_removed(router: RouterProcess, gateway: Gateway) -> None:
    """The client that deletes them gets its answer at once, too."""
    fill(router.root / "many", FILES)
    served = 0
    with Session(gateway) as session, Session(gateway) as other:
        other.mkdir("other")
        other.push()
        session.delete("many")
        session.push()
        while left(router):
            other.mkdir(f"other/{served}")
            other.push()
            served += bool(left(router))
    assert served, "nobody was served before the last file had gone"


def test_links_in_what_is_deleted_are_not_followed(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    fill(outside, 3)
    with Session(gateway) as session:
        session.mkdir("d/e", parents=True)
        session.push()
        (router.root / "d/e/link").symlink_to(outside)
        session.delete("d")
        session.push()
    gone(router)
    assert len([*outside.iterdir()]) == 3
