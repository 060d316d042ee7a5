"""The manager's settings, read once and again on SIGHUP."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from sandbox_manager.accounts import Account, read_accounts
from sandbox_manager.retry import RetryRules
from sandbox_manager.sandbox import Sandbox
from sandbox_manager.slots import Limits
from sandbox_manager.tuner import TuningRules, read_tuning
from stageout.core.config import Settings
from stageout.movers.plugins_table import PLUGIN_LIFETIME_S

_MB = 1024 * 1024


@dataclass(frozen=True)
class Rules:
    """All knobs that the way of a sandbox depends on; durations in seconds.

    :param accounts: for output of jobs whose account is not their owner's.
    :param quota_bytes: of the spool, 0: half of its filesystem. :param lifetime_s: of one call of a plugin, at most.
    :param is_pilot: the spool goes away when HTCondor stops. :param pilot_end: wall clock, 0 when it is not known.
    :param pilot_grace_s: from the signal to stop until the last report.
    """

    limits: Limits
    tuning: TuningRules
    retry: RetryRules
    quota_bytes: int
    owner_quota_bytes: int
    require_verified: bool
    confirm_timeout_s: float
    retention_s: float
    stop_grace_s: float
    lifetime_s: float
    is_pilot: bool
    pilot_end: int
    pilot_grace_s: float
    renewal_interval_s: float
    accounts: tuple[Account, ...] = ()


def read_rules(settings: Settings) -> Rules:
    """Rules from the configuration. :raises ConfigError: a knob cannot be used."""
    return Rules(
        limits=Limits(
            active=settings.count("STAGEOUT_DATA_SLOT_ACTIVE"),
            depth=settings.count("STAGEOUT_DATA_SLOT_DEPTH"),
            cpus=_cpus(settings),
            movers=settings.count("STAGEOUT_MAX_MOVERS"),
            movers_per_server=settings.count("STAGEOUT_MAX_MOVERS_PER_DESTINATION"),
            movers_per_owner=settings.count("STAGEOUT_MAX_MOVERS_PER_OWNER"),
            batch_files=settings.count("STAGEOUT_BATCH_FILES"),
            batch_bytes=settings.count("STAGEOUT_BATCH_MB") * _MB,
            urgent_s=settings.number("STAGEOUT_URGENT"),
        ),
        tuning=read_tuning(settings),
        retry=RetryRules(
            attempts=settings.count("STAGEOUT_ATTEMPTS"),
            first_s=settings.number("STAGEOUT_RETRY_FIRST"),
            longest_s=settings.number("STAGEOUT_RETRY_MAX"),
            give_up_s=settings.number("STAGEOUT_GIVE_UP"),
            credential_s=settings.number("STAGEOUT_RETENTION"),
        ),
        quota_bytes=settings.count("STAGEOUT_SPOOL_QUOTA_MB") * _MB,
        owner_quota_bytes=settings.count("STAGEOUT_OWNER_QUOTA_MB") * _MB,
        require_verified=settings.flag("STAGEOUT_REQUIRE_VERIFIED"),
        confirm_timeout_s=settings.number("STAGEOUT_CONFIRM_TIMEOUT"),
        retention_s=settings.number("STAGEOUT_RETENTION"),
        stop_grace_s=settings.number("STAGEOUT_STOP_GRACE"),
        renewal_interval_s=settings.number("STAGEOUT_RENEWAL_INTERVAL"),
        lifetime_s=_number(settings.condor("MAX_FILE_TRANSFER_PLUGIN_LIFETIME"), PLUGIN_LIFETIME_S),
        is_pilot=settings.flag("STAGEOUT_PILOT"),
        pilot_end=settings.count("STAGEOUT_PILOT_END"),
        pilot_grace_s=settings.number("STAGEOUT_PILOT_GRACE"),
        accounts=read_accounts(settings.text("STAGEOUT_ACCOUNTS")),
    )


def deadline_of(box: Sandbox, rules: Rules) -> float:
    """Wall clock by which a sandbox must have been sent: the end of its credential or pilot, or when it is given up."""
    return min(box.due_since + rules.retry.give_up_s, *(at or math.inf for at in (box.deadline_at, rules.pilot_end)))


def _cpus(settings: Settings) -> int:
    for name in ("NUM_CPUS", "DETECTED_CPUS"):
        value = int(_number(settings.condor(name), 0))
        if value > 0:
            return value
    return os.cpu_count() or 1


def _number(text: str, default: float) -> float:
    """A parameter of HTCondor's own; it may be an expression, and then the default serves."""
    try:
        return float(text)
    except ValueError:
        return default
