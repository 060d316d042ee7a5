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

    :param name: of the check, stable. :param text: what was seen. :param remedy: what to do; "" when nothing.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Ran:
    """A command that was run.

    :param status: exit status, -1 when it did not end in time or did not start. :param has_ended: False: not in time.
    """

    status: int
    output: str
    took_s: float
    has_ended: bool = True


class Unseen(Exception):
    """Something cannot be looked at from here; the text says why. The check counts as unchecked."""


class Machine(Protocol):
    """All that checks may ask; tests give their own."""

    @property
    def settings(self) -> Settings:
        """HTCondor's configuration here."""

    def parameters(self) -> Iterable[str]:
        """List the names of all parameters of HTCondor's configuration here."""

    def run(self, argv: Sequence[str], timeout_s: float, user: str = "") -> Ran:
        """Run a command, as another user where root asks for that; its standard output and error in one."""

    def stat(self, path: str) -> os.stat_result:
        """Call os.stat. :raises OSError: as os.stat."""

    def read(self, path: str) -> str:
        """Read the beginning of a file as text, whatever the file is. :raises OSError: as open."""

    def end_of(self, path: str) -> str:
        """Read the last lines of a text file; "" when it cannot be read."""

    def free_bytes(self, path: str) -> tuple[int, int]:
        """Return the size of a filesystem and its free bytes. :raises OSError: as os.statvfs."""

    def real(self, path: str) -> str:
        """Resolve the symbolic links of a path."""

    def user_id(self, name: str) -> int | None:
        """Look up the uid of an account, None when there is none of that name."""

    def ads(self, constraint: str, pool: str = "") -> list[ClassAd]:
        """Query the collector, or that of another pool, for ads. :raises Unseen: it does not answer."""

    def ask_daemon(self, kind: str, parameter: str) -> str | None:
        """Ask a running daemon ("schedd", "startd") for a parameter. :raises Unseen: it does not tell."""

    def slots(self) -> list[ClassAd]:
        """Query this machine's startd for its slot ads. :raises Unseen: it does not answer."""

    def version(self) -> str:
        """Return the version of the HTCondor that runs here, like ``25.14.1``. :raises Unseen: it is not known."""

    def manager_answer(self) -> ClassAd:
        """Ask this node's sandbox manager for its status. :raises Unseen: none answers."""

    def try_handoff(self, schedd: str, plugin: str) -> str:
        """Return the reason why the manager would refuse a hand-off of this schedd's job now; "" when it would accept.

        :raises OSError: the probe file cannot be made.
        """

    def is_expression(self, text: str) -> bool:
        """Tell whether HTCondor can read a ClassAd expression."""

    def accepts_generic(self) -> bool:
        """Tell whether the collector accepts a generic ad from this process. :raises Unseen: it does not answer."""

    def http_status(self, url: str, token: str) -> int:
        """Return the status of a GET with this bearer token. :raises OSError: no valid answer."""

    def http_text(self, url: str, certificate: str) -> str:
        """Return the content of a page. :param certificate: SHA-256 of the only one that counts, "": any trusted one.

        :raises OSError: nobody answers, or with another status than 200.
        """

    def listens(self, host: str, port: int) -> bool:
        """Tell whether a daemon accepts connections at this address."""

    def greet(self, host: str, port: int, key: str) -> float:
        """Prove the key in that file to a router. :return: how many seconds its clock is before ours.

        :raises TransferFailure: it is not reached, does not take the key, or the file cannot be used.
        """

    def processes(self, variable: str) -> tuple[list[tuple[int, str]], bool]:
        """List the processes with an environment variable (number, value); and tell whether all could be looked at."""

    def now(self) -> float:
        """Return the wall clock, in seconds."""


Check = Callable[[Machine], Iterable[Finding]]
_NAMES: dict[Check, tuple[str, ...]] = {}


def reports_as(*names: str) -> Callable[[Check], Check]:
    """Declare the names of a check's findings; without this the only one is that of its function."""

    def declare(check: Check) -> Check:
        _NAMES[check] = names
        return check

    return declare


def names_of(check: Check) -> tuple[str, ...]:
    """Return the names that a check reports on every machine, whether it can run there or not."""
    return _NAMES.get(check, (check.__name__.replace("_", "-"),))


def ok(name: str, text: str) -> Finding:
    """Make the finding that all is well."""
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
