"""Output of commands with ``--json``: objects, one a line, whose fields docs/reference/json-overlay.md explains."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from stageout.cli.exits import CommandError, Exit
from stageout.core.errors import StageoutError, TransferFailure

SCHEMA = 1


class Told(CommandError):
    """An error that ``--json`` has printed already."""

    def __init__(self, problem: CommandError | TransferFailure) -> None:
        super().__init__(str(problem), problem.kind)
        self.status = problem.status if isinstance(problem, CommandError) else Exit.FAILED


def tell(facts: dict[str, Any]) -> None:
    """Print an object."""
    print(json.dumps({"schema": SCHEMA, **facts}), flush=True)


def ending(problem: StageoutError | TransferFailure | None = None, outcome: str = "") -> dict[str, Any]:
    """Return the end of an operation, with the same fields for success and failure. :param outcome: "": either."""
    kind = getattr(problem, "kind", None)
    return {
        "outcome": outcome or ("done" if problem is None else "failed"),
        "reason": "" if problem is None else str(problem),
        "error_class": kind.name if kind else "",
        "error_code": kind.code if kind else 0,
        "retryable": bool(kind and kind.retryable),
    }


@contextlib.contextmanager
def item(is_wanted: bool, **about: Any) -> Iterator[dict[str, Any]]:
    """Collect facts about an item in a dictionary while it is processed, and print them at its end.

    :param is_wanted: False prints nothing. :param about: facts known in advance.
    :raises Told: the operation has failed, and the error was printed.
    """
    facts, start_s = dict(about), time.monotonic()
    try:
        yield facts
    except (CommandError, TransferFailure) as problem:
        if not is_wanted:
            raise
        tell({**facts, **ending(problem), "seconds": _since(start_s)})
        raise Told(problem) from None
    except (KeyboardInterrupt, SystemExit):
        if is_wanted:
            tell({**facts, **ending(outcome="cancelled"), "reason": "interrupted", "seconds": _since(start_s)})
        raise
    if is_wanted:
        tell({**facts, **ending(outcome=str(facts.get("outcome", ""))), "seconds": _since(start_s)})


def _since(start_s: float) -> float:
    return round(time.monotonic() - start_s, 3)
