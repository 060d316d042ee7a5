"""Words and tables of the overlay protocol: operations, results, block states. No behaviour beyond look-ups."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(str, enum.Enum):
    """The operations that touch names (rule 2). Data never does."""

    PUBLISH = "publish"
    RENAME = "rename"
    DELETE = "delete"
    MKDIR = "mkdir"
    SETATTR = "setattr"


class Outcome(str, enum.Enum):
    """How an operation ends (invariant 6).

    STALE is recorded by custodians only: the origin has settled it at the terminal, which has forgotten how it ended.
    """

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"
    STALE = "stale"


class Release(enum.Enum):
    """When a sender may free its bytes (rule 3)."""

    DELIVERED = "delivered"
    CUSTODY = "custody"


class Op(NamedTuple):
    """One operation as its origin made it; the same on every route and every repetition (rule 1).

    Preconditions: ``absent`` (the name is not there), ``generation`` (the name's, unless negative).
    """

    origin: int
    seq: int
    kind: Kind
    path: str
    target: str = ""
    blocks: int = 0
    expires: int = 0
    after: tuple[int, ...] = ()
    absent: bool = False
    generation: int = -1


class Result(NamedTuple):
    """The final answer for an operation; ``reason`` says why it FAILED, ``code`` of which class that is (0: unsaid)."""

    outcome: Outcome
    reason: str = ""
    generation: int = 0
    code: int = 0
