"""Operations and results as they stand in the records."""

from __future__ import annotations

import json
from collections.abc import Iterator

from overlay_router.rules.states import Outcome, Result
from stageout.overlay.wire.messages import Operation


def as_operation(text: str) -> Operation:
    """An operation as it was written down."""
    values = json.loads(text)
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Operation(**{**values, **lists})


def as_columns(results: dict[int, Result]) -> str:
    """Results of a pack as text: by column, for most are the same."""
    return json.dumps([list(results), *zip(*results.values())], separators=(",", ":"))


def read_results(text: str) -> Iterator[tuple[int, Result]]:
    """As they were written by :func:`as_columns`."""
    return ((seq, Result(Outcome(outcome), *rest)) for seq, outcome, *rest in zip(*json.loads(text)))
