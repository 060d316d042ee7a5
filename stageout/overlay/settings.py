"""Key and routes as the administrator of a machine, or whoever calls, has set them."""

from __future__ import annotations

import functools
from pathlib import Path

from stageout.core.config import ConfigError, Settings, mapping_settings, tool_settings
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.routes import found_routes
from stageout.overlay.sockets import FIRST_CONNECTIONS
from stageout.overlay.wire.route import BadRoute, Route, addresses, parse_routes

_KNOB = "STAGEOUT_OVERLAY_ROUTES"
_KEY = "STAGEOUT_OVERLAY_KEY"
_CUSTODIAN = "STAGEOUT_OVERLAY_GATEWAY"
_CONNECTIONS = "STAGEOUT_OVERLAY_CONNECTIONS"
_CONGESTION = "STAGEOUT_OVERLAY_CONGESTION"
_ASK = "ask"


def routes_of(text: str, end: Gateway) -> tuple[Route, ...]:
    """Routes that a text names, else those of the configuration (asked once a process), else the direct one.

    :param end: where the routes lead; the parts ``ask HOST, ...`` of a text are replaced by what these routers know.
    :raises TransferFailure: BAD_REQUEST, with how to write them; of :func:`found_routes`.
    """
    parts = [part.strip() for part in (text or _configured().text(_KNOB)).split(";")]
    asks = [part for part in parts if part.split()[:1] == [_ASK]]
    named = [part for part in parts if part and part not in asks]
    if any(part == _ASK for part in asks):
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"{_KNOB}: write 'ask HOST, ...': the routers to be asked")
    try:
        found = [found_routes(addresses(part[len(_ASK) :]), end) for part in asks]
        routes = parse_routes("; ".join(named)) if named or not asks else ()
    except BadRoute as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"{_KNOB}: {problem}") from None
    return tuple(dict.fromkeys([*routes, *(route for some in found for route in some)]))


def custodian_of() -> Route:
    """The custodian that this machine's uploads go through, () without one. :raises TransferFailure: BAD_REQUEST."""
    try:
        return addresses(_configured().text(_CUSTODIAN))
    except BadRoute as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"{_CUSTODIAN}: {problem}") from None


@functools.lru_cache(maxsize=1)
def _configured() -> Settings:
    return tool_settings("STAGEOUT_OVERLAY_")


def connections_of(fixed: int = 0, text: str = "") -> tuple[int, int]:
    """Connections of a file on each route: at first, and at most.

    :param fixed: always so many; 0: a controller chooses, up to the number that ``text`` is, else the configured one.
    :raises TransferFailure: BAD_REQUEST, it is no number from 1 on.
    """
    most = fixed or _most(text)
    return min(fixed or FIRST_CONNECTIONS, most), most


def _most(text: str) -> int:
    settings = mapping_settings({_CONNECTIONS: text}) if text else _configured()
    try:
        return settings.count(_CONNECTIONS)
    except ConfigError as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, str(problem)) from None


def key_file_of(text: str = "") -> Path:
    """The file of the key for routers that a text names, else that of the configuration.

    :raises TransferFailure: BAD_REQUEST, the configuration has a relative path.
    """
    try:
        return Path(text or _configured().text(_KEY))
    except ConfigError as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, str(problem)) from None


def congestion_of(text: str = "") -> str:
    """The congestion control that a text names, else that of the configuration; "" for the kernel's default."""
    return text or _configured().text(_CONGESTION)
