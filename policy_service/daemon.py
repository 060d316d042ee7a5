"""``stageout-policy-service``: a child of condor_master, or alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from stageout import daemon
from stageout.core.config import Settings
from stageout.core.extras import needs

PROGRAM = daemon.Program(
    name="stageout-policy-service",
    subsystem="STAGEOUT_POLICY_SERVICE",
    log_file="StageoutPolicyLog",
    about="Grant streams between sites, as leases. condor_master starts the service; without HTCondor anything else"
    "\ndoes, with --alone or --settings.",
    metrics="STAGEOUT_POLICY_METRICS",
    runs_alone=True,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service. :returns: the exit status."""
    options = daemon.command_line(PROGRAM).parse_args(argv)
    pool_name = None if daemon.is_alone(options) else options.local_name

    def prepare(settings: Settings, load: daemon.Load) -> Callable[[], daemon.Service]:
        with needs("policy"):
            from policy_service.service import Daemon
        return lambda: Daemon(load, pool_name)

    return daemon.run(PROGRAM, options, prepare)


if __name__ == "__main__":
    sys.exit(main())
