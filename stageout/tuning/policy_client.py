"""The policy service as its clients see it: request, renew, report, release of streams over HTTP. Blocks.

``docs/administrator/policy-service.md`` describes the interface.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stageout.core.config import ConfigError, Settings
from stageout.core.errors import StageoutError
from stageout.core.http import exchange

_TIMEOUT_S = 5.0
_NAME_CHARS = 255


class NoLeaseError(StageoutError):
    """The service knows no such lease (any more): its streams must not be used for new transfers."""


class SilentError(StageoutError):
    """No usable answer: the service is away, or it cannot serve this client now. The text says which."""


@dataclass(frozen=True)
class Lease:
    """Streams that were granted.

    :param counted: streams that the service counts as used by this client at most.
    :param ends_in_s: from the moment the answer was sent. :param reason: the service's sentence.
    """

    id: str
    streams: int
    counted: int
    ends_in_s: float
    renew_in_s: float
    reason: str


@dataclass(frozen=True)
class Address:
    """The address of the service, and the client. :param site: of this node, the source of all its transfers."""

    url: str
    token_file: Path
    site: str


def address_of(settings: Settings) -> Address:
    """Return the service that the configuration names. :raises ConfigError: it cannot be used."""
    url = settings.text("STAGEOUT_POLICY_URL").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"STAGEOUT_POLICY_URL = {url}: write https://HOST:PORT")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ConfigError(f"STAGEOUT_POLICY_URL = {url}: the token would be sent in clear; write https://")
    host = settings.condor("FULL_HOSTNAME") or "localhost"
    site = settings.text("STAGEOUT_SITE") or host.partition(".")[2] or host
    return Address(url, Path(settings.text("STAGEOUT_POLICY_TOKEN")), service_name(site))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def service_name(text: str) -> str:
    """Make a name that the service accepts: letters, digits and ``._:@/+-``, a letter or digit first."""
    plain = re.sub(r"[^A-Za-z0-9._:@/+-]", "-", text).lstrip("._:@/+-")
    return plain[:_NAME_CHARS] or "none"


class PolicyClient:
    """Client of one service, with a connection for each request. Safe to use from several threads."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def request(self, client: str, destination: str, wanted: int) -> Lease:
        """Ask for streams to a destination; the same client asking again gets the same lease.

        :raises SilentError: no usable answer.
        """
        body = {"client": client, "source": self.address.site, "destination": destination, "wanted": wanted}
        return self._lease("POST", "/v1/leases", body)

    def renew(self, lease: str, wanted: int, in_use: int) -> Lease:
        """Ask for another term. :raises NoLeaseError: there is no such lease. :raises SilentError: no usable answer."""
        return self._lease("POST", f"/v1/leases/{lease}/renew", {"wanted": wanted, "in_use": in_use})

    def report(self, lease: str, in_use: int, rate_mb_s: float) -> None:
        """Say what is used and reached. :raises NoLeaseError: as :meth:`renew`. :raises SilentError: likewise."""
        self._ask("POST", f"/v1/leases/{lease}/report", {"in_use": in_use, "rate_mb_s": round(rate_mb_s, 3)})

    def release(self, lease: str) -> None:
        """Give the streams back. :raises NoLeaseError: they are already. :raises SilentError: no usable answer."""
        self._ask("DELETE", f"/v1/leases/{lease}", None)

    def _lease(self, method: str, path: str, body: Mapping[str, Any]) -> Lease:
        answer = self._ask(method, path, body)
        try:
            streams = int(answer["streams"])
            counted = max(streams, int(answer["in_use"]))
            ends_in_s, renew_in_s = float(answer["ends_in_s"]), float(answer["renew_in_s"])
            return Lease(str(answer["lease"]), streams, counted, ends_in_s, renew_in_s, str(answer["reason"]))
        except (KeyError, TypeError, ValueError) as problem:
            raise SilentError(f"{self.address.url} is no policy service: its answer lacks {problem}") from None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            token = self.address.token_file.read_text().strip()
            content = json.dumps(body).encode() if body is not None else None
            status, answer = exchange(method, self.address.url + path, content, token=token, timeout_s=_TIMEOUT_S)
        except (OSError, UnicodeError) as problem:
            raise SilentError(f"{type(problem).__name__}: {problem}") from None
        data = _object(answer)
        if status == 404 and path != "/v1/leases":
            raise NoLeaseError(_sentence(data))
        if status == 401:
            raise SilentError(f"the service refuses the token of STAGEOUT_POLICY_TOKEN = {self.address.token_file}")
        if status >= 300:
            raise SilentError(f"status {status}: {_sentence(data)}")
        return data


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data) if data else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _sentence(data: Mapping[str, Any]) -> str:
    return str(data.get("error", "no reason given"))[:300]
