"""Readers of the page: those with a token, users whom a proxy names, and what each may see and change."""

from __future__ import annotations

import ipaddress
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Union

from aiohttp import web

from stageout.core.tokens import TokenTable, digest_of

Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

COOKIE = "stageout_reader"
SESSION_S = 12 * 3600.0
_SESSIONS = 1000
TOKEN_HEADER = "X-Stageout-Proxy-Token"
"""Header with the secret of a proxy."""
#: A user as in the attribute User of a job. Neither encoded nor quoted forms are decoded: they are refused.
_USER = re.compile(r"[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9.-]{1,190}|[A-Za-z0-9._+-]{1,64}", re.A)
HEADER_NAME = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*", re.A)


@dataclass(frozen=True)
class Rights:
    """Readers who may change deliveries.

    :param operators: names of tokens and users, for the output of all jobs. :param owners: a token with the name of a
        user, and the user whom a proxy names, is for the jobs of this user.
    """

    operators: frozenset[str] = frozenset()
    owners: bool = False

    def allow(self, reader: str, user: str) -> bool:
        """Tell whether a reader may change the delivery of a user's job. :param user: as in the job's ad."""
        return bool(reader) and (reader in self.operators or (self.owners and bool(user) and reader == user))


NOBODY = Rights()
"""Rights of a page that changes nothing."""


class Reader(NamedTuple):
    """Sender of a request. :param name: of its token, or the user whom a proxy names; "" for a stranger."""

    name: str = ""
    is_user: bool = False


class ProxyRefused(Exception):
    """A request speaks for a user and must not. The text tells the administrator why."""


class Proxies:
    """Proxies that name the user of a request.

    :param networks: of their addresses. :param tokens: their secrets. :param header: has the user.
    """

    def __init__(self, networks: Iterable[Network] = (), tokens: TokenTable | None = None, header: str = "") -> None:
        self._networks, self._tokens, self._header = tuple(networks), tokens, header.lower()

    def __bool__(self) -> bool:
        return self._tokens is not None

    def speaks(self, request: web.Request) -> bool:
        """Tell whether a proxy has sent a request. :raises ProxyRefused: something else claims to be a proxy."""
        claims = [name for name in request.headers if _plain(name) in (self._header, TOKEN_HEADER.lower())]
        if not claims:
            return False
        if self._tokens is None:
            raise ProxyRefused("No proxy may name users here (STAGEOUT_WEB_PROXIES).")
        if any("_" in name for name in claims):
            raise ProxyRefused("A header of the proxy has another form of its name.")
        if not self._is_near(request):
            raise ProxyRefused("This address may not name users (STAGEOUT_WEB_PROXIES).")
        given = request.headers.getall(TOKEN_HEADER, [])
        if len(given) != 1 or self._tokens.owner(given[0]) is None:
            raise ProxyRefused(f"The proxy must send its token once, in {TOKEN_HEADER} (STAGEOUT_WEB_PROXY_TOKEN).")
        return True

    def user(self, request: web.Request) -> str:
        """Return the user in a request of a proxy, "" without one. :raises ProxyRefused: it names no user."""
        users = request.headers.getall(self._header, [])
        if not users:
            return ""
        if len(users) != 1 or not _USER.fullmatch(users[0]):
            raise ProxyRefused("The proxy must name one user as jobs do, such as alice@example.org.")
        return users[0]

    def _is_near(self, request: web.Request) -> bool:
        """Tell whether the connection itself comes from a proxy. No header counts."""
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        try:
            address = ipaddress.ip_address(str(peer[0]) if peer else "")
        except ValueError:
            return False
        plain = getattr(address, "ipv4_mapped", None) or address
        return any(plain in network for network in self._networks)


def _plain(name: str) -> str:
    """Return a header's name as a gateway may read it: "X_User" is "x-user"."""
    return name.lower().replace("_", "-")


class Readers:
    """Readers who may see names of files.

    :param tokens: None: nobody has one. :param rights: operators see all names. :param proxies: name users.
    """

    def __init__(
        self,
        tokens: TokenTable | None,
        rights: Rights = NOBODY,
        proxies: Proxies | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens, self.rights, self.proxies = tokens, rights, proxies or Proxies()
        self._clock_s = clock_s
        self._sessions: dict[str, tuple[bytes, float]] = {}

    def replace(self, tokens: TokenTable | None, rights: Rights, proxies: Proxies) -> None:
        """Take other settings. Sessions go on as long as their tokens are known."""
        self.tokens, self.rights, self.proxies = tokens, rights, proxies

    def reader(self, request: web.Request) -> Reader:
        """Return who has sent a request. A user whom a proxy names counts alone, without tokens and cookies.

        :raises ProxyRefused: the request names a user and must not.
        """
        user = self.proxies.user(request) if self.proxies.speaks(request) else ""
        return Reader(user, True) if user else Reader(self._name(request))

    def sees_all(self, reader: Reader) -> bool:
        """Tell whether a reader sees the names of all files."""
        return bool(reader.name) and (not reader.is_user or reader.name in self.rights.operators)

    def _name(self, request: web.Request) -> str:
        """Return the name of the token that a request or its session has; "" without one."""
        if self.tokens is None:
            return ""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (owner := self.tokens.owner(token.strip())) is not None:
            return owner
        given, end_s = self._sessions.get(request.cookies.get(COOKIE, ""), (b"", 0.0))
        return self.tokens.owner_of_digest(given) or "" if end_s > self._clock_s() else ""

    def begin(self, token: str) -> str | None:
        """Return the cookie of a new session, which ends with its token; None for an unknown token."""
        if self.tokens is None or self.tokens.owner(token) is None:
            return None
        now_s = self._clock_s()
        self._sessions = {key: one for key, one in self._sessions.items() if one[1] > now_s}
        while len(self._sessions) >= _SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = digest_of(token), now_s + SESSION_S
        return cookie

    def end(self, cookie: str) -> None:
        """End a session."""
        self._sessions.pop(cookie, None)
