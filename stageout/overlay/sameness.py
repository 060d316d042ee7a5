"""Which of many files are the same here and at a router, so that they need not be transferred.

By their digests where the router knows them. Else by size and time: the later one was changed last when the other had
been transferred, so it is taken for its copy. Clocks may differ: the router has said how late it is there.

A listing says size and time of all files of a directory in one answer, but no digests. Those matter for files that are
too large for packs; such a file is asked for by its name if it has the right size.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Optional, TypeVar

from stageout.core.errors import ErrorClass
from stageout.overlay.asking import Asking
from stageout.overlay.sources import AnyPath
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES, Answer, List, Stat
from stageout.overlay.wire.packs import MAX_FILE_BYTES

#: Between two times that are told apart: they are said in seconds, and the way of a clock's time takes some.
MARGIN_S = 5
#: Files that are looked at together.
_TOGETHER = 4096
#: A directory there may have so many names, and so many for each one that is looked for, to be listed to its end.
_MOST_OTHERS, _MOST_OTHERS_EACH = 1024, 16
Key = TypeVar("Key")
#: The caller's key, a file here, its name below the router's root, and the listed properties of that name.
Pair = tuple[Key, AnyPath, str, Optional[Answer]]


def compared(asking: Asking, pairs: Iterable[Pair[Key]], *, is_put: bool) -> Iterator[tuple[Key, bool]]:
    """For each pair in order, whether both are the same.

    :param is_put: what is here is to go there; else the other way.
    :raises TransferFailure: the router cannot be reached.
    """
    there, ordered, before = _There(asking), iter(pairs), None
    while some := list(islice(ordered, _TOGETHER)):
        here = {path: status for _, local, path, _ in some if (status := _status(local)) is not None}
        known = {path: entry for _, _, path, entry in some if entry is not None}
        behind = _directory(some[-1][2]) if len(some) == _TOGETHER else None
        found = there.entries(here, known, {before, behind}, is_put)
        before = behind
        for key, local, path, _ in some:
            both = path in here and path in found
            yield key, both and is_same(local, here[path], found[path], asking.ahead_s, is_put)


def is_same(local: AnyPath, here: os.stat_result, there: Answer, ahead_s: int, is_put: bool) -> bool:
    """Tell whether a file here is the one there.

    :param ahead_s: of the router's clock, before ours. :param is_put: as of :func:`compared`.
    """
    if not _is_alike(here, there, is_put):
        return False
    if there.manifest and there.digest in frames.digests():
        return _manifest(local, there.digest) == there.manifest
    modified = there.modified[0] - ahead_s
    if is_put:
        return max(here.st_mtime, here.st_ctime) + MARGIN_S <= modified
    return modified + MARGIN_S <= here.st_mtime


def _is_alike(here: os.stat_result, there: Answer, is_put: bool) -> bool:
    """Tell whether both may be the same, as far as can be seen without digests and times."""
    if there.code or there.note or there.kinds != ("file",) or there.sizes_bytes != (here.st_size,):
        return False
    return not is_put or there.modes == (here.st_mode & 0o777,)


def _status(local: AnyPath) -> os.stat_result | None:
    """Of a file; None where there is none."""
    try:
        found = os.lstat(local)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _manifest(local: AnyPath, kind: str) -> str:
    """As of a PUBLISH; "" where it cannot be read."""
    digest, whole = frames.digests()[kind], hashlib.sha256()
    try:
        with open(local, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                whole.update(digest(block))
    except OSError:
        return ""
    return whole.hexdigest()


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


class _There:
    """Return the files of this machine that a router has, too."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self._may_list = asking, True

    def entries(
        self,
        here: Mapping[str, os.stat_result],
        known: Mapping[str, Answer],
        parted: Collection[str | None],
        is_put: bool,
    ) -> dict[str, Answer]:
        """Return the existing entries by name. A name that is missing is not there.

        :param known: from a listing. :param parted: directories with further files here, which are not listed again
            and again.
        """
        found = {path: entry for path, entry in known.items() if path in here}
        wanted: dict[str, set[str]] = {}
        for path in here:
            if path not in known and _directory(path) not in parted:
                wanted.setdefault(_directory(path), set()).add(path)
        listed = self._listed(wanted, found)
        by_name = []
        for path, status in here.items():
            if path in found:
                if status.st_size > MAX_FILE_BYTES and _is_alike(status, found[path], is_put):
                    by_name.append(path)
            elif _directory(path) not in listed:
                by_name.append(path)
        answers = (one for one in self._asking.answers([Stat(path) for path in by_name]) if one is not None)
        return {**found, **dict(zip(by_name, answers))}

    def _listed(self, wanted: Mapping[str, set[str]], found: dict[str, Answer]) -> set[str]:
        """Add to ``found`` what there is of the names in some directories. Returns the directories that are known now.

        From the first one on that has much more in it than is here, nothing is listed any more.
        """
        left, listed, entries = deque(wanted if self._may_list else ()), set[str](), 0
        for page in self._asking.answers([List(directory) for directory in left]):
            if page is None:
                entries = 0
                continue
            directory = left[0]
            entries += max(1, len(page.names))
            _add(directory, page, wanted[directory], found)
            if not page.more:
                left.popleft()
                entries = 0
                if page.code in (0, ErrorClass.NOT_FOUND.code):
                    listed.add(directory)
            elif entries > _MOST_OTHERS + _MOST_OTHERS_EACH * len(wanted[directory]):
                self._may_list = False
                self._asking.close()
                break
        return listed


def _add(directory: str, page: Answer, wanted: Collection[str], found: dict[str, Answer]) -> None:
    """Those of a listing's names that are wanted, each as if it had been asked for."""
    prefix = f"{directory}/" if directory else ""
    for name, kind, size_bytes, mode, modified in zip(
        page.names, page.kinds, page.sizes_bytes, page.modes, page.modified
    ):
        if prefix + name in wanted:
            found[prefix + name] = Answer((name,), (kind,), (size_bytes,), (mode,), (modified,))
