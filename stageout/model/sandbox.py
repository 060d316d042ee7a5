"""Sandboxes in memory: a picture of the ledger, which replaces a record whenever its row changes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from stageout.core.states import State
from stageout.movers.schemes import method_of, split_url
from stageout.wire.custody import Run

#: Bytes of the quota that a name takes besides its file's: its row in the ledger, and its entry in the spool.
NAME_BYTES = 4096


class SyncState(enum.IntEnum):
    """The durability of a ticket's data (numbers are stored in the ledger)."""

    WAITING = 0
    DONE = 1
    BEGUN = 2


class SlotKey(NamedTuple):
    """Name of a data slot: that of its CPU slot. A data slot outlives a dynamic CPU slot."""

    startd: str
    slot_id: int
    dslot_id: int

    @property
    def parent(self) -> tuple[str, int]:
        """Return the partitionable slot of a dynamic slot, or the slot itself."""
        return self.startd, self.slot_id


class Destination(NamedTuple):
    """The target of files that may be sent in one call of a plugin.

    :param plugin: executable. :param scheme: whole scheme of the URLs, with the name of a credential in it.
    :param host: host and port, lower case, "" for URLs without one.
    :param credentials_digest: digest of their credentials and of data for the plugin, "" for none.
    """

    plugin: str
    scheme: str
    host: str
    credentials_digest: str = ""

    @property
    def server(self) -> str:
        """Return method and host. A server is reachable, or not, for all of its files."""
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

    :param id: of its row. :param change: number of its last change.
    :param waiting: its files that wait, by destination. :param moving: number of files in movers.
    :param attempts: largest number of attempts of a file. :param excused: ``attempts`` without the largest number of
        attempts of a file that count.
    :param freed: the spool has none of its bytes any more.
    :param forgettable: the access point has recorded its end.
    :param deadline_at: wall clock at which its credential ends, 0 without one.
    :param record_bytes: bytes of the quota for its records.
    :param moving_at: destinations of its files in movers.
    :param custody: receipts of its files that a custodian has. :param holdings: custodians, and their files and bytes.
    :param files_dropped: files that were given up. ``files_total`` does not count them. Likewise ``bytes_dropped``.
    :param group: accounting group of its job, "" without one.
    :param refused: reason why the last redirect was not carried out, or not for all files.
    :param fallback: URL of the directory for files that cannot be delivered, "" for none.
    :param fallback_note: reason why files were sent there. Without a fallback: why the job's own is ignored.
    :param failing_since: wall clock since which the last attempt of some remaining file has failed, 0 if none has.
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
        """Return the owner, as in ``alice@domain``."""
        return self.run.owner

    @property
    def sent_to(self) -> tuple[int, ...]:
        """Return the destinations of its files that are being sent, or that a batch is about to send."""
        if self.state not in ACTIVE:
            return ()
        return self.moving_at or tuple(part.destination for part in self.waiting)

    @property
    def is_foreign(self) -> bool:
        """Return whether the job's account is not its owner's, so that an account of the manager keeps the files."""
        return not self.shared_uid and self.user != self.owner.partition("@")[0]

    @property
    def due_since(self) -> int:
        """Return the wall clock from which the time to give up counts: acceptance, or the last retry by its owner."""
        return max(self.accepted_at, self.retried_at)

    @property
    def next_attempt_at(self) -> int:
        """Return the wall clock of the next planned attempt, 0 if none is planned."""
        return min((part.ready_at for part in self.waiting), default=0)


#: States of sandboxes that count in their data slot.
OCCUPYING = frozenset({State.ACCEPTED, State.CONFIRMED, State.LEASED, State.MOVING})
#: States of sandboxes that count there while none of their files is sent.
_UNSENT = frozenset({State.ACCEPTED, State.CONFIRMED})
#: States of sandboxes that the planner considers.
SENDABLE = frozenset({State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})
#: States of sandboxes with an active place in their data slot.
ACTIVE = frozenset({State.LEASED, State.MOVING})


class Occupant(NamedTuple):
    """The properties of a sandbox that count in a data slot. Many sandboxes have the same.

    :param sent_to: destinations of its files that are being sent.
    :param may_stick: it has no place while it waits for its owner or for unreachable servers.
    :param destinations: destinations of its waiting files.
    """

    slot: SlotKey
    owner: str
    sent_to: tuple[int, ...]
    may_stick: bool
    paused: bool
    destinations: tuple[int, ...]


def occupant_of(sandbox: Sandbox) -> Occupant:
    """Return the properties of a sandbox that count in its data slot."""
    return Occupant(
        sandbox.slot, sandbox.owner, sandbox.sent_to, sandbox.state in _UNSENT and bool(sandbox.waiting),
        sandbox.paused, tuple(part.destination for part in sandbox.waiting),
    )  # fmt: skip
