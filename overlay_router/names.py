"""Changes of names at the terminal: what an INTENT says and how recovery knows whether it happened (rule 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overlay_router.states import Kind, Op
from stageout.wire.graph import below, touched


class Entry(NamedTuple):
    """What a name points to. ``content`` is None for a directory."""

    inode: int
    content: object = None
    attrs: int = 0

    @property
    def is_dir(self) -> bool:
        """Whether the entry is a directory."""
        return self.content is None


Names = dict[str, Entry]


class Intent(NamedTuple):
    """Made durable before the system call: the entry that will be moved, so that its inode decides later."""

    op: Op
    entry: Entry


def parent(path: str) -> str:
    """The directory of a path ("" is the root)."""
    return path.rpartition("/")[0]


def trash(op: Op) -> str:
    """Where DELETE renames to, so that recovery can test it (rule 2)."""
    return f".stageout/trash/{op.origin}.{op.seq}"


def bumped(generations: Mapping[str, int], op: Op) -> dict[str, int]:
    """New generations of the names that a DONE operation changed; to be stored with its result (rule 6)."""
    return {path: generations.get(path, 0) + 1 for path in touched(op)}


def _has_dir(names: Names, path: str) -> bool:
    return path == "" or (path in names and names[path].is_dir)


def refusal(names: Names, op: Op, generation: int = 0) -> str:
    """Why the operation cannot be executed on these names: "precondition", "conflict", or "" if it can.

    ``generation`` is the present one of ``op.path``.
    """
    here = names.get(op.path)
    if (op.absent and here is not None) or op.generation not in (-1, generation):
        return "precondition"
    if op.kind is Kind.PUBLISH:
        good = _has_dir(names, parent(op.path)) and not (here is not None and here.is_dir)
    elif op.kind is Kind.MKDIR:
        good = _has_dir(names, parent(op.path)) and here is None
    elif op.kind is Kind.RENAME:
        good = here is not None and _may_rename(names, op, here)
    else:
        good = here is not None
    return "" if good else "conflict"


def _may_rename(names: Names, op: Op, source: Entry) -> bool:
    if op.target == op.path or below(op.target, op.path) or not _has_dir(names, parent(op.target)):
        return False
    there = names.get(op.target)
    return there is None or not (source.is_dir or there.is_dir)


def intent(names: Names, op: Op, inode: int, content: object) -> Intent:
    """What to make durable before the system call; ``inode`` is the staging file's (or the new directory's)."""
    if op.kind is Kind.PUBLISH:
        return Intent(op, Entry(inode, content))
    if op.kind is Kind.MKDIR:
        return Intent(op, Entry(inode))
    return Intent(op, names[op.path])


def apply(names: Names, todo: Intent) -> None:
    """The system call: change ``names`` in place."""
    op = todo.op
    if op.kind is Kind.SETATTR:
        names[op.path] = names[op.path]._replace(attrs=op.seq)
    elif op.kind is Kind.RENAME:
        _move(names, op.path, op.target)
    elif op.kind is Kind.DELETE:
        _move(names, op.path, trash(op))
    else:
        names[op.path] = todo.entry


def _move(names: Names, source: str, target: str) -> None:
    for path in [name for name in names if name == source or below(name, source)]:
        names[target + path[len(source) :]] = names.pop(path)


def happened(names: Names, todo: Intent) -> bool:
    """Recovery: whether the INTENT's system call took effect, decided by inode and never by name alone (rule 2)."""
    op = todo.op
    where = {Kind.RENAME: op.target, Kind.DELETE: trash(op)}.get(op.kind, op.path)
    found = names.get(where)
    if found is None or found.inode != todo.entry.inode:
        return False
    return op.kind is not Kind.SETATTR or found.attrs == op.seq
