"""Routes as the administrator of a machine, or whoever calls, has set them."""

from __future__ import annotations

import functools

from stageout.core.config import tool_settings
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.wire.route import BadRoute, Route, parse_routes

_KNOB = "STAGEOUT_OVERLAY_ROUTES"


def routes_of(text: str = "") -> tuple[Route, ...]:
    """Routes that a text names, else those of the configuration (asked once a process), else the direct one.

    :raises TransferFailure: BAD_REQUEST, with how to write them.
    """
    try:
        return parse_routes(text or _configured())
    except BadRoute as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"{_KNOB}: {problem}") from None


@functools.lru_cache(maxsize=1)
def _configured() -> str:
    return tool_settings("STAGEOUT_OVERLAY_").text(_KNOB)
