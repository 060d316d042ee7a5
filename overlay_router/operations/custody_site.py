"""A custodian by the settings of a router: its files, and its tokens for others."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from overlay_router.operations.custodian import Custodian, Far, MakesCustodian
from overlay_router.operations.custody_table import CustodyTable, Listed
from overlay_router.operations.receiving import Receiving
from overlay_router.operations.spool import CustodySpool
from overlay_router.operations.table import Table
from stageout.core.signing import SigningKey

#: A token lasts so long, and a new one is made so long before its end (seconds).
_LASTS_S, _BEFORE_S = 840, 300


class OwnTokens:
    """Tokens that a router shows to others. :param name: of its line in their keys files."""

    def __init__(self, key: SigningKey, name: str, clock: Callable[[], float] = time.time) -> None:
        self._key, self._name, self._clock = key, name, clock
        self._made: dict[str, tuple[str, float]] = {}

    def token(self, router: str) -> str:
        """Return a token for a router that lasts for a while."""
        made, ends = self._made.get(router, ("", 0.0))
        now = self._clock()
        if ends - _BEFORE_S < now:
            claims = {"iss": self._name, "sub": self._name, "aud": router, "iat": int(now), "nbf": int(now)}
            signed = f"{_text({'alg': 'EdDSA', 'typ': 'JWT'})}.{_text({**claims, 'exp': int(now) + _LASTS_S})}"
            made = f"{signed}.{_base64(self._key.sign_bytes(signed.encode()))}"
            self._made[router] = made, now + _LASTS_S
        return made


def custodian_at(
    home: Path, lists: CustodyTable, name: str, tokens: OwnTokens, *, size: int, plain: bool,
    stack: contextlib.ExitStack,
) -> MakesCustodian:  # fmt: skip
    """Open the records of a router's custodian, and return what makes it.

    :param home: directory of the records. :param size: of its spool in bytes, 0 for half a disk. :param plain: routers
        of the list that are marked so are reached without TLS. :raises StageoutError: the records cannot be used.
    """
    table = stack.enter_context(contextlib.closing(Table(home / "custody-operations.sqlite")))
    place = home / "custody"
    receiving = stack.enter_context(contextlib.closing(Receiving(table, place)))

    def far(listed: Listed) -> Far:
        return Far(listed.address, listed.ca, tokens.token(listed.name), plain and listed.plain)

    spool = CustodySpool(place, receiving, size)
    return partial(Custodian, table, receiving, spool, lists, name, far, lambda: int(time.time()))


def _text(facts: dict[str, object]) -> str:
    return _base64(json.dumps(facts, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
