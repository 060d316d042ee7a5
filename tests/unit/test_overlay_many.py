"""Many files to one router: what becomes of names that come twice."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.many import Crew, _Large, _Mixed
from stageout.overlay.packs import SmallPut


class _Router:
    """Takes files of one directory in a pack, and no others; it answers when it is waited for."""

    def __init__(self, mixed: list[_Mixed[Any]]) -> None:
        self._mixed, self._pack, self.stored = mixed, list[tuple[object, str, str]](), dict[str, str]()

    def has(self, path: str) -> bool:
        return any(file[2] == path for file in self._pack)

    def add(self, key: object, local: Path, path: str) -> bool:
        if self.has(path):
            self.finish()
        if local.name != "large":
            self._pack.append((key, local.name, path))
        return local.name != "large"

    def cut(self) -> None:
        self.finish()

    def finish(self) -> None:
        pack, self._pack = self._pack, []
        is_mixed = len({path.rpartition("/")[0] for _, _, path in pack}) > 1
        for key, local, path in pack:
            if is_mixed:
                self._mixed[0].ended(key, TransferFailure(ErrorClass.NOT_SUPPORTED, "unpacked"))
            else:
                self.stored[path] = local
                self._mixed[0].ended(key, SmallPut(1, "", "", 1))


def _kept(place: Path, *files: tuple[str, str]) -> dict[str, str]:
    """The local files with these names and paths that are there in the end. One is large, and slow."""
    mixed, ended, small_ones_ended = list[_Mixed[Any]](), list[object](), threading.Event()
    router = _Router(mixed)

    def put(local: Path, path: str, **more: object) -> Any:
        small_ones_ended.wait(0.05)
        router.stored[path] = local.name

    def end(key: object, result: object) -> None:
        ended.append(key)

    for name, _ in files:
        (place / name).touch()
    with Crew(2) as crew:
        mixed.append(_Mixed(end, _Large(put, crew, end, lambda key, sent_bytes: None)))
        mixed[0].send([(object(), place / local, path) for local, path in files], cast(Any, router))
        small_ones_ended.set()
    assert len(ended) == len(files)
    return router.stored


def test_the_last_of_a_name_stays_also_when_the_pack_of_the_first_was_refused(tmp_path: Path) -> None:
    assert _kept(tmp_path, ("old", "a/f"), ("x", "b/g"), ("new", "a/f")) == {"a/f": "new", "b/g": "x"}


def test_the_last_of_a_name_stays_also_when_the_first_went_by_itself(tmp_path: Path) -> None:
    assert _kept(tmp_path, ("large", "a/f"), ("new", "a/f")) == {"a/f": "new"}
