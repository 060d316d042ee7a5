"""The identity of this router among others: its key, and a number that grows with each start."""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import suppress
from pathlib import Path

from stageout.core import durable, log
from stageout.core.errors import StageoutError
from stageout.core.signing import SigningKey, load_or_make_key

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_AGAIN_S = 5.0


class IdentityError(StageoutError):
    """The key or the number of starts cannot be kept; the text says what to do."""


def identity(home: Path) -> tuple[SigningKey, int]:
    """Key and incarnation, both on the disk when this returns. Neither depends on a clock that may be set back.

    On a full disk the number may be missing there: :func:`keep` writes it later. A router that dies before that, and
    comes back with a clock that was set back, goes on from the number that its neighbours have heard of it.

    :param home: the router's directory. :raises IdentityError: it cannot be written to.
    :raises KeyUnusable: the key is there and cannot be used.
    """
    key = load_or_make_key("router-key", home / "router_key")
    path = _path(home)
    try:
        before = _kept(home)
        incarnation = max(before + 1, int(time.time()))
        _write(home, incarnation)
    except ValueError:
        raise IdentityError(f"{path} has no number: remove it") from None
    except OSError as problem:
        if problem.errno not in _NO_ROOM:
            raise IdentityError(f"{path}: {problem.strerror}: allow the router to write there") from None
        log.error("start-write-failed", file=path, problem=problem.strerror, again_s=_AGAIN_S,
                  advice="make room: until then only what needs none is done")  # fmt: skip
    return key, incarnation


async def keep(home: Path, incarnation: int) -> None:
    """Write the number of this start as soon as there is room, if it is not there yet."""
    while _kept(home) < incarnation:
        await asyncio.sleep(_AGAIN_S)
        with suppress(OSError):
            await asyncio.get_running_loop().run_in_executor(None, _write, home, incarnation)
            log.event("start-recorded", incarnation=incarnation)


def _path(home: Path) -> Path:
    return home / "incarnation"


def _kept(home: Path) -> int:
    path = _path(home)
    return int(path.read_text()) if path.exists() else 0


def _write(home: Path, incarnation: int) -> None:
    durable.write_file("router-incarnation", _path(home), b"%d\n" % incarnation, 0o600)
