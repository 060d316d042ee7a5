"""Seconds to wait for daemons and tools of HTCondor, all in one place."""

from __future__ import annotations

#: HTCondor's default of QUERY_TIMEOUT, and the seconds for which people wait for a collector instead.
QUERY_DEFAULT_S, COMMAND_QUERY_S = 60, 15
#: For one question to a child process. The child is replaced after that.
COLLECTOR_S, SCHEDD_S, STARTD_S = 20.0, 10.0, 10.0
#: For condor_qedit, condor_hold and their like.
TOOL_S = 60
#: For the process that tells condor_master that a daemon is alive, and from one that failed to the next.
ALIVE_S, ALIVE_AGAIN_S = 60.0, 30.0
#: HTCondor's default of NOT_RESPONDING_TIMEOUT, and the least that counts where it is set for all daemons. A shorter
#: time-out kills healthy daemons: on a machine that swaps, work in an event loop may take long.
NOT_RESPONDING_S, NOT_RESPONDING_MIN_S = 3600, 300
