"""The directories that a router keeps data in are on the disk before anything is in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlay_router.local.tree import OWN
from stageout.core import durable
from tests.unit.test_overlay_custodian import Spooling

LABEL, SIZE_BYTES = "router-place", 1000


class _Death(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_custodian_that_dies_while_it_makes_its_place_makes_it_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, after: bool
) -> None:
    real, passed = durable.step, list[str]()

    @contextmanager
    def step(name: str) -> Iterator[None]:
        passed.extend([name] * (name == LABEL))
        is_hit = name == LABEL and len(passed) == nth
        if is_hit and not after:
            raise _Death
        with real(name):
            yield
        if is_hit:
            raise _Death

    spooling = Spooling(tmp_path, SIZE_BYTES)
    spooling.close()
    shutil.rmtree(tmp_path / OWN)
    with monkeypatch.context() as patched:
        patched.setattr(durable, "step", step)
        with pytest.raises(_Death):
            spooling.open()
    assert len(passed) == nth
    spooling.store.close()
    spooling.open()
    spooling.take()
    assert len(spooling.one.held()) == 1
    spooling.close()


def test_each_directory_is_made_before_the_one_that_holds_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def sync(label: str, place: Path) -> None:
        if label == LABEL:
            seen.append((str(place.relative_to(tmp_path)), sorted(one.name for one in place.iterdir())))

    monkeypatch.setattr(durable, "sync", sync)
    Spooling(tmp_path, SIZE_BYTES).close()
    own, root, spool = seen
    assert (root[0], own[0]) == (".", spool[0])
    assert own[0] in root[1]
    assert own[1] == ["place", "staging", "trash"]
    assert "packs" in spool[1]
