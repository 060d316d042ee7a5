"""Findings of checks, and the interface to the machine that checks examine. Pure."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stageout.core.classads import ClassAd
from stageout.core.config import Settings


class Level(enum.IntEnum):
    """The severity of a finding."""

    OK = 0
    UNCHECKED = 1
    WARN = 2
    FAIL = 3


class Role(str, enum.Enum):
    """The role of a machine in the pool."""

    AP = "ap"
    EP = "ep"
    PILOT = "pilot"
    ROUTER = "router"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    :param name: stable name of the check. :param text: the observation. :param remedy: what to do; "" for nothing.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Ran:
    """The result of a command.

    :param status: exit status, -1 if the command did not start or timed out. :param has_ended: False after a timeout.
    """

    status: int
    output: str
    took_s: float
    has_ended: bool = True


class Unseen(Exception):
    """The doctor cannot examine something from here; the text has the reason. The check counts as unchecked."""


class Machine(Protocol):
    """The interface of all checks to the machine. Tests have an implementation of their own."""

    @property
    def settings(self) -> Settings:
        """Return HTCondor's configuration on this machine."""

    def parameters(self) -> Iterable[str]:
        """List the names of all parameters in HTCondor's configuration on this machine."""

    def run(self, argv: Sequence[str], timeout_s: float, user: str = "") -> Ran:
        """Run a command. Root can run it as another user. Standard output and error are merged."""

    def stat(self, path: str) -> os.stat_result:
        """Call os.stat. :raises OSError: as os.stat."""

    def read(self, path: str) -> str:
        """Read the beginning of a file as text; replace invalid bytes. :raises OSError: as open."""

    def end_of(self, path: str) -> str:
        """Read the last lines of a text file; "" when it cannot be read."""

    def free_bytes(self, path: str) -> tuple[int, int]:
        """Return the size of a filesystem and its free bytes. :raises OSError: as os.statvfs."""

    def real(self, path: str) -> str:
        """Resolve the symbolic links of a path."""

    def user_id(self, name: str) -> int | None:
        """Look up the uid of an account; None if it does not exist."""

    def ads(self, constraint: str, pool: str = "") -> list[ClassAd]:
        """Query a collector for ads; without an address, that of this pool. :raises Unseen: it does not answer."""

    def ask_daemon(self, kind: str, parameter: str) -> str | None:
        """Ask a running daemon ("schedd", "startd") for a parameter. :raises Unseen: it does not answer."""

    def slots(self) -> list[ClassAd]:
        """Query this machine's startd for its slot ads. :raises Unseen: it does not answer."""

    def version(self) -> str:
        """Return the version of the running HTCondor, such as ``25.14.1``. :raises Unseen: it is unknown."""

    def manager_answer(self) -> ClassAd:
        """Ask this node's sandbox manager for its status. :raises Unseen: no manager answers."""

    def try_handoff(self, schedd: str, plugin: str) -> str:
        """Return the reason why the manager would refuse a hand-off of this schedd's job now; "" if it would accept.

        :raises OSError: the probe file cannot be made.
        """

    def is_expression(self, text: str) -> bool:
        """Tell whether a text is a valid ClassAd expression."""

    def accepts_generic(self) -> bool:
        """Tell whether the collector accepts a generic ad from this process. :raises Unseen: it does not answer."""

    def http_status(self, url: str, token: str) -> int:
        """Return the status of a GET with this bearer token. :raises OSError: no valid answer."""

    def http_text(self, url: str, certificate: str) -> str:
        """Return the content of a page.

        :param certificate: SHA-256 of the only accepted certificate; "" accepts any trusted one.
        :raises OSError: nothing answers, or the status is not 200.
        """

    def listens(self, host: str, port: int) -> bool:
        """Tell whether a daemon accepts connections at this address."""

    def greet(self, host: str, port: int, key: str) -> float:
        """Authenticate to a router with the key in a file. :return: by how many seconds its clock is ahead of this one.

        :raises TransferFailure: the router is unreachable or rejects the key, or the file is unusable.
        """

    def processes(self, variable: str) -> tuple[list[tuple[int, str]], bool]:
        """List the processes with an environment variable (number, value), and tell whether all were accessible."""

    def now(self) -> float:
        """Return the wall clock time in seconds."""


Check = Callable[[Machine], Iterable[Finding]]
_NAMES: dict[Check, tuple[str, ...]] = {}


def reports_as(*names: str) -> Callable[[Check], Check]:
    """Declare the names of a check's findings. By default a check has one finding, named like its function."""

    def declare(check: Check) -> Check:
        _NAMES[check] = names
        return check

    return declare


def names_of(check: Check) -> tuple[str, ...]:
    """Return the names that a check reports on every machine, whether or not it can run there."""
    return _NAMES.get(check, (check.__name__.replace("_", "-"),))


def ok(name: str, text: str) -> Finding:
    """Return a finding for a part without problems."""
    return Finding(name, Level.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    """Return a finding for a part that works, but less well or less safely than it could."""
    return Finding(name, Level.WARN, text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    """Return a finding for a part that does not work."""
    return Finding(name, Level.FAIL, text, remedy)


def unchecked(name: str, text: str, remedy: str = "") -> Finding:
    """Return a finding for a part that could not be examined."""
    return Finding(name, Level.UNCHECKED, text, remedy)


def words(text: str) -> list[str]:
    """Split a list of HTCondor, whose items are separated by commas and blanks."""
    return text.replace(",", " ").split()
