"""What the manager keeps in memory about its sandboxes: a picture of the ledger, replaced whenever that changes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stageout.core.states import FREED, State
from stageout.wire.custody import Run


class FileState(enum.IntEnum):
    """Where one file stands (numbers are stored in the ledger)."""

    WAITING = 0
    MOVING = 1
    DELIVERED = 2
    FAILED = 3
    DROPPED = 4


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
    """

    plugin: str
    scheme: str
    host: str

    @property
    def server(self) -> str:
        """What is down when it is down: method and host."""
        return f"{method_of(self.scheme)}://{self.host}"


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
    :param attempts: most of any file. :param excused: of those, how many were only "the server cannot be reached".
    :param held_bytes: in the spool. :param freed: nothing of it is in the spool any more.
    :param forgettable: the access point has recorded its end.
    """

    id: int
    run: Run
    owner: str
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
    ended_at: int
    forgettable: bool
    tickets: tuple[str, ...]
    freed: bool
    held_bytes: int
    files_total: int
    files_left: int
    bytes_total: int
    bytes_left: int
    moving: int
    failed: int
    attempts: int
    excused: int
    waiting: tuple[Waiting, ...]

    @property
    def next_attempt_at(self) -> int:
        """Wall clock of the next planned attempt, 0 when none is planned."""
        return min((part.ready_at for part in self.waiting), default=0)


#: Sandboxes that wait for, or have, a place in their data slot.
OCCUPYING = frozenset({State.ACCEPTED, State.CONFIRMED, State.LEASED, State.MOVING})
#: Sandboxes that the planner looks at.
SENDABLE = frozenset({State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})
#: Sandboxes in a data slot's active places.
ACTIVE = frozenset({State.LEASED, State.MOVING})


@dataclass
class Registry:
    """All sandboxes by id, run and job; those that may be sent, and those in data slots, apart."""

    by_id: dict[int, Sandbox] = field(default_factory=dict)
    destinations: dict[int, Destination] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    sendable: dict[int, Sandbox] = field(default_factory=dict)
    _by_run: dict[Run, int] = field(default_factory=dict)
    _occupying: dict[tuple[str, int], dict[int, Sandbox]] = field(default_factory=dict)

    def put(self, sandbox: Sandbox) -> None:
        """Replace what is known of a sandbox."""
        self._unlist(sandbox.id)
        self.by_id[sandbox.id] = sandbox
        self._by_run[sandbox.run] = sandbox.id
        self.fence(sandbox.run)
        if sandbox.state in SENDABLE:
            self.sendable[sandbox.id] = sandbox
        if sandbox.state in OCCUPYING:
            self._occupying.setdefault(sandbox.slot.parent, {})[sandbox.id] = sandbox

    def drop(self, sandbox_id: int) -> None:
        """Forget a sandbox whose record is gone."""
        self._unlist(sandbox_id)
        known = self.by_id.pop(sandbox_id, None)
        if known is not None:
            self._by_run.pop(known.run, None)

    def _unlist(self, sandbox_id: int) -> None:
        self.sendable.pop(sandbox_id, None)
        old = self.by_id.get(sandbox_id)
        if old is not None:
            self._occupying.get(old.slot.parent, {}).pop(sandbox_id, None)

    def occupying(self, slot: SlotKey | None = None) -> list[Sandbox]:
        """Sandboxes in data slots: all, or those of one CPU slot and its siblings."""
        if slot is not None:
            return list(self._occupying.get(slot.parent, {}).values())
        return [box for group in self._occupying.values() for box in group.values()]

    def fence(self, run: Run) -> None:
        """Remember that this run of its job exists."""
        self.fences[run.job] = max(run.number, self.fences.get(run.job, 0))

    def of_run(self, run: Run) -> Sandbox | None:
        """The sandbox of a run."""
        return self.by_id.get(self._by_run.get(run, -1))

    def newest_run(self, job: str) -> int:
        """Highest number of any run of this job that was heard of, 0 for none."""
        return self.fences.get(job, 0)

    @property
    def bytes_at_risk(self) -> int:
        """Accepted, not delivered and still wanted."""
        return sum(box.bytes_left for box in self.by_id.values() if box.state not in FREED)

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes in the spool by owner."""
        held: dict[str, int] = {}
        for box in self.by_id.values():
            held[box.owner] = held.get(box.owner, 0) + box.held_bytes
        return held


def method_of(scheme: str) -> str:
    """The part of a scheme that selects a plugin: behind the last ``+``, ``-`` or ``.``."""
    for mark in "+-.":
        scheme = scheme.rpartition(mark)[2]
    return scheme.lower()


def split_url(url: str) -> tuple[str, str]:
    """Scheme and host (with port, without userinfo) of a URL, lower case."""
    scheme, _, rest = url.partition("://")
    for mark in "/?#":
        rest = rest.partition(mark)[0]
    return scheme.lower(), rest.rpartition("@")[2].lower()
