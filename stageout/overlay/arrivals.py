"""A file that arrives, until it is whole and gets its name, with the permissions that it has at its source."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.sources import AnyPath

_ALL = 0o777
_MARK_BITS = 32
#: There is no room for a file here, and may be elsewhere.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def part_of(local: Path) -> Path:
    """A new name beside that of a file, for what has come of it."""
    return local.with_name(part_name(local.name, new_mark()))


def new_mark() -> int:
    """By which the parts of different fetches are told apart; who fetches many files counts on from there."""
    return secrets.randbits(_MARK_BITS)


def part_name(name: str, mark: int) -> str:
    """The name of what has come of a file, beside its own. A name has room for 255 bytes."""
    return f".{name[:60]}.{mark % (1 << _MARK_BITS):08x}.part"


def private(path: str, flags: int) -> int:
    """Opener of a part: nobody else reads what may turn out to be private."""
    return os.open(path, flags, 0o600)


def not_written(local: AnyPath, problem: OSError) -> TransferFailure:
    """Return why a file could not be made here."""
    kind = ErrorClass.NO_SPACE_LOCAL if problem.errno in _FULL else ErrorClass.LOCAL_FILE
    return TransferFailure(kind, f"{os.fspath(local)}: {problem.strerror}")


def permit(descriptor: int, mode: int) -> None:
    """Give a file that is whole its permissions, within the umask, as if it had been made here with these.

    A filesystem that knows none is no failure. :raises OSError: it cannot be done.
    """
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, mode & _ALL & ~umask())


def umask() -> int:
    """The umask of this process. To ask for it by setting it would change what other threads make meanwhile."""
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):  # Linux 4.7
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
