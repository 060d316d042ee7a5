"""The roles of a router in operations: what the daemon's desk asks of a terminal, and of a custodian.

The desk (:mod:`overlay_router.operations.desk`) does what both have in common: it hands descriptors to workers, records
blocks, compares the block list, syncs, and waits. All calls here come in the thread that owns the disk, one at a time,
and are durable when they return (design, 6.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from overlay_router.operations.receiving import Receiving
from overlay_router.operations.table import Stored, Table
from stageout.overlay.http.operations import Status
from stageout.overlay.rules.operations import DIRECT, Fields, Hop, Row, is_signed
from stageout.overlay.rules.rights import Action, Asker, NoRight, check_action

#: Numbers of a wait at once.
MOST_NUMBERS = 100_000


class Refusal(Exception):
    """An answer that is no state. Nothing was stored.

    :param word: of stageout, such as ``operation-differs``; part of the problem. :param again_s: of ``Retry-After``.
    """

    def __init__(self, status: int, reason: str, word: str = "", again_s: int = 0) -> None:
        super().__init__(reason)
        self.status, self.reason, self.word, self.again_s = status, reason, word, again_s


class Caller(NamedTuple):
    """The sender of a request, as the worker has verified it.

    :param owner: of what this request brings: of the signature's key, else of the token. :param owners: all that it has
        proved to be. :param issuer: owner name of the key that issued a holder's token. :param share: its name.
    :param router: NAME of a router whose own key the token proves. :param denied: why the token, or the chain, gives no
        right to the operation. :param authority: issuer of that token, and its prefix: who executes the operation
        later looks whether they are still the same. :param means: whose operation it means, if several have a number;
        gives no right.
    """

    owner: str
    owners: tuple[str, ...]
    issuer: str = ""
    share: str = ""
    router: str = ""
    denied: str = ""
    authority: tuple[str, str] = ("", "")
    means: str = ""

    def means_first(self, owner: str) -> tuple[bool, bool, bool]:
        """Return the place of an owner among those who have the same number."""
        return owner != self.means, owner != self.owner, owner not in self.owners


class Answer(NamedTuple):
    """Status of HTTP, and the state. 410 and 409 become a problem with the state in it."""

    status: int
    state: Status


@dataclass(frozen=True)
class Bringing:
    """An operation as a request brings it.

    :param jws: its signature, "" without one. :param token: of the sender, in a request of a custodian.
    :param release: ``delivered`` or ``custody``. :param wishes: lot, priority and deadline of this hop.
    """

    fields: Fields
    jws: str = ""
    hop: Hop = DIRECT
    token: str = ""
    release: str = "delivered"
    wishes: Mapping[str, str] = field(default_factory=dict)


class Results(NamedTuple):
    """Answer to a wait. :param ended: nothing of it will change by itself, so there is nothing to wait for."""

    reached: bool
    ended: bool
    states: Mapping[int, Status]


class SmallFile(NamedTuple):
    """A file of a batch. :param data: its bytes, whose digest is right. :param denied: as of a :class:`Caller`."""

    fields: Fields
    data: memoryview
    denied: str = ""


class Side(Protocol):
    """A role."""

    table: Table
    receiving: Receiving

    @property
    def epoch(self) -> int:
        """Of the answers; 0 for the first one."""

    def begin(self, caller: Caller, ask: Bringing) -> Answer:
        """``PUT O``. A kind of names only is executed, or held. :raises Refusal: nothing is stored."""

    def complete(self, stored: Stored) -> Answer:
        """All blocks of a file are durable here and equal its list. :raises Refusal: it stays as it is.

        The list, with its signature, is ``receiving.staging(stored).due``; a role that needs it later stores it. Called
        again for a row that is not ``receiving`` any more when its owner repeats the list.
        """

    def state(self, stored: Stored) -> Status:
        """``GET O``."""

    def cancel(self, caller: Caller, fields: Fields, jws: str) -> Answer:
        """``DELETE O``: 200, 202 or 409. :raises Refusal: it may not."""

    def low(self, caller: Caller, origin: str, below: int, jws: str) -> None:
        """Results below a number may be forgotten. :raises Refusal: some of it has not ended."""

    def results(self, caller: Caller, origin: str, first: int, last: int, until: str) -> Results:
        """States from ``first`` to ``last``. :param until: ``custody`` or ``done``."""

    def batch(self, caller: Caller, files: Sequence[SmallFile], jws: str) -> list[Status]:
        """Small files of one origin: their states in their order. :raises Refusal: of all of it."""

    def expire(self) -> None:
        """Once a minute: end what is beyond its time, and forget what may be forgotten."""


def may(caller: Caller, row: Row, action: Action) -> bool:
    """Tell whether a caller may do something with an operation."""
    for owner in caller.owners:
        try:
            check_action(Asker(owner, caller.router), row, action)
        except NoRight:
            continue
        return True
    return False


def seen(table: Table, caller: Caller, origin: str, seq: int, action: Action) -> Stored | None:
    """Return the row that a caller means, None for one that was never seen. :raises Refusal: 403: it is another's.

    Two owners may have used the same origin: its own comes first. A signature never means an unsigned one of the same
    sender.
    """
    rows = [one for one in table.named(origin, seq) if not _is_other(caller, one.row.identity.owner, action)]
    rows.sort(key=lambda one: caller.means_first(one.row.identity.owner))
    found = next((one for one in rows if may(caller, one.row, action)), None)
    if rows and found is None:
        raise Refusal(403, "this operation belongs to somebody else")
    return found


def visible(table: Table, caller: Caller, origin: str, first: int, last: int) -> dict[int, Stored]:
    """Return the rows that a caller may see, by number; of several with one number the one that it means."""
    rows = [one for one in table.between(origin, first, last) if may(caller, one.row, Action.SEE)]
    rows.sort(key=lambda one: caller.means_first(one.row.identity.owner), reverse=True)
    return {one.row.identity.seq: one for one in rows}


def last_number(table: Table, caller: Caller, origin: str, first: int, last: int) -> int:
    """Return the last number of a wait.

    :param last: 0 for all that the caller may see. :raises Refusal: there are too many.
    """
    last = last or max(visible(table, caller, origin, first, first + MOST_NUMBERS), default=0)
    if last - first >= MOST_NUMBERS:
        raise Refusal(413, f"a wait is for {MOST_NUMBERS} numbers at most: say from and to")
    return last


def _is_other(caller: Caller, owner: str, action: Action) -> bool:
    """Tell whether a signed request cannot mean an operation: its sender has made that one without a signature."""
    if action not in (Action.BRING, Action.CANCEL) or not is_signed(caller.owner):
        return False
    return owner in caller.owners and not is_signed(owner)
