"""The manager's settings, read once and again on SIGHUP."""

from __future__ import annotations

import importlib
import math
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageout.core.config import ConfigError, Settings
from stageout.core.errors import Advice, ErrorClass
from stageout.core.streams import FIXED, Knobs
from stageout.core.units import MB
from stageout.model.run import Account
from stageout.model.sandbox import SENDABLE, Sandbox
from stageout.movers.plugins_table import PLUGIN_LIFETIME_S

#: The part that adapts. It is loaded when it is chosen.
_ADAPTIVE = "stageout.tuning.servers"
#: After these bytes a batch takes no further file.
_BATCH_BYTES = 1024 * MB
#: Files in transfer to a server at the start, files to complete between two steps, and files by which a step changes
#: their number.
_INITIAL, _DELAY, _STEP = 4, 4, 1
#: Change of the rate, in MB/s, that the algorithm ``running`` needs for a step.
_THRESHOLD_MB_S = 1.0


@dataclass(frozen=True)
class Limits:
    """Bounds that the planner keeps.

    :param active: places of one data slot that send to one server; :param depth: further ones that wait.
    :param cpus: of the node; the data slots of one partitionable slot together are never more.
    :param movers: batches at once on the node; :param movers_per_server: batches at once to one server;
    :param movers_per_owner: batches at once of one owner. :param batch_bytes: after which a batch gets no further file.
    :param urgent_window_s: before a deadline, from which on a sandbox goes before all others.
    """

    active: int
    depth: int
    cpus: int
    movers: int
    movers_per_server: int
    movers_per_owner: int
    batch_files: int
    batch_bytes: int
    urgent_window_s: float


@dataclass(frozen=True)
class RetryRules:
    """The knobs of the schedule; durations in seconds.

    :param attempts: that count, of one file; 0 without a limit. :param initial_delay_s: wait before the second attempt.
    :param max_delay_s: most between two attempts.
    :param delivery_timeout_s: after acceptance, or after the last `stageout retry`.
    :param credential_timeout_s: the same for a file whose credential in custody has ended: it waits for a new one.
    :param fallback_after_s: time until files that were tried go to the job's fallback; 0: only when they fail.
    """

    attempts: int
    initial_delay_s: float
    max_delay_s: float
    delivery_timeout_s: float
    credential_timeout_s: float = 0.0
    fallback_after_s: float = 0.0


@dataclass(frozen=True)
class TuningRules:
    """The administrator's settings.

    :param knobs: ``parallelism`` is for plugins that can send a file in parts. :param profiles: directory of what
        ``stageout profile`` has measured.
    """

    controller: str
    knobs: Knobs
    profiles: Path


@dataclass(frozen=True)
class Rules:
    """All knobs that the way of a sandbox depends on; durations in seconds.

    :param accounts: for output of jobs whose account is not their owner's.
    :param quota_bytes: of the spool, 0: half of its filesystem. :param lifetime_s: of one call of a plugin, at most.
    :param is_pilot: the spool goes away when HTCondor stops. :param pilot_end: wall clock, 0 when it is not known.
    :param pilot_grace_s: from the signal to stop until the last report.
    :param never_returns: expression over the machine's ad. :param short_lease_s: of a node for which it is true.
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
    accounts: tuple[Account, ...] = ()
    never_returns: str = "false"
    short_lease_s: int = 900


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
            batch_bytes=_BATCH_BYTES,
            urgent_window_s=settings.number("STAGEOUT_URGENT_WINDOW"),
        ),
        tuning=read_tuning(settings),
        retry=RetryRules(
            attempts=settings.count("STAGEOUT_ATTEMPTS"),
            initial_delay_s=settings.number("STAGEOUT_RETRY_INITIAL_DELAY"),
            max_delay_s=settings.number("STAGEOUT_RETRY_MAX"),
            delivery_timeout_s=settings.number("STAGEOUT_DELIVERY_TIMEOUT"),
            credential_timeout_s=settings.number("STAGEOUT_RETENTION"),
            fallback_after_s=settings.number("STAGEOUT_FALLBACK_AFTER"),
        ),
        quota_bytes=settings.count("STAGEOUT_SPOOL_QUOTA_MB") * MB,
        owner_quota_bytes=settings.count("STAGEOUT_OWNER_QUOTA_MB") * MB,
        require_verified=settings.flag("STAGEOUT_REQUIRE_VERIFIED"),
        confirm_timeout_s=settings.number("STAGEOUT_CONFIRM_TIMEOUT"),
        retention_s=settings.number("STAGEOUT_RETENTION"),
        stop_grace_s=settings.number("STAGEOUT_STOP_GRACE"),
        lifetime_s=_number(settings.condor("MAX_FILE_TRANSFER_PLUGIN_LIFETIME"), PLUGIN_LIFETIME_S),
        is_pilot=settings.flag("STAGEOUT_PILOT"),
        pilot_end=settings.count("STAGEOUT_PILOT_END"),
        pilot_grace_s=settings.number("STAGEOUT_PILOT_GRACE"),
        accounts=read_accounts(settings.text("STAGEOUT_ACCOUNTS")),
        never_returns=settings.text("STAGEOUT_NEVER_RETURNS"),
        short_lease_s=settings.count("STAGEOUT_SHORT_LEASE"),
    )


def read_tuning(settings: Settings) -> TuningRules:
    """Rules from the configuration. :raises ConfigError: a knob cannot be used."""
    name = settings.text("STAGEOUT_TUNING").lower()
    knobs = Knobs(
        initial=_INITIAL,
        maximum=settings.count("STAGEOUT_TUNING_MAX"),
        parallelism=settings.count("STAGEOUT_TUNING_STREAMS"),
        delay=_DELAY,
        increment=_STEP,
        threshold=_THRESHOLD_MB_S,
    )
    if name != FIXED:
        adaptive_part(name)  # a part that is missing is refused here, not at the first delivery
    return TuningRules(name, knobs, Path(settings.text("STAGEOUT_PROFILES")))


def adaptive_part(tuning: str) -> Any:
    """Load the module with the chooser that adapts. :raises ConfigError: it is not installed."""
    try:
        return importlib.import_module(_ADAPTIVE)
    except ModuleNotFoundError as problem:
        if problem.name not in (_ADAPTIVE, _ADAPTIVE.rpartition(".")[0]):
            raise
        raise ConfigError(
            f"STAGEOUT_TUNING = {tuning}: the Python package stageout.tuning is not installed; set STAGEOUT_TUNING = "
            f"{FIXED}, or install all of stageout"
        ) from None


def read_accounts(names: str) -> tuple[Account, ...]:
    """Look up the accounts of STAGEOUT_ACCOUNTS. A manager that is not root can use none.

    :raises ConfigError: there is no such account, or it is root's.
    """
    if os.geteuid() != 0:
        return ()
    return tuple(map(_account, names.replace(",", " ").split()))


def _account(name: str) -> Account:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"STAGEOUT_ACCOUNTS: this node has no account {name}; make it, or remove the name") from None
    if found.pw_uid == 0:
        raise ConfigError(f"STAGEOUT_ACCOUNTS: {name} is root; name accounts that are used for nothing else")
    return Account(name, found.pw_uid, found.pw_gid)


def deadline_of(sandbox: Sandbox, rules: Rules) -> float:
    """Wall clock by which a sandbox must have been sent: the end of its credential or pilot, or when it is given up."""
    return min(
        sandbox.due_since + rules.retry.delivery_timeout_s,
        *(at or math.inf for at in (sandbox.deadline_at, rules.pilot_end)),
    )


def last_attempt_at(sandbox: Sandbox, rules: RetryRules) -> int:
    """Return the time of a sandbox's last attempt at the latest (``decide_retry``), 0 before a failure and at the end.

    The time is wall clock, in seconds.
    """
    if sandbox.state not in SENDABLE or not sandbox.attempts:
        return 0
    waits_for_one = ErrorClass.from_code(sandbox.error_code).advice is Advice.NEEDS_CREDENTIAL
    limit_s = rules.credential_timeout_s if waits_for_one else 0.0
    return int(sandbox.due_since + max(rules.delivery_timeout_s, limit_s))


def _cpus(settings: Settings) -> int:
    for name in ("NUM_CPUS", "DETECTED_CPUS"):
        value = int(_number(settings.condor(name), 0))
        if value > 0:
            return value
    return os.cpu_count() or 1


def _number(text: str, default: float) -> float:
    """Return a parameter of HTCondor itself, or the default if it is an expression."""
    try:
        return float(text)
    except ValueError:
        return default
