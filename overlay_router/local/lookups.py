"""The names below the root, for STAT and LIST: no symbolic link is followed, and memory is bounded by a page."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from json.encoder import encode_basestring_ascii

from overlay_router.below import OWN, BadPath, checked, failure_class
from overlay_router.local.tree import Tree
from stageout.overlay.wire.fields import MAX_ENTRIES
from stageout.overlay.wire.messages import Answer

_PAGE_BYTES = 128 * 1024
_MESSAGE_CHARS = 1000


def refusal(path: str, problem: OSError | BadPath) -> Answer:
    """The ANSWER that says why there is none."""
    text = str(problem) if isinstance(problem, BadPath) else f"{path}: {problem.strerror}"
    return Answer(code=failure_class(problem).code, message=text[:_MESSAGE_CHARS])


def entry(tree: Tree, path: str) -> Answer:
    """One name, without its generation."""
    try:
        return _page([(path.rpartition("/")[2], tree.status(checked(path) if path else ""))])
    except (OSError, BadPath) as problem:
        return refusal(path, problem)


def pages(tree: Tree, path: str) -> Iterator[Answer]:
    """A directory's entries as they come from the disk; the last page has no ``more``. One page is held at a time."""
    try:
        with tree.scan(checked(path) if path else "") as entries:
            names = (one for one in entries if path or one.name != OWN)
            yield from _pages(names)
    except (OSError, BadPath) as problem:
        yield refusal(path, problem)


def _pages(entries: Iterator[os.DirEntry[str]]) -> Iterator[Answer]:
    found: list[tuple[str, os.stat_result]] = []
    size_bytes = 0
    for one in entries:
        try:
            found.append((one.name, one.stat(follow_symlinks=False)))
        except FileNotFoundError:
            continue  # deleted meanwhile
        size_bytes += len(encode_basestring_ascii(one.name))
        if size_bytes >= _PAGE_BYTES or len(found) == MAX_ENTRIES:
            yield replace(_page(found), more=True)
            found, size_bytes = [], 0
    yield _page(found)


def _page(found: list[tuple[str, os.stat_result]]) -> Answer:
    return Answer(
        names=tuple(name for name, _ in found),
        kinds=tuple(_kind(status.st_mode) for _, status in found),
        sizes_bytes=tuple(status.st_size for _, status in found),
        modes=tuple(status.st_mode & 0o777 for _, status in found),
        modified=tuple(max(0, int(status.st_mtime)) for _, status in found),
    )


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"
