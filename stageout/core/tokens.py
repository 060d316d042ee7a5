"""Bearer tokens of clients, from a file with one ``OWNER TOKEN`` per line."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from stageout.core.errors import StageoutError

_LEAST_LENGTH = 16
_OWNER = re.compile(r"[A-Za-z0-9._@+-]{1,64}")


class TokenError(StageoutError):
    """The file of tokens cannot be used. The text says what to do and never holds a token."""


class TokenTable:
    """The known tokens.

    :param path: file that only its owner and group can read.
    :raises TokenError: the file is missing, open to all, empty or unreadable.
    """

    def __init__(self, path: Path) -> None:
        try:
            if path.stat().st_mode & 0o007:
                raise TokenError(f"{path} holds secrets and is open to all users: chmod o= it")
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            raise TokenError(f"cannot read the tokens: {problem}; write one 'OWNER TOKEN' a line") from problem
        self._owners: list[tuple[bytes, str]] = []
        for number, line in enumerate(lines, 1):
            words = line.split("#", 1)[0].split() if line.lstrip().startswith("#") else line.split()
            if words:
                self._owners.append(_entry(words, f"{path}, line {number}"))
        if not self._owners:
            raise TokenError(f"{path} has no token: write one 'OWNER TOKEN' a line")

    def owner(self, token: str) -> str | None:
        """Return the owner of a token; None for an unknown one. The time taken does not depend on the token."""
        digest, found = digest_of(token), None
        for known, owner in self._owners:
            if hmac.compare_digest(known, digest):
                found = owner
        return found

    def owner_of_digest(self, digest: bytes) -> str | None:
        """Return the owner of the token with this digest; None if the table does not have it."""
        return next((owner for known, owner in self._owners if hmac.compare_digest(known, digest)), None)


def _entry(words: list[str], place: str) -> tuple[bytes, str]:
    if len(words) != 2 or not _OWNER.fullmatch(words[0]):
        raise TokenError(f"{place}: write 'OWNER TOKEN'")
    if len(words[1]) < _LEAST_LENGTH:
        raise TokenError(f"{place}: the token is shorter than {_LEAST_LENGTH} characters; try 'openssl rand -hex 24'")
    return digest_of(words[1]), words[0]


def digest_of(token: str) -> bytes:
    """Return the digest of a token, under which a table knows it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
