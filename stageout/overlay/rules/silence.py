"""Silent peers: when ranges go to other connections, and when a connection ends. Times are monotonic seconds.

A silent peer does not acknowledge bytes. A peer that acknowledges them without an answer may wait for its disk.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

#: TCP_USER_TIMEOUT of a connection without a body, and of one that carries a body. With 3 s a living receiver that did
#: not read for a moment cost the connection.
IDLE_TIMEOUT_S, BODY_TIMEOUT_S = 15.0, 120.0
#: A receiver that could not write for so long answers 503 with ``Retry-After``.
CANNOT_WRITE_S = 10.0
LEAST_SILENCE_S, ROUND_TRIPS = 1.0, 3
LEAST_ANSWER_S, ANSWERS = 15.0, 10
#: The tail sends at most so many blocks again, at most 2 % of a large file.
FEWEST_TAIL, MOST_TAIL = 4, 64
#: A body below this rate (bytes a second) for so long ends while the other side is ready.
LEAST_RATE, SLOW_S = 1024, 60.0


class Next(enum.Enum):
    """Next step with a request. ELSEWHERE: its ranges go to other connections too; a late answer still counts."""

    WAIT = "wait"
    ELSEWHERE = "elsewhere"
    CLOSE = "close"


class Progress(NamedTuple):
    """A request on one connection, as its client sees it.

    :param moved_at: when the peer last acknowledged or sent bytes; at first, when the request began.
    :param unacked: bytes in transit that are not acknowledged (TCP_INFO). A peer that closes its window has none.
    :param is_durable: the answer follows a durable step (an operation, a manifest, a batch), not a range.
    """

    moved_at: float
    unacked: int = 0
    is_durable: bool = False


def next_step(progress: Progress, now: float, round_trip_s: float, median_answer_s: float = 0.0) -> Next:
    """Decide about a request that has no answer yet. :param median_answer_s: of ranges on this route."""
    quiet_s = now - progress.moved_at
    if quiet_s >= BODY_TIMEOUT_S:
        return Next.CLOSE
    if progress.unacked:
        patience_s = max(LEAST_SILENCE_S, ROUND_TRIPS * round_trip_s)
    elif progress.is_durable:
        return Next.WAIT
    else:
        patience_s = max(LEAST_ANSWER_S, ANSWERS * median_answer_s)
    return Next.ELSEWHERE if quiet_s >= patience_s else Next.WAIT


def tail(blocks: int, sent_again: int) -> int:
    """Return how many more blocks idle connections may send again when no block is left. :param blocks: of the file."""
    return max(0, min(MOST_TAIL, max(FEWEST_TAIL, blocks * 2 // 100)) - sent_again)


def is_left_over(moved_at: float, gone_at: float) -> bool:
    """Tell whether a connection ends when its neighbour is back: it was silent for as long as the link was gone.

    TCP would wait for its next retransmission, up to two minutes later. :param gone_at: when any
        connection last heard the neighbour.
    """
    return moved_at <= gone_at


def cannot_write(stuck_since: float, now: float) -> bool:
    """Tell whether a receiver answers 503 and gives a range back. :param stuck_since: when its write began."""
    return now - stuck_since >= CANNOT_WRITE_S


def is_too_slow(moved: int, window_s: float) -> bool:
    """Tell whether a body ends for its rate. :param moved: bytes in the time in which the other side was ready."""
    return window_s >= SLOW_S and moved < LEAST_RATE * window_s
