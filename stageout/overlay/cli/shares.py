"""Routes of a file that has moved, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stageout.overlay.sending import Share


def as_json(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """Return one object a route."""
    return [
        {"by": list(one.route), "sent_bytes": one.sent_bytes, "connections": one.connections, "problem": one.problem}
        for one in shares
    ]
