"""Who this router is among others: its key, and a number that grows with each start."""

from __future__ import annotations

import time
from pathlib import Path

from stageout.core import durable
from stageout.core.errors import StageoutError
from stageout.core.signing import SigningKey, load_or_make_key


class IdentityError(StageoutError):
    """The key or the number of starts cannot be kept; the text says what to do."""


def identity(home: Path) -> tuple[SigningKey, int]:
    """Key and incarnation, both on the disk when this returns. Neither depends on a clock that may be set back.

    :param home: the router's directory. :raises IdentityError: it cannot be written to.
    :raises KeyUnusable: the key is there and cannot be used.
    """
    key = load_or_make_key("router-key", home / "router_key")
    path = home / "incarnation"
    try:
        before = int(path.read_text()) if path.exists() else 0
        incarnation = max(before + 1, int(time.time()))
        durable.write_file("router-incarnation", path, b"%d\n" % incarnation, 0o600)
    except ValueError:
        raise IdentityError(f"{path} has no number: remove it") from None
    except OSError as problem:
        raise IdentityError(f"{path}: {problem.strerror}: make room, and allow the router to write there") from None
    return key, incarnation
