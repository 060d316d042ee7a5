"""Messages of the control socket of a sandbox manager, ``SPOOL/run/control``, for people on the node.

Root and the manager's own user see everything, others their own sandboxes. Frames are those of the hand-off.
Questions::

    {"op": "status", "job": "..."}     GlobalJobId or cluster.proc; without it all
    {"op": "metrics"}
    {"op": "streams"}

``status`` is answered by a ``sandbox`` frame each (``sandbox``: the fields of SandboxReport; ``files``: how many
follow), then ``files`` frames (``files``: lists of the fields of FileReport), and at last ``end`` (``manager``: its
name; ``servers`` and ``flows``: lists of the fields of ServerReport and FlowReport). ``metrics`` is answered by one
frame with an object ``metrics``, ``streams`` by one with a list ``streams`` of the fields of :class:`StreamsReport`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SOCKET_NAME = "control"


class Tuning(str, enum.Enum):
    """State of the tuner for one server: the result of its last step, or the reason why there is none."""

    STARTING = "starting"
    RAISED = "raised"
    LOWERED = "lowered"
    KEPT = "kept"
    UNMEASURED = "unmeasured"
    FIXED = "fixed"
    NO_GRANT = "no-grant"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class StreamsReport:
    """The number of transfers to one server at once, and the reason.

    :param server: method and host. :param tuning: name of the controller. :param files_at_once: its current choice.
    :param streams_each: streams of one file. :param files_in_flight: files being sent. :param streams_in_use: streams
        that plugins were given.
    :param streams: allowed streams. :param rate_mb_s: at the last step, of all files together.
    :param reason: of the last step. :param grant: the origin of ``streams``. :param state: see :class:`Tuning`.
    """

    server: str
    tuning: str
    files_at_once: int
    streams_each: int
    files_in_flight: int
    streams_in_use: int
    streams: int
    rate_mb_s: float
    reason: str
    grant: str
    state: str = ""
