"""Many files to one router: small ones in packs, large ones side by side, each on connections of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put, put
from stageout.overlay.packs import AnyPath, Packer, SmallPut
from stageout.wire.route import Route

Key = TypeVar("Key")
Ended = Callable[[Key, Union[Put, SmallPut, TransferFailure]], None]


class Found(NamedTuple):
    """Something below a directory. :param path: from there. :param kind: "file", "empty" (a directory) or "other"."""

    local: str
    path: str
    kind: str


def put_many(
    gateway: Gateway,
    files: Iterable[tuple[Key, AnyPath, str]],
    ended: Ended[Key],
    *,
    connections: int = 2,
    routes: Sequence[Route] = ((),),
    at_once: int = 2,
    progress: Callable[[Key, int], None] = lambda key, sent_bytes: None,
) -> None:
    """Send files: key, local file, path below the router's root. On return every one has ended.

    :param ended: called once for each, never twice at a time: it is at its destination, whole and checked, or failed.
    :param connections: of one large file. :param routes: ways to the router.
    :param at_once: large files. :param progress: of large files.
    """
    lock = threading.Lock()

    def end(key: Key, result: Put | SmallPut | TransferFailure) -> None:
        with lock:
            ended(key, result)

    def put_large(key: Key, local: Path, path: str) -> None:
        try:
            done = put(
                gateway, local, path, mode=_mode(local), connections=connections, routes=routes,
                progress=lambda sent_bytes: progress(key, sent_bytes),
            )  # fmt: skip
        except TransferFailure as failure:
            end(key, failure)
        else:
            end(key, done)

    with ThreadPoolExecutor(at_once) as pool, _Small(gateway, end, routes) as small:
        for key, local, path in files:
            if not small.add(key, local, path):
                pool.submit(put_large, key, Path(local), path)
        small.finish()


class _Small(Generic[Key]):
    """A packer that fails file by file."""

    def __init__(self, gateway: Gateway, ended: Ended[Key], routes: Sequence[Route]) -> None:
        self._ended = ended
        self._packer = Packer(gateway, ended, routes)
        self._failure: TransferFailure | None = None

    def __enter__(self) -> _Small[Key]:
        return self

    def __exit__(self, *exception: object) -> None:
        self._packer.close()

    def add(self, key: Key, local: AnyPath, path: str) -> bool:
        """Send a file; False for one that is too large."""
        if self._failure:
            self._ended(key, self._failure)
            return True
        try:
            return self._packer.add(key, local, path)
        except TransferFailure as failure:
            self._fail(failure, key)
            return True

    def finish(self) -> None:
        """Wait for all."""
        try:
            if not self._failure:
                self._packer.finish()
        except TransferFailure as failure:
            self._fail(failure)

    def _fail(self, failure: TransferFailure, *keys: Key) -> None:
        self._failure = failure
        for key in dict.fromkeys([*self._packer.keys(), *keys]):
            self._ended(key, failure)


def _mode(local: Path) -> int:
    """Permissions of a file. :raises TransferFailure: LOCAL_FILE."""
    try:
        return local.stat().st_mode & 0o777
    except OSError as problem:
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}") from None


def below(directory: Path) -> Iterator[Found]:
    """Files below a directory, empty directories, and what is neither; symbolic links are not followed.

    :raises TransferFailure: LOCAL_FILE, a directory cannot be read.
    """
    waiting = [(str(directory), "")]
    while waiting:
        local, prefix = waiting.pop()
        try:
            with os.scandir(local) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}") from None
        if not found and prefix:
            yield Found(local, prefix.rstrip("/"), "empty")
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, f"{prefix}{entry.name}/"))
            else:
                is_file = entry.is_file(follow_symlinks=False)
                yield Found(entry.path, prefix + entry.name, "file" if is_file else "other")
