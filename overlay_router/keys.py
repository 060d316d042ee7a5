"""Who may connect: shared keys from a file, one ``NAME SECRET PREFIX [router]`` a line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.errors import StageoutError

_LEAST_LENGTH = 16
_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,64}")


class BadKeys(StageoutError):
    """The file of keys cannot be used; the text says what to do. Never holds a key."""


@dataclass(frozen=True)
class Key:
    """One key.

    :param prefix: its holder may only name paths at or below it; "" for the whole root, "-" for none by itself.
    :param is_router: its holder is another router: it may say which links it has, and be sent through.
    """

    name: str
    secret: bytes = field(repr=False)
    prefix: str
    is_router: bool = False

    def allows(self, path: str) -> bool:
        """Whether its holder may name this path."""
        if self.prefix == "-":
            return False
        return not self.prefix or path == self.prefix or path.startswith(self.prefix + "/")


def read_keys(path: Path) -> dict[str, Key]:
    """The keys by name. :raises BadKeys: missing, open to all users, empty or unreadable."""
    try:
        if path.stat().st_mode & 0o007:
            raise BadKeys(f"{path} holds secrets and is open to all users: chmod o= it")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise BadKeys(f"cannot read the keys: {problem}; write one 'NAME SECRET PREFIX' a line") from problem
    words = ((number, line.split()) for number, line in enumerate(lines, 1) if not line.lstrip().startswith("#"))
    keys = [_key(found, f"{path}, line {number}") for number, found in words if found]
    if not keys:
        raise BadKeys(f"{path} has no key: write one 'NAME SECRET PREFIX' a line (PREFIX / for the whole root)")
    return {key.name: key for key in keys}


def read_own_key(path: Path) -> tuple[str, bytes]:
    """Name and secret that this router shows to its neighbours. :raises BadKeys: there is no ``NAME SECRET``."""
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as problem:
        raise BadKeys(f"cannot read this router's own key: {problem}; write one 'NAME SECRET'") from problem
    if len(words) < 2:
        raise BadKeys(f"{path}: write 'NAME SECRET', the key that the neighbours know this router by")
    return words[0], words[1].encode()


def _key(words: list[str], place: str) -> Key:
    if len(words) not in (3, 4) or not _NAME.fullmatch(words[0]) or words[3:] not in ([], ["router"]):
        raise BadKeys(f"{place}: write 'NAME SECRET PREFIX' (PREFIX / for the whole root, - for none), or with 'router'"
                      " behind it for the key of another router")  # fmt: skip
    if len(words[1]) < _LEAST_LENGTH:
        raise BadKeys(f"{place}: the key is shorter than {_LEAST_LENGTH} characters; try 'openssl rand -hex 24'")
    return Key(words[0], words[1].encode(), words[2].strip("/"), len(words) == 4)
