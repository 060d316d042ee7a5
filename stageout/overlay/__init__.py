"""Client of the overlay's routers: ``open``, ``put``, ``get`` and ``copy``, and ``gateway_of`` for the router meant.

Each is loaded when it is first used. More is in :mod:`client` (a file there), :mod:`many` (many files there, small ones
in :mod:`packs`), :mod:`fetch` and :mod:`opening` (a file back), :mod:`copying` (from router to router),
:mod:`operations` (names), :mod:`channel` (one connection).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageout.overlay.channel import gateway_of as gateway_of
    from stageout.overlay.client import put as put
    from stageout.overlay.copying import copy as copy
    from stageout.overlay.fetch import get as get
    from stageout.overlay.opening import open_file as open

_CALLS = {
    "open": ("opening", "open_file"),
    "put": ("client", "put"),
    "get": ("fetch", "get"),
    "copy": ("copying", "copy"),
    "gateway_of": ("channel", "gateway_of"),
}
__all__ = ["copy", "gateway_of", "get", "open", "put"]


def __getattr__(name: str) -> Any:
    if name not in _CALLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _CALLS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
