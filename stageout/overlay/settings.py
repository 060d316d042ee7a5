"""Routes as the administrator of a machine, or whoever calls, has set them."""

from __future__ import annotations

import functools

from stageout.core.config import tool_settings
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.routes import found_routes
from stageout.wire.route import BadRoute, Route, addresses, parse_routes

_KNOB = "STAGEOUT_OVERLAY_ROUTES"
_ASK = "ask"


def routes_of(text: str, end: Gateway) -> tuple[Route, ...]:
    """Routes that a text names, else those of the configuration (asked once a process), else the direct one.

    :param end: where the routes lead; the parts ``ask HOST, ...`` of a text are replaced by what these routers know.
    :raises TransferFailure: BAD_REQUEST, with how to write them; of :func:`found_routes`.
    """
    parts = [part.strip() for part in (text or _configured()).split(";")]
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


@functools.lru_cache(maxsize=1)
def _configured() -> str:
    return tool_settings("STAGEOUT_OVERLAY_").text(_KNOB)
