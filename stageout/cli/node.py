"""This machine's sandbox manager, asked over its control socket."""

from __future__ import annotations

from stageout.cli.exits import Unavailable
from stageout.cli.rows import Row


def local_rows() -> list[Row]:
    """The sandboxes in this node's custody.

    :raises Unavailable: no manager answers here.
    """
    raise Unavailable("no sandbox manager answers on this machine")
