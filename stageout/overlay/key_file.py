"""The file with a key for a router: ``NAME SECRET``, and lines ``capability TEXT PRIVATE`` and ``ca FILE``."""

from __future__ import annotations

from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.signing import KeyUnusable, key_of
from stageout.overlay.channel import Gateway
from stageout.overlay.sources import AnyPath
from stageout.overlay.wire import token
from stageout.overlay.wire.capability import Credential


def read_key(path: Path) -> tuple[str, bytes]:
    """Name and secret from a file with one ``NAME SECRET``, or a token of HTCondor.

    :raises TransferFailure: CREDENTIAL_MISSING.
    """
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as problem:
        raise _unreadable(path, problem) from None
    if words and token.is_token(words[0]):
        return token.key_of(words[0])
    if len(words) < 2:
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"{path}: write 'NAME SECRET', or a token of HTCondor")
    return words[0], words[1].encode()


def _unreadable(path: Path, problem: Exception) -> TransferFailure:
    why = getattr(problem, "strerror", "") or str(problem)
    words = f"{path}: {why}: your key for the router stands there, 'NAME SECRET' as its administrator gave it to you"
    return TransferFailure(ErrorClass.CREDENTIAL_MISSING, words)


def read_credential(path: Path) -> Credential | None:
    """The capability in a key file, a line ``capability TEXT PRIVATE``; None without one.

    :raises TransferFailure: CREDENTIAL_MISSING, CREDENTIAL_REFUSED.
    """
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as problem:
        raise _unreadable(path, problem) from None
    found = [line for line in lines if line[:1] == ["capability"]]
    try:
        return Credential(found[0][1], key_of(found[0][2])) if found else None
    except (IndexError, KeyUnusable) as problem:
        raise TransferFailure(ErrorClass.CREDENTIAL_REFUSED, f"{path}: its capability: {problem}") from None


def read_ca(key: Path) -> str:
    """The file that a line ``ca FILE`` of a key file names, "" without one. :raises OSError: it cannot be read."""
    lines = (line.split(None, 1) for line in key.read_text().splitlines())
    return next((line[1].strip() for line in lines if len(line) == 2 and line[0] == "ca"), "")


def gateway_of(host: str, port: int, key: AnyPath, timeout_s: float = 60.0) -> Gateway:
    """The router at an address, with all that a key file says: the key, ``capability ...``, ``ca FILE``.

    Nothing is connected yet. :param timeout_s: silence after which a connection counts as dead.
    :raises TransferFailure: CREDENTIAL_MISSING, CREDENTIAL_REFUSED.
    """
    file = Path(key)
    name, secret = read_key(file)
    return Gateway(host, port, name, secret, timeout_s, read_credential(file), read_ca(file))
