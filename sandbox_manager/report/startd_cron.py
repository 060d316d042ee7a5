"""``stageout-startd-cron SPOOL``: streams the manager's figures into the slot ads (STARTD_CRON, mode WaitForExit).

Prints a block whenever ``SPOOL/run/state.json`` has changed. The startd sends its slots to the collector at once only
when that matters to matchmaking or to an agent: a node would otherwise send all its slots with every figure. Without a
manager the node works as any other: the last block that it prints then has no effect on START.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from stageout.core.classads import unparse_old

_POLL_S = 0.5
_DEAD_S = 120.0
_URGENT = ("StageOutManager", "StageOutAccept", "StageOutDraining")


def main(argv: list[str] | None = None) -> int:
    """Stream until the startd ends this process."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: stageout-startd-cron SPOOL (started by the startd; prints for ever)", file=sys.stderr)
        return 2
    path = Path(arguments[0]) / "run" / "state.json"
    parent, last = os.getppid(), Shown({}, {})
    while os.getppid() == parent:
        shown = shown_by(read_state(path), time.time())
        if shown != last:
            print(blocks(shown, last), end="", flush=True)
            last = shown
        time.sleep(_POLL_S)
    return 0


def read_state(path: Path) -> dict[str, Any]:
    """Read the manager's figures and report; empty without a manager."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


class Shown(NamedTuple):
    """Ads for the slots: figures for all of them, the report for one."""

    figures: dict[str, Any]
    report: dict[str, Any]


def shown_by(state: dict[str, Any], now: float) -> Shown:
    """Return what the slots must show now."""
    figures = dict(state.get("figures") or {})
    if not figures or now - figures.get("StageOutHeartbeat", 0) > _DEAD_S:
        figures = {"StageOutAccept": True, "StageOutDataSlotsFree": 0}
    return Shown(figures, state.get("report") or {"StageOutPayload": "", "StageOutSignature": ""})


def blocks(shown: Shown, before: Shown) -> str:
    """Yield two blocks in the startd's form, each with whether the collector must have it at once."""
    urgent = any(shown.figures.get(name) != before.figures.get(name) for name in _URGENT)
    constraint = "SlotMergeConstraint = SlotID == 1 && (DSlotID ?: 0) == 0\n"
    return (
        f"{unparse_old(shown.figures)}- figures update:{str(urgent).lower()}\n"
        f"{unparse_old(shown.report)}{constraint}- report update:{str(shown.report != before.report).lower()}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
