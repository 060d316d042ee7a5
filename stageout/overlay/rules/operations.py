"""An operation: its identity, the fields that its owner signs, and its row at a router."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stageout.overlay.rules.states import Role, State, check_move

MAX_SEQ = 2**63 - 1
MAX_AFTER = 8
#: An operation lives at most so long (seconds), and its end can be learned for one hour more.
LONGEST_S, KEPT_S = 7 * 86400, 3600
#: Most files of a batch, and most bytes of a file and of a batch.
BATCH_FILES, BATCH_FILE_SIZE, BATCH_SIZE = 4096, 8 << 20, 64 << 20


class Kind(enum.Enum):
    """Effect of an operation on names."""

    FILE = "file"
    RENAME = "rename"
    DELETE = "delete"
    MKDIR = "mkdir"


class Differs(Exception):
    """409 ``operation-differs``: the same operation has other fields here."""


class Malformed(Exception):
    """400: a field of an operation cannot be used."""


class Identity(NamedTuple):
    """Identity of an operation. :param owner: see :func:`signed_owner` and :func:`bearer_owner`."""

    owner: str
    origin: str
    seq: int


_SIGNED = "key:"


def signed_owner(thumbprint: str) -> str:
    """Return the owner of operations that a key signed, whichever token brings them."""
    return _SIGNED + thumbprint


def is_signed(owner: str) -> bool:
    """Tell whether the operations of an owner are signed."""
    return owner.startswith(_SIGNED)


def bearer_owner(issuer: str, subject: str) -> str:
    """Return the owner of unsigned operations. The length keeps two pairs of texts apart."""
    return f"sub:{len(issuer)}:{issuer}:{subject}"


@dataclass(frozen=True)
class Fields:
    """The end-to-end fields. They never change on the way.

    :param precondition: "" (none), "absent", or an ETag. :param all_below: every earlier number below this one has to
        end first; 0 for none.
    """

    origin: str
    seq: int
    kind: Kind
    path: str
    terminal: str
    made: int
    expires: int
    size: int | None = None
    second: str = ""
    after: tuple[int, ...] = ()
    all_below: int = 0
    precondition: str = ""
    block_kind: str = "xxh3"
    digest_kind: str = "sha-256"
    mode: int = 0o644
    mtime: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the operation changes."""
        return (self.path, self.second) if self.second else (self.path,)


class Hop(NamedTuple):
    """The party that brings an operation, and its order: unsigned, different on each hop.

    :param custodian: its NAME, "" for the sender. :param epoch: when the custodian's epoch began: a later one has a
        higher number. :param order: number that it gave the operation in this epoch. :param received: when it took the
        operation. :param known_epoch: the terminal's epoch for which the sender knows that the operation has to run.
    """

    custodian: str = ""
    epoch: int = 0
    order: int = 0
    received: int = 0
    known_epoch: int = 0


DIRECT = Hop()


@dataclass(frozen=True)
class Row:
    """A row of the table of operations, at a custodian or a terminal. Only a new row replaces one.

    :param issuer: owner name of the key that issued the holder's token, "" for none. :param manifest: the signed
        digests of the blocks; None until it comes. :param blocks: durable blocks with their digests.
    :param reason: of an end or a refusal. :param etag: of the result. :param ended: when it ended.
    :param carriers: custodians that brought it. :param inode: of the file that an INTENT moves.
    """

    identity: Identity
    fields: Fields
    state: State = State.RECEIVING
    hop: Hop = DIRECT
    issuer: str = ""
    custody: bool = False
    manifest: tuple[str, ...] | None = None
    blocks: Mapping[int, str] = field(default_factory=dict)
    reason: str = ""
    etag: str = ""
    ended: int = 0
    carriers: frozenset[str] = frozenset()
    inode: int = 0


def differs(row: Row, fields: Fields) -> None:
    """Check that a repeated operation is the same one. :raises Differs: it is not."""
    if row.fields != fields:
        raise Differs(f"operation {fields.seq} has other fields here")


def is_at_or_below(path: str, directory: str) -> bool:
    """Tell whether a name is another one or lies below it."""
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def touches(one: Fields, other: Fields) -> bool:
    """Tell whether the order of two operations counts: they change one name, or one takes away a directory above it."""
    if not set(one.names).isdisjoint(other.names):
        return True
    takers = [(a, b) for a, b in ((one, other), (other, one)) if a.kind in (Kind.DELETE, Kind.RENAME)]
    return any(is_at_or_below(name, taker.path) for taker, rest in takers for name in rest.names)


def moved(role: Role, row: Row, state: State, **changes: str | int | bool) -> Row:
    """Return a row in another state. :raises IllegalMove: the state table does not allow it."""
    check_move(role, row.state, state)
    return replace(row, state=state, **changes)  # type: ignore[arg-type]


def check_ranges(fields: Fields) -> None:
    """Check numbers when they are read: a number that no operation can have would stop a queue later.

    :raises Malformed: a number lies outside its range, or the operation waits for itself or for a later one.
    """
    if not 0 < fields.seq <= MAX_SEQ or not 0 <= fields.all_below <= fields.seq or len(fields.after) > MAX_AFTER:
        raise Malformed("a number of the operation lies outside its range")
    if any(not 0 < number < fields.seq for number in fields.after):
        raise Malformed("an operation waits for earlier ones of its origin only")
    if not 0 <= (fields.size or 0) <= MAX_SEQ or not 0 < fields.made <= fields.expires <= fields.made + LONGEST_S:
        raise Malformed("a size or a time of the operation lies outside its range")


def check_batch(first: int, last: int, operations: Sequence[Fields]) -> None:
    """Check a batch before a byte of it is written. Its answer names the numbers without a name only: no gaps.

    :raises Malformed: it is too large, or has other numbers than ``first`` to ``last``, or an operation without bytes.
    """
    sizes = [fields.size for fields in operations if fields.kind is Kind.FILE and fields.size is not None]
    numbers = [fields.seq for fields in operations]
    is_gapless = numbers == list(range(first, first + len(numbers))) and first + len(numbers) == last + 1
    if not is_gapless or len(sizes) != len(numbers):
        raise Malformed("a batch has a file of known size for each of its numbers")
    if not 0 < len(sizes) <= BATCH_FILES or max(sizes) > BATCH_FILE_SIZE or sum(sizes) > BATCH_SIZE:
        raise Malformed("a batch has at most 4,096 files of 8 MiB, and 64 MiB in all")
    if len({fields.origin for fields in operations}) > 1:
        raise Malformed("a batch has operations of one origin")
