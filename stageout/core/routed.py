"""Removals by a JobRouter: a copy whose program had ended before still has output to deliver."""

from __future__ import annotations

#: How a JobRouter begins RemoveReason: "JobRouter orphan" and "JobRouter aborted job".
REASON = "JobRouter"
_REMOVED = 3


def is_kept_copy(status: int, is_copy: bool, has_ended: bool, remove_reason: str) -> bool:
    """Return True when a JobRouter removed a copy whose program had ended: its output is delivered all the same.

    :param status: JobStatus. :param is_copy: it has RoutedBy. :param has_ended: TerminationPending.
    """
    return status == _REMOVED and is_copy and has_ended and remove_reason.startswith(REASON)
