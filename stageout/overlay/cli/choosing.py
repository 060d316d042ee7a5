"""The router that a command line names for HTTP: its address, keys, routes and connections."""

from __future__ import annotations

import argparse
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from stageout.cli.bars import printable
from stageout.cli.exits import CommandError, UsageError
from stageout.core.config import ConfigError, Settings, tool_settings
from stageout.core.errors import TransferFailure
from stageout.overlay.transfer.connection import Address, Place, Route, Trust
from stageout.overlay.transfer.identity import Identity, is_bound, read_key, read_token
from stageout.overlay.wire.route import DEFAULT_PORT, BadRoute, address, parse_routes

_KEY = "/etc/condor/stageout-overlay.key"
_PORTS = {"https": 443, "http": 80, "overlay": DEFAULT_PORT}
#: Characters that are no part of a path in a URL, or that are dropped from it in silence.
_LOST_IN_URLS = frozenset("?#\t\r\n")
_MOST_PATH_BYTES, _MOST_NAME_BYTES = 4096, 255
#: Connections of a file on each route, at first and at most.
_FIRST, _MOST = 2, 8


@dataclass(frozen=True)
class Target:
    """A router, and a path below its root. :param first: connections on each route at first. :param most: later."""

    place: Place
    identity: Identity
    path: str
    routes: tuple[Route, ...]
    first: int
    most: int

    @property
    def server(self) -> str:
        """Return its address."""
        return self.place.url


def is_http(url: str, options: argparse.Namespace) -> bool:
    """Tell whether a URL is reached by HTTP. ``overlay://`` is if the settings say so and a key or token fits."""
    scheme = url.partition(":")[0].lower()
    if scheme != "overlay":
        return scheme in ("https", "http")
    if _settings().text("STAGEOUT_OVERLAY_WIRE") != "http":
        return False
    if options.token:
        return True
    try:
        return read_key(Path(options.key)) is not None
    except TransferFailure:
        return False


def target(url: str, options: argparse.Namespace) -> Target:
    """Read a URL and the options about its router. :raises CommandError: one of them cannot be used."""
    if set(url) & _LOST_IN_URLS:
        raise UsageError(
            f"{printable(url)}: in a URL write %3F for ?, %23 for #, %0A for the end of a line, %09 for a tab"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"{printable(url)}: the port is not a number from 1 to 65535") from None
    if not parts.hostname or port == 0:
        raise UsageError(f"{printable(url)}: write {parts.scheme}://HOST[:PORT]/path")
    if "@" in parts.netloc:
        raise UsageError(f"{printable(url)}: nobody is named in a URL: --key or --token says who you are")
    is_plain = parts.scheme == "http"
    if is_plain and not _settings().flag("STAGEOUT_OVERLAY_PLAIN"):
        raise UsageError("http:// sends files and tokens without TLS: write https://, or set STAGEOUT_OVERLAY_PLAIN")
    server, via = Address(parts.hostname, port or _PORTS[parts.scheme]), tuple[str, ...]()
    if getattr(options, "through", ""):
        server, via = _through(options.through, server)
    identity = _identity(server.host, options)
    if via and identity.key is None:
        raise UsageError("--through needs a key of your own (--key): what a custodian delivers is signed")
    place = Place(
        server, Trust(options.cacert, options.pin, is_plain), identity.authorization, identity.relay_authorization,
        identity.told, via,
    )  # fmt: skip
    first, most = _connections(options.connections)
    return Target(place, identity, _path(url, parts.path), _routes(options.routes), first, most)


def _through(text: str, terminal: Address) -> tuple[Address, tuple[str, ...]]:
    """Return the custodian to connect to, and the NAMEs of the routers behind it: the host of each one."""
    try:
        stops = [Address(*address(one)) for one in text.split(",")]
    except BadRoute as problem:
        raise UsageError(f"--through: {problem}; write HOST[:PORT], or a chain A,B") from None
    return stops[0], tuple(one.host.lower() for one in (*stops[1:], terminal))


def _path(url: str, quoted: str) -> str:
    path = os.fsdecode(unquote_to_bytes(os.fsencode(quoted))).strip("/")
    check_path(path, url)
    return path


def check_path(path: str, url: str = "") -> None:
    """:raises UsageError: no router takes this path."""
    named = printable(url or path)[:200]
    data = os.fsencode(path)
    if len(data) > _MOST_PATH_BYTES:
        raise UsageError(f"{named}: its path is longer than {_MOST_PATH_BYTES} bytes")
    segments = data.split(b"/") if data else []
    if any(one in (b"", b".", b"..") or len(one) > _MOST_NAME_BYTES or b"\0" in one for one in segments):
        raise UsageError(f"{named}: a path has no empty names, no . and no .., and no name above 255 bytes")


def _identity(host: str, options: argparse.Namespace) -> Identity:
    token = options.token or ("" if options.key != _KEY else os.environ.get("BEARER_TOKEN_FILE", ""))
    try:
        if token and not is_bound(read_token(Path(token))):
            return Identity(host, token=Path(token))
        key = read_key(Path(options.key))
    except TransferFailure as failure:
        raise CommandError(str(failure), failure.kind) from None
    if key is None:
        raise UsageError(f"{options.key} is no key for HTTP: name a key of 'stageout token' (--key), or --token FILE")
    if token:
        return Identity(host, key, token=Path(token))
    return Identity(host, key, options.user or _login())


def _login() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        raise UsageError("your user has no name here: --user names the line of your key at the router") from None


def _routes(text: str) -> tuple[Route, ...]:
    try:
        routes = parse_routes(text or _settings().text("STAGEOUT_OVERLAY_ROUTES"))
        return tuple(tuple(Address(*address(one)) for one in route) for route in routes)
    except BadRoute as problem:
        raise UsageError(f"--routes: {problem}") from None


def _connections(fixed: int) -> tuple[int, int]:
    if fixed:
        return fixed, fixed
    try:
        most = min(_MOST, _settings().count("STAGEOUT_OVERLAY_CONNECTIONS"))
    except ConfigError as problem:
        raise UsageError(str(problem)) from None
    return min(_FIRST, most), most


@functools.lru_cache(maxsize=1)
def _settings() -> Settings:
    return tool_settings("STAGEOUT_OVERLAY_")
