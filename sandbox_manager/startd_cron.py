"""``stageout-startd-cron SPOOL``: streams the manager's figures into the slot ads (STARTD_CRON, mode WaitForExit).

Prints a block whenever ``SPOOL/run/state.json`` has changed. Without a manager the node works as any other: the last
block that it prints then has no effect on START.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from stageout.core.classads import unparse_old

_POLL_S = 0.5
_DEAD_S = 120.0


def main(argv: list[str] | None = None) -> int:
    """Stream until the startd ends this process."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: stageout-startd-cron SPOOL (started by the startd; prints for ever)", file=sys.stderr)
        return 2
    path = Path(arguments[0]) / "run" / "state.json"
    parent, last = os.getppid(), ""
    while os.getppid() == parent:
        text = blocks(read_state(path), time.time())
        if text != last:
            print(text, end="", flush=True)
            last = text
        time.sleep(_POLL_S)
    return 0


def read_state(path: Path) -> dict[str, Any]:
    """The manager's figures and report; empty without a manager."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def blocks(state: dict[str, Any], now: float) -> str:
    """Two blocks in the startd's form: figures for all slots, the report for one."""
    figures = dict(state.get("figures") or {})
    if not figures or now - figures.get("StageOutHeartbeat", 0) > _DEAD_S:
        figures = {"StageOutAccept": True, "StageOutDataSlotsFree": 0}
    report = state.get("report") or {"StageOutPayload": "", "StageOutSignature": ""}
    constraint = "SlotMergeConstraint = SlotID == 1 && (DSlotID ?: 0) == 0\n"
    return f"{unparse_old(figures)}- figures update:true\n{unparse_old(report)}{constraint}- report update:true\n"


if __name__ == "__main__":
    sys.exit(main())
