"""One file in custody: the same record from the hand-off to the end of its row in the ledger.

Each field is a column of the ledger's table of files (``custody/schema.py``). ``custody/queries.py`` derives the
columns, and lists those with another name.

:class:`stageout.wire.handoff.OfferedFile` is a file as a plugin offers it. :class:`stageout.movers.results.SentFile` is
a file in the call of the plugin that sends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageout.core.states import FileState
from stageout.movers.results import NO_FACTS, TransferFacts


@dataclass(frozen=True)
class StoredFile:
    """One file in custody. The first six fields are those of the hand-off and never change, except the URL.

    :param position: its name in the ticket's directory. :param url: destination, at first as HTCondor gave it.
    :param name: path inside the scratch directory, printable; for people only.
    :param mtime_ns: shows, with size and inode, a later change. The device's number would change between boots.
    :param ticket_id: of the ticket's row, 0 before the row exists. Likewise ``sandbox`` and ``destination``.
    :param next_attempt: wall clock, of a file that waits. :param attempts: begun until now, with the current one.
    :param excused: attempts that do not count against the limit.
    :param error: of the last attempt, with its code. :param of_node: the destination did not cause that failure
        (:attr:`stageout.movers.results.Failure.blames_destination`).
    :param proof: of a delivered file, the digests that its plugin computed. Of a file that a custodian may have, the
        receipt to ask it with.
    :param fell_back: it was sent to its job's fallback.
    :param facts: of its delivery. Before it has arrived: the wall clock at which the last attempt began.
    """

    position: int
    url: str
    name: str
    size_bytes: int
    mtime_ns: int
    inode: int
    ticket: str = ""
    ticket_id: int = 0
    sandbox: int = 0
    destination: int = 0
    state: FileState = FileState.WAITING
    next_attempt: int = 0
    attempts: int = 0
    excused: int = 0
    error_code: int = 0
    error: str = ""
    of_node: bool = False
    verified: str = ""
    proof: str = ""
    fell_back: bool = False
    facts: TransferFacts = NO_FACTS
