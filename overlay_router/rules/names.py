"""Changes of names at the terminal: what an INTENT says and how recovery knows whether it happened (rule 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overlay_router.rules.states import Kind, Op
from stageout.overlay.wire.graph import below, touched


class Entry(NamedTuple):
    """The target of a name. ``content`` is None for a directory."""

    inode: int
    content: object = None
    attrs: int = 0

    @property
    def is_dir(self) -> bool:
        """Tell whether the entry is a directory."""
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
    """Return why the operation cannot be executed on these names: "precondition", "conflict: " and why, or "" if it
    can.

    ``generation`` is the present one of ``op.path``.
    """
    here = names.get(op.path)
    if (op.absent and here is not None) or op.generation not in (-1, generation):
        return "precondition"
    why = _refusals(names, op, here)
    return f"conflict: {why}" if why else ""


def _refusals(names: Names, op: Op, here: Entry | None) -> str:
    if op.kind is Kind.PUBLISH:
        return _no_dir(names, op.path) or (f"{_shown(op.path)} is a directory" if here and here.is_dir else "")
    if op.kind is Kind.MKDIR:
        return _no_dir(names, op.path) or ("" if here is None else f"{_shown(op.path)} is there already")
    if here is None:
        return f"there is no {_shown(op.path)}"
    return _no_rename(names, op, here) if op.kind is Kind.RENAME else ""


def _no_rename(names: Names, op: Op, source: Entry) -> str:
    if op.target == op.path or below(op.target, op.path):
        return f"{_shown(op.path)} cannot become {_shown(op.target)}, which is itself or below it"
    there = names.get(op.target)
    if there is not None and (source.is_dir or there.is_dir):
        return f"{_shown(op.target)} is there already, and only a file can replace a file"
    return _no_dir(names, op.target)


def _no_dir(names: Names, path: str) -> str:
    """Return why nothing can be made in the directory of a path, "" if something can."""
    above = parent(path)
    if _has_dir(names, above):
        return ""
    if above in names:
        return f"{_shown(above)} is not a directory"
    return f"there is no directory {_shown(above)}: make it first"


def _shown(path: str) -> str:
    """So much of a path that any number of them fits a message."""
    return repr(path[-200:])


def intent(names: Names, op: Op, inode: int, content: object) -> Intent:
    """The record to make durable before the system call; ``inode`` is the staging file's (or the new directory's)."""
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
