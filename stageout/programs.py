"""Entries of the commands and daemons. They answer ``--version`` before anything else of the product is loaded."""

from __future__ import annotations

import sys

from stageout import __version__

#: Program -> module with its ``main``.
PROGRAMS = {
    "stageout": "stageout.cli.main",
    "stageout-sandbox-manager": "sandbox_manager.daemon",
    "stageout-startd-cron": "sandbox_manager.report.startd_cron",
    "stageout-schedd-agent": "schedd_agent.daemon",
    "stageout-policy-service": "policy_service.daemon",
    "stageout-router": "overlay_router.daemon",
    "stageout-web": "stageout_web.daemon",
}


def _run(program: str) -> int:
    """Run a program. :returns: its exit status."""
    if sys.argv[1:] == ["--version"]:
        print(f"{program} {__version__}")
        return 0
    import importlib

    module = PROGRAMS[program]
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as problem:
        if problem.name not in (module, module.partition(".")[0]):
            raise
        from stageout.daemon import EXIT_NO_RESTART

        print(
            f"{program} needs the Python module {problem.name}, which is not installed: install all of stageout",
            file=sys.stderr,
        )
        return EXIT_NO_RESTART
    return int(main())


def stageout() -> int:
    """Run ``stageout``."""
    return _run("stageout")


def sandbox_manager() -> int:
    """Run ``stageout-sandbox-manager``."""
    return _run("stageout-sandbox-manager")


def startd_cron() -> int:
    """Run ``stageout-startd-cron``."""
    return _run("stageout-startd-cron")


def schedd_agent() -> int:
    """Run ``stageout-schedd-agent``."""
    return _run("stageout-schedd-agent")


def policy_service() -> int:
    """Run ``stageout-policy-service``."""
    return _run("stageout-policy-service")


def router() -> int:
    """Run ``stageout-router``."""
    return _run("stageout-router")


def web() -> int:
    """Run ``stageout-web``."""
    return _run("stageout-web")
