"""A run of a job: the facts that a node has proved about it, and its record at the access point.

:class:`stageout.wire.custody.Run` is the identity of a run, in messages and everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Run


class Account(NamedTuple):
    """An account that keeps output."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True)
class RunFacts:
    """The proven facts about the run whose output is offered.

    :param run: its owner is the job's User, as the access point told the startd.
    :param user: name of the account with ``uid``.
    :param slot: its data slot. :param slot_name: ``slot1_1@host``.
    :param guard: the AP's consent (StageOutGuard).
    :param async_wish: the owner's wish (StageOutAsync). :param output_destination: "" when the job has none.
    :param checkpoint_destination: "" when the job has none; uploads there are no output.
    :param encrypted: the job asked for an encrypted scratch directory.
    :param shared_uid: all jobs of this node run under the manager's own uid, also those of different owners.
    :param agent_key: public key of the job's access point, as the access point itself told the startd; "" without.
    :param left_out: code of why the access point did not mark the job (StageOutSynchronous).
    :param foreign_account: the job runs under an account that is not its owner's; other owners may share it.
    :param group: accounting group of the job, "" without one.
    :param fallback: the owner's StageOutFallback, which may be no URL; "" without one.
    """

    run: Run
    user: str
    uid: int
    gid: int
    slot: SlotKey
    slot_name: str
    guard: bool = False
    async_wish: bool = True
    output_destination: str = ""
    checkpoint_destination: str = ""
    encrypted: bool = False
    priority: int = 0
    shared_uid: bool = False
    agent_key: str = ""
    left_out: str = ""
    foreign_account: bool = False
    group: str = ""
    fallback: str = ""

    @property
    def owner(self) -> str:
        """``alice@domain``."""
        return self.run.owner

    def kept_by(self, account: Account | None) -> RunFacts:
        """Return the same facts with the account that has the run's output; None: the job's own has it."""
        return replace(self, user=account.name, uid=account.uid, gid=account.gid) if account else self


def manager_identity(manager: str, key: str) -> str:
    """Return the identity of a manager: its name and its key. Anybody can take a name, so decisions use this."""
    return f"{manager} {key}".rstrip()


def name_of(identity: str) -> str:
    """Return the name in an identity."""
    return identity.partition(" ")[0]


def key_of(identity: str) -> str:
    """Return the public key in an identity; "" for a manager that does not sign."""
    return identity.partition(" ")[2]


@dataclass(frozen=True)
class Ticket:
    """A receipt in the record of a run. :param key: "" from a manager that did not sign."""

    name: str
    manager_name: str
    key: str
    files: int
    size_bytes: int

    @property
    def manager(self) -> str:
        """Return the manager's identity."""
        return manager_identity(self.manager_name, self.key)


@dataclass(frozen=True)
class RunRecord:
    """Hand-offs of one run in the access point's OUTPUT record.

    :param written_at: wall clock, seconds. :param job: GlobalJobId; "" from 23.x, like ``owner``.
    """

    tickets: tuple[Ticket, ...] = ()
    written_at: int = field(default=0, compare=False)
    job: str = field(default="", compare=False)
    owner: str = field(default="", compare=False)

    @property
    def managers(self) -> tuple[str, ...]:
        """Return the managers' identities, in the order of their first receipts."""
        return tuple(dict.fromkeys(ticket.manager for ticket in self.tickets))

    @property
    def files(self) -> int:
        """Return the number of files in all receipts."""
        return sum(ticket.files for ticket in self.tickets)

    def of(self, manager: str) -> tuple[Ticket, ...]:
        """Return the receipts of one manager. :param manager: its identity."""
        return tuple(ticket for ticket in self.tickets if ticket.manager == manager)
