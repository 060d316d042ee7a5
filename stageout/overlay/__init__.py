"""Client of the overlay's routers.

``gateway_of`` says which router is meant; ``put``, ``get`` and ``copy`` (from router to router) move whole files,
``put_many`` and ``get_many`` many of them, ``open`` reads or writes one as Python's own. A ``Session`` lists, renames
and deletes. All raise :class:`TransferFailure`, whose ``kind``, an :class:`ErrorClass`, says whether another try may
help::

    from stageout import overlay

    gateway = overlay.gateway_of("gateway.example.org", 9621, "alice.key")
    try:
        overlay.put(gateway, "results.tar", "alice/results.tar")
    except overlay.TransferFailure as failure:
        print(failure, "- try again" if failure.kind.retryable else "- needs a person")

Each is loaded when it is first used. More is in :mod:`client` (a file there), :mod:`many` (many files there or back,
small ones in :mod:`packs`), :mod:`fetch` and :mod:`opening` (a file back), :mod:`copying` (from router to router),
:mod:`operations` (names), :mod:`key_file` (``gateway_of``), :mod:`channel` (one connection).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageout.core.errors import ErrorClass as ErrorClass
    from stageout.core.errors import TransferFailure as TransferFailure
    from stageout.overlay.client import put as put
    from stageout.overlay.copying import copy as copy
    from stageout.overlay.fetch import get as get
    from stageout.overlay.key_file import gateway_of as gateway_of
    from stageout.overlay.many import get_many as get_many
    from stageout.overlay.many import put_many as put_many
    from stageout.overlay.opening import open_file as open
    from stageout.overlay.operations import Session as Session

_NAMES = {
    "open": ("stageout.overlay.opening", "open_file"),
    "put": ("stageout.overlay.client", "put"),
    "put_many": ("stageout.overlay.many", "put_many"),
    "get": ("stageout.overlay.fetch", "get"),
    "get_many": ("stageout.overlay.many", "get_many"),
    "copy": ("stageout.overlay.copying", "copy"),
    "gateway_of": ("stageout.overlay.key_file", "gateway_of"),
    "Session": ("stageout.overlay.operations", "Session"),
    "ErrorClass": ("stageout.core.errors", "ErrorClass"),
    "TransferFailure": ("stageout.core.errors", "TransferFailure"),
}
__all__ = [
    "ErrorClass",
    "Session",
    "TransferFailure",
    "copy",
    "gateway_of",
    "get",
    "get_many",
    "open",
    "put",
    "put_many",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(importlib.import_module(module), attribute)
