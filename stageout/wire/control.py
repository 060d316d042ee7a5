"""Messages of the control socket of a sandbox manager, ``SPOOL/run/control``, for people on the node.

Root and the manager's own user see everything, others their own sandboxes. Frames are those of the hand-off.
Questions::

    {"op": "status", "job": "..."}     GlobalJobId or cluster.proc; without it all
    {"op": "metrics"}

``status`` is answered by a ``sandbox`` frame each (``sandbox``: the fields of SandboxReport; ``files``: how many
follow), then ``files`` frames (``files``: lists of the fields of FileReport), and at last ``end`` (``manager``: its
name). ``metrics`` is answered by one frame with an object ``metrics``.
"""

from __future__ import annotations

SOCKET_NAME = "control"
