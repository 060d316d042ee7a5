"""One batch: files of one owner that one call of a plugin sends to one destination.

:class:`Batch` is the record from the plan to the end. :class:`BatchOutcome` has its files as they are after the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stageout.model.file import StoredFile


@dataclass(frozen=True)
class Part:
    """Share of one sandbox in a batch.

    :param files: largest number of its due files for the batch's destination.
    """

    sandbox: int
    files: int


@dataclass(frozen=True)
class Batch:
    """One batch.

    :param destination: number of its destination in the ledger. :param server: of that.
    :param probe: it finds out whether the server answers again.
    :param parts: planned. :param size_bytes: estimate of the bytes in them.
    :param files: claimed for it in the ledger; empty before. A sandbox of the plan may have none of them.
    """

    owner: str
    uid: int
    gid: int
    destination: int
    server: str
    probe: bool
    parts: tuple[Part, ...]
    size_bytes: int
    files: tuple[StoredFile, ...] = ()

    @property
    def sandboxes(self) -> list[int]:
        """Return the sandboxes of the plan."""
        return [part.sandbox for part in self.parts]

    @property
    def planned_files(self) -> int:
        """Return the largest number of files that it may claim."""
        return sum(part.files for part in self.parts)


@dataclass
class BatchOutcome:
    """The decisions on the files of a batch: each file as it is now.

    :param lost: gone from the spool, and their sandboxes with them.
    :param tried: some outcomes tell something about the server.
    :param unreachable: none of the tried files got an answer from the server.
    :param retry_after_s: wait that the server asked for.
    """

    delivered: list[StoredFile] = field(default_factory=list)
    waiting: list[StoredFile] = field(default_factory=list)
    failed: list[StoredFile] = field(default_factory=list)
    lost: list[StoredFile] = field(default_factory=list)
    handed_over: list[StoredFile] = field(default_factory=list)
    delivered_bytes: int = 0
    tried: bool = False
    unreachable: bool = False
    retry_after_s: float = 0.0

    @property
    def all(self) -> list[StoredFile]:
        """Every result."""
        return [*self.delivered, *self.handed_over, *self.waiting, *self.failed, *self.lost]
