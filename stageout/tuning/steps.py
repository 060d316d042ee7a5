"""A controller's decision, and the transfers that fit into a grant."""

from __future__ import annotations

from dataclasses import dataclass

from stageout.core.streams import Knobs


@dataclass(frozen=True)
class Step:
    """A controller's decision.

    :param concurrency: transfers at once from now on. :param parallelism: streams of each.
    :param reason: one sentence, for the log and for ``status``.
    """

    concurrency: int
    parallelism: int
    reason: str


def within_grant(concurrency: int, streams: int, knobs: Knobs) -> tuple[int, int]:
    """Choose transfers and streams of each that fit into a grant.

    At least one transfer while there is a stream at all, with fewer streams than ``parallelism`` if need be.

    :param streams: granted.
    """
    if streams <= 0:
        return 0, knobs.parallelism
    parallelism = min(knobs.parallelism, streams)
    return max(1, min(concurrency, streams // parallelism, knobs.maximum)), parallelism
