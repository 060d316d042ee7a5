"""A router that is started while its root takes no writes, after a death in the middle of something."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlay_router.local import small_files
from overlay_router.local.store import PackIntent
from overlay_router.local.tree import Tree
from stageout.core import durable
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Operation
from tests.unit.test_overlay_destination import ORIGIN, PEER, Crash, Router, op

_STEPS = (
    "allocate", "delete", "discard", "finish", "mkdir", "parents", "prepare-dir", "publish", "rename", "setattr",
)  # fmt: skip
_CHANGES = {
    "publish": op(9, "publish", "a/b/new", parents=True),
    "mkdir": op(9, "mkdir", "made"),
    "rename": op(9, "rename", "f", target="g"),
    "delete": op(9, "delete", "f"),
    "setattr": op(9, "setattr", "f", mode=0o600, attributes=("mode",)),
}


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path / "router")
    yield made
    made.close()


@contextmanager
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        text = " ".join(f"overlay-{step}=EROFS" for step in _STEPS)
        patched.setattr(durable, "_faults", durable.parse_faults(text))
        yield


def _dies(router: Router, operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its INTENT, before the first system call."""

    def dead(*place: object) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(router.place, "_change_all", dead)
        with pytest.raises(Crash):
            router.send(operation, b"data")


@pytest.mark.parametrize("kind", _CHANGES)
def test_a_change_that_was_begun_is_made_when_its_root_takes_writes_again(
    router: Router, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert router.send(op(1, "publish", "f"), b"abc") == "done"
    assert router.send(op(2, "publish", "other"), b"abc") == "done"
    _dies(router, _CHANGES[kind], monkeypatch)
    before = router.content()
    with read_only(monkeypatch):
        router.restart()
        assert router.content() == before
        with pytest.raises(OSError, match="Read-only"):
            router.send(_CHANGES[kind], b"data")
    assert router.send(_CHANGES[kind], b"data") == "done"
    assert kind == "setattr" or router.content() != before
    assert not router.store.intents()


def test_a_change_that_was_begun_and_of_which_nobody_asks_is_made_at_the_next_start(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert router.send(op(1, "publish", "f"), b"abc") == "done"
    _dies(router, _CHANGES["rename"], monkeypatch)
    with read_only(monkeypatch):
        router.restart()
    router.restart()
    assert router.content() == {"g": "abc"}
    (reply,) = router.place.status(messages.Status(ORIGIN, 9), PEER)
    assert isinstance(reply.message, messages.Result)
    assert reply.message.outcome == "done"


def test_what_is_left_of_packs_and_lots_is_removed_later(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    packs, lots = (router.root / ".stageout" / name for name in ("packs", "lots"))
    for place in (packs, lots):
        (place / "1").write_bytes(b"left")
    router.store.intend_packs([PackIntent(ORIGIN, 10**6, [(5, "small", 12345)])])

    def fails(*place: object, **more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(small_files.os, "unlink", fails)
        patched.setattr(Path, "unlink", fails)
        router.restart()
        assert (packs / "1").exists()
        assert (lots / "1").exists()
    router.restart()
    assert [*packs.iterdir(), *lots.iterdir()] == []
    assert not router.store.pack_intents()


def test_a_router_starts_on_a_read_only_root_in_which_something_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*place: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    router = Router(tmp_path)
    assert router.send(op(1, "publish", "f"), b"abc") == "done"
    router.tree.staging(99).write_bytes(b"left")
    with monkeypatch.context() as patched:
        patched.setattr(Tree, "discard", read_only)
        patched.setattr(Tree, "empty_trash", read_only)
        router.restart()
    assert (router.content(), len(router.leftovers())) == ({"f": "abc"}, 1)
    router.restart()
    assert router.leftovers() == []
    router.close()
