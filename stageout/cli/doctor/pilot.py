"""Checks of a pilot: it must report output as lost in time if it cannot deliver it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stageout.cli.doctor.findings import Finding, Machine, fail, ok, warn
from stageout.core.config import ConfigError

_NAME = "pilot-end"
_INSTALL = "put condor_config.d/30-stageout-pilot.conf behind the fragment for execute points, then condor_restart"


def pilot_end(machine: Machine) -> Iterator[Finding]:
    """Check that the manager knows when its spool ends, and that condor_master waits for its last report."""
    settings = machine.settings
    try:
        is_pilot, grace_s = settings.flag("STAGEOUT_PILOT"), settings.number("STAGEOUT_PILOT_GRACE")
    except ConfigError as problem:
        yield fail(_NAME, str(problem), "correct it, then condor_reconfig")
        return
    if not is_pilot:
        text = "STAGEOUT_PILOT is not set: output left at the end is missed only when the access point's lease runs out"
        yield warn(_NAME, text, _INSTALL)
        return
    short = [
        f"{name} = {text}"
        for name in ("SHUTDOWN_GRACEFUL_TIMEOUT", "SHUTDOWN_FAST_TIMEOUT")
        if (limit_s := _sum(text := settings.condor(name))) is not None and limit_s < grace_s
    ]
    if short:
        text = f"condor_master kills the manager before its last report: {', '.join(short)}"
        yield fail(_NAME, text, f"more than STAGEOUT_PILOT_GRACE = {grace_s:g}, as 30-stageout-pilot.conf sets them")
    else:
        yield ok(_NAME, f"the manager has {grace_s:g} s to deliver and to say what is lost")


def _sum(text: str) -> float | None:
    """Compute the value of ``90`` or of ``90 + 5``; None for other text."""
    try:
        return sum(float(part) for part in text.split("+"))
    except ValueError:
        return None
