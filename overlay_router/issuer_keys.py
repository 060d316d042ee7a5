"""Keys of issuers of tokens, as the issuers publish them: fetched in the background, and kept on the disk."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stageout.core import durable, log

#: Seconds between two looks at all issuers, and after one that failed.
_EVERY_S, _AGAIN_S = 3600.0, 60.0
_WAITS_S, _MOST_BYTES = 10.0, 1 << 20
_CONFIGURATION = "/.well-known/openid-configuration"


class IssuerKeys:
    """The key sets of issuers that publish them.

    :param place: directory where they are kept. :param urls: by issuer, as the settings are now; "" where the issuer
        names it. :param changed: called with an issuer and its keys.
    """

    def __init__(
        self, place: Path, urls: Callable[[], Mapping[str, str]], changed: Callable[[str, Any], object]
    ) -> None:
        self._place, self._urls, self._changed = place, urls, changed
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """Fetch all of them now."""
        self._wanted.set()

    async def run(self) -> None:
        """Fetch them from time to time, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            pause_s = _EVERY_S
            for issuer, url in self._urls().items():
                try:
                    found = await loop.run_in_executor(None, _fetched, issuer, url)
                    if found != kept(self._place, issuer):
                        log.event("issuer-keys-changed", issuer=issuer)
                        self._changed(issuer, found)
                        await loop.run_in_executor(None, _keep, _file(self._place, issuer), found)
                except (OSError, ValueError, RecursionError, http.client.HTTPException) as problem:
                    pause_s = _AGAIN_S
                    log.warn("issuer-fetch-failed", issuer=issuer, problem=problem)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), pause_s)


def kept(place: Path, issuer: str) -> Any:
    """Return the key set of an issuer that was fetched last, without keys if there is none."""
    try:
        return json.loads(_file(place, issuer).read_text())
    except (FileNotFoundError, ValueError):
        return {"keys": []}


def _keep(path: Path, keys: object) -> None:
    durable.write_file("router-issuer-keys", path, json.dumps(keys).encode())


def _file(place: Path, issuer: str) -> Path:
    return place / f"issuer-{hashlib.sha256(issuer.encode()).hexdigest()[:32]}.json"


def _fetched(issuer: str, url: str) -> dict[str, Any]:
    """:raises ValueError: it is no key set. :raises OSError: it cannot be reached."""
    found = _json(url or str(_json(issuer.rstrip("/") + _CONFIGURATION).get("jwks_uri", "")))
    if not isinstance(found.get("keys"), list):
        raise ValueError("the answer is no JSON Web Key Set")
    return found


def _json(url: str) -> dict[str, Any]:
    if not url.startswith("https://"):
        raise ValueError(f"keys are fetched from https:// only, and not from {url!r}")
    data, until_s = b"", time.monotonic() + _WAITS_S
    with urllib.request.urlopen(url, timeout=_WAITS_S) as answer:
        if not answer.geturl().startswith("https://"):
            raise ValueError(f"keys are fetched from https:// only, and not from {answer.geturl()!r}")
        while part := answer.read1(65536):
            data += part
            if len(data) > _MOST_BYTES or time.monotonic() > until_s:
                raise ValueError(f"the answer has more than {_MOST_BYTES} bytes, or takes longer than {_WAITS_S:.0f} s")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found
