"""Addresses of routers, ``HOST:PORT``, as settings and messages write them."""

from __future__ import annotations

import re

_FORM = re.compile(r"(?:\[([0-9A-Fa-f:.%]{2,60})\]|([A-Za-z0-9](?:[A-Za-z0-9._-]{0,118}[A-Za-z0-9])?)):(\d{1,5})")


def split_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``. :raises ValueError: the text has another form; the error explains it."""
    found = _FORM.fullmatch(text)
    if not found or not 0 < int(found.group(3)) < 65536:
        raise ValueError(f"{text[:150]!r} is not HOST:PORT")
    return found.group(1) or found.group(2), int(found.group(3))


def is_address(text: str) -> bool:
    """Tell whether a text is ``HOST:PORT``."""
    try:
        split_address(text)
    except ValueError:
        return False
    return True
