"""This machine's sandbox manager, asked over its socket."""

from __future__ import annotations

from stageout.cli.exits import Unavailable
from stageout.cli.rows import Row
from stageout.core.classads import ClassAd
from stageout.core.config import Settings


def local_rows() -> list[Row]:
    """The sandboxes in this node's custody.

    :raises Unavailable: no manager answers here.
    """
    raise Unavailable("no sandbox manager answers on this machine")


def manager_facts(settings: Settings) -> ClassAd:
    """What the manager says about itself: Manager (its name), Uid, BytesAtRisk.

    :raises FileNotFoundError: no socket. :raises ConnectionRefusedError: nobody listens.
    """
    raise FileNotFoundError(2, "no socket", settings.text("STAGEOUT_SPOOL"))
