"""``stageout-web``: the pool's web page, a child of condor_master on an access point.

It changes nothing but requests in jobs, for readers who may change a delivery.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from stageout import daemon
from stageout.core.config import Settings
from stageout.core.extras import needs

PROGRAM = daemon.Program(
    name="stageout-web",
    subsystem="STAGEOUT_WEB",
    log_file="StageoutWebLog",
    about="Show the pool's stage-out on a web page. condor_master starts the daemon.",
    metrics="STAGEOUT_WEB_METRICS",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon. :returns: the exit status."""
    options = daemon.command_line(PROGRAM).parse_args(argv)

    def prepare(settings: Settings, load: daemon.Load) -> Callable[[], daemon.Service]:
        with needs("web"):
            from stageout_web.service import Daemon
        return lambda: Daemon(load, options.local_name)

    return daemon.run(PROGRAM, options, prepare)


if __name__ == "__main__":
    sys.exit(main())
