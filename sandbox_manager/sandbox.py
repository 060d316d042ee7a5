"""Sandboxes in memory: a picture of the ledger, replaced whenever that changes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from stageout.core.states import State
from stageout.movers.schemes import method_of, split_url
from stageout.wire.custody import Run

#: Bytes of the quota that a name takes besides its file's: its row in the ledger, and its place in the spool.
NAME_BYTES = 4096


class SyncState(enum.IntEnum):
    """The durability of a ticket's data (numbers are stored in the ledger)."""

    WAITING = 0
    DONE = 1
    BEGUN = 2


class SlotKey(NamedTuple):
    """A data slot's name: that of the CPU slot that it is bound to. It outlives a dynamic slot."""

    startd: str
    slot_id: int
    dslot_id: int

    @property
    def parent(self) -> tuple[str, int]:
        """The partitionable slot that a dynamic one was made from; else the slot itself."""
        return self.startd, self.slot_id


class Destination(NamedTuple):
    """Files with the same destination may travel in one call of a plugin.

    :param plugin: executable. :param scheme: whole scheme of the URLs, with the name of a credential in it.
    :param host: host and port, lower case, "" for URLs without one.
    :param credentials_digest: digest of the credentials and data that they are sent with, "" for none.
    """

    plugin: str
    scheme: str
    host: str
    credentials_digest: str = ""

    @property
    def server(self) -> str:
        """Return the server of a URL, which is down or up as a whole: method and host."""
        return f"{method_of(self.scheme)}://{self.host}"


def destination_of(plugin: str, url: str, credentials_digest: str = "") -> Destination:
    """Return the destination of a file at a URL that this plugin sends."""
    return Destination(plugin, *split_url(url), credentials_digest)


@dataclass(frozen=True)
class Waiting:
    """Files of one sandbox for one destination that are not being moved.

    :param ready_at: wall clock; the first attempt of any of them may be made then.
    """

    destination: int
    files: int
    size_bytes: int
    ready_at: int


@dataclass(frozen=True)
class Sandbox:
    """One sandbox as the ledger has it.

    :param id: of its row. :param change: grows whenever anything of it changes.
    :param waiting: its files that wait, by destination; :param moving: number of files in movers.
    :param attempts: most of any file. :param excused: the difference to the most attempts of any file that count.
    :param freed: nothing of it is in the spool any more.
    :param forgettable: the access point has recorded its end.
    :param deadline_at: wall clock at which its credential ends, 0 without one.
    :param record_bytes: of the quota that its records take.
    :param moving_at: destinations of its files in movers.
    :param custody: receipts of its files that a custodian has. :param holdings: who has how much of them.
    :param files_dropped: given up, and not in ``files_total``; likewise ``bytes_dropped``.
    :param group: accounting group of its job, "" without one.
    :param refused: reason why the last redirect was not carried out, or not for all files.
    :param fallback: URL of the directory for files that cannot be delivered, "" for none.
    :param fallback_note: reason why files were sent there; without a fallback, why the job's own is ignored.
    :param failing_since: wall clock: since then the last attempt of some file that is left has failed; 0: of none.
    """

    id: int
    run: Run
    user: str
    uid: int
    gid: int
    shared_uid: bool
    slot: SlotKey
    slot_name: str
    priority: int
    state: State
    change: int
    paused: bool
    reason: str
    error_code: int
    named_tickets: tuple[str, ...]
    accepted_at: int
    confirmed_at: int
    retried_at: int
    ended_at: int
    forgettable: bool
    tickets: tuple[str, ...]
    freed: bool
    files_total: int
    files_left: int
    bytes_total: int
    bytes_left: int
    moving: int
    failed: int
    attempts: int
    excused: int
    waiting: tuple[Waiting, ...]
    deadline_at: int = 0
    record_bytes: int = 0
    moving_at: tuple[int, ...] = ()
    custody: tuple[str, ...] = ()
    holdings: tuple[str, ...] = ()
    group: str = ""
    files_dropped: int = 0
    bytes_dropped: int = 0
    refused: str = ""
    fallback: str = ""
    fallback_note: str = ""
    failing_since: int = 0

    @property
    def owner(self) -> str:
        """``alice@domain``."""
        return self.run.owner

    @property
    def sent_to(self) -> tuple[int, ...]:
        """Destinations of its files that are being sent, or are just about to be."""
        if self.state not in ACTIVE:
            return ()
        return self.moving_at or tuple(part.destination for part in self.waiting)

    @property
    def is_foreign(self) -> bool:
        """True where the job's account is not its owner's, so an account of the manager's own has the files."""
        return not self.shared_uid and self.user != self.owner.partition("@")[0]

    @property
    def due_since(self) -> int:
        """Wall clock from which the time to give up counts: the acceptance, or the last retry by its owner."""
        return max(self.accepted_at, self.retried_at)

    @property
    def next_attempt_at(self) -> int:
        """Wall clock of the next planned attempt, 0 when none is planned."""
        return min((part.ready_at for part in self.waiting), default=0)


#: Sandboxes that wait for, or have, a place in their data slot.
OCCUPYING = frozenset({State.ACCEPTED, State.CONFIRMED, State.LEASED, State.MOVING})
#: Of these, sandboxes of which nothing is being sent.
_UNSENT = frozenset({State.ACCEPTED, State.CONFIRMED})
#: Sandboxes that the planner looks at.
SENDABLE = frozenset({State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})
#: Sandboxes in a data slot's active places.
ACTIVE = frozenset({State.LEASED, State.MOVING})


class Occupant(NamedTuple):
    """The properties of a sandbox that count in a data slot. Many are alike, however many wait.

    :param sent_to: destinations of its files that are being sent.
    :param may_stick: it holds no place while it waits for its owner or for servers that cannot be reached.
    :param destinations: that its files wait for.
    """

    slot: SlotKey
    owner: str
    sent_to: tuple[int, ...]
    may_stick: bool
    paused: bool
    destinations: tuple[int, ...]


def occupant_of(box: Sandbox) -> Occupant:
    """A sandbox as its data slot sees it."""
    return Occupant(
        box.slot, box.owner, box.sent_to, box.state in _UNSENT and bool(box.waiting), box.paused,
        tuple(part.destination for part in box.waiting),
    )  # fmt: skip
