"""Changes of names above many records, noted at once and carried out on a few records at a time.

A directory gets another name in one system call, whatever is below it. Where a record's file is follows from the path
that it has, the number of the last change that this path counts in, and the changes that were noted since
(docs/developer/decisions/0033-records-follow.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SCHEMA = """
CREATE TABLE content_moves (
    number INTEGER PRIMARY KEY AUTOINCREMENT, path BLOB NOT NULL, target BLOB, reached BLOB NOT NULL);
"""


class Move(NamedTuple):
    """A name and all below it that went elsewhere.

    :param number: never used twice. :param target: None: they were removed. :param reached: records behind that path
        are still to be looked at.
    """

    number: int
    path: bytes
    target: bytes | None
    reached: bytes


def is_within(path: bytes, directory: bytes) -> bool:
    """Tell whether it is that directory, or below it."""
    return path == directory or path.startswith(directory + b"/")


def below(directory: bytes) -> tuple[bytes, bytes]:
    """The first path that may be below a directory, and the first behind all of them."""
    return directory + b"/", directory + b"0"


def followed(path: bytes, since: int, moves: Sequence[Move]) -> bytes | None:
    """Where the file of a record is, None when it was removed. :param since: the last move that ``path`` counts in."""
    for move in moves:
        if move.number > since and is_within(path, move.path):
            if move.target is None:
                return None
            path = move.target + path[len(move.path) :]
    return path


def sources(path: bytes, moves: Sequence[Move]) -> list[bytes]:
    """At or below which paths the records may be of what is at or below this one; others may be there, too."""
    places, found = {path}, {path}
    for move in reversed(moves):
        if move.target is not None:
            places = {place for one in places for place in _before(one, move.path, move.target)}
            found |= places
    return sorted(found)


def _before(path: bytes, source: bytes, target: bytes) -> tuple[bytes, ...]:
    """The places before a move of everything at or below a path; anything at its target was gone by then."""
    if is_within(path, target):
        return (source + path[len(target) :],)
    return (path, source) if is_within(target, path) else (path,)
