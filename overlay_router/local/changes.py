"""Changes of names that share their durable steps: which may, and what is known of them until they are recorded.

Operations that came together and touch different names are one group: one record says what is about to happen, then
come the system calls, one sync of the directories, and one record of all results.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field

from overlay_router.local.tree import Tree, passes
from overlay_router.rules.states import Kind, Op, Outcome, Result
from stageout.core import log
from stageout.overlay.wire.graph import touched
from stageout.overlay.wire.messages import Operation


@dataclass
class Held:
    """An operation that waits for its edges or its data, and who wants its result."""

    operation: Operation
    peers: set[str] = field(default_factory=set)

    @property
    def key(self) -> tuple[str, int]:
        """Its identity."""
        return self.operation.origin, self.operation.seq


@dataclass(frozen=True)
class Change:
    """The change that is about to happen.

    :param inode: of the entry that is moved. :param made: directories made for it.
    """

    held: Held
    op: Op
    tid: int
    inode: int
    made: list[str]


@dataclass(frozen=True)
class Ended:
    """The outcome of an operation, not yet recorded."""

    held: Held
    op: Op
    result: Result


@dataclass
class Group:
    """Operations that share their steps. :param changes: to be made. :param ends: to be recorded."""

    changes: list[Change] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)


class Footprint:
    """Names that some operations touch."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._above: set[str] = set()

    def add(self, op: Op) -> bool:
        """Add those of an operation; whether one of them, or what is above or below it, was there already."""
        paths = touched(op)
        above = {directory for path in paths for directory in _above(path)}
        taken = not (self._names.isdisjoint(paths) and self._above.isdisjoint(paths) and self._names.isdisjoint(above))
        self._names.update(paths)
        self._above |= above
        return taken


def why(tree: Tree, problem: OSError) -> OSError:
    """The error of a system call; where something is missing, whether that is all of the place."""
    if problem.errno == errno.ENOENT:
        try:
            tree.place.check()
        except OSError as gone:
            return gone
    return problem


def failed(tree: Tree, op: Op, problem: OSError) -> Result:
    """The end of an operation that cannot be done.

    :raises OSError: it cannot be now: no result, it is asked again, and happens when it can.
    """
    problem = why(tree, problem)
    if passes(problem):
        raise problem
    log.error("rename-failed", path=op.path, kind=op.kind.value, problem=problem)
    return Result(Outcome.FAILED, problem.strerror or str(problem))


def op_of(operation: Operation) -> Op:
    """The operation as the pure rules know it."""
    return Op(
        origin=int(operation.origin, 16),
        seq=operation.seq,
        kind=Kind(operation.kind),
        path=operation.path,
        target=operation.target,
        blocks=operation.blocks,
        expires=operation.expires,
        after=operation.after,
        absent=operation.absent,
        generation=operation.generation,
    )


def _above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
