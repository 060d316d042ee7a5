"""The knobs of this plugin: ``STAGEOUT_<NAME>`` in the starter's environment or in the machine's ad."""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Request


class ChecksumPolicy(enum.Enum):
    """Verification of a destination or a source in addition to the answer to the transfer."""

    OFF = "off"
    IF_AVAILABLE = "if-available"
    REQUIRED = "required"


@dataclass(frozen=True)
class Settings:
    """Knobs that count for one file.

    :param connect_timeout_s: Seconds to wait for name look-up, connection and TLS handshake together.
    :param stall_window_s: Seconds in which a transfer must keep its least rate before it counts as stalled.
    :param stall_bytes_per_s: Least rate of a transfer, in bytes per second.
    :param response_timeout_s: Seconds to wait for the server's answer while no data moves.
    :param retry_budget_s: Seconds for all attempts without progress while the server answers.
    :param reconnect_budget_s: Seconds for further attempts while no connection is possible.
    :param split_bytes: Size, in bytes, up to which a file moves over one connection.
    :param reserve_space: True: a ``file`` destination reserves the whole size before the first byte is written.
    :param checksum_policy: Checks of a transfer: ``off``, ``if-available`` or ``required``.
    """

    connect_timeout_s: float = 30.0
    stall_window_s: float = 30.0
    stall_bytes_per_s: float = 1.0
    response_timeout_s: float = 300.0
    retry_budget_s: float = 10.0
    reconnect_budget_s: float = 210.0
    split_bytes: int = 32 << 20
    reserve_space: bool = False
    checksum_policy: ChecksumPolicy = ChecksumPolicy.IF_AVAILABLE


_TEST_S = 5.0
_TEST_FILE, _TEST_FOLDER = "test_file", "test_file_transfer."


def is_test_url(request: Request, context: Context) -> bool:
    """Tell whether HTCondor tests a scheme with ``<SCHEME>_TEST_URL``. Every start of a job waits for this test.

    condor_starter gives the file this name, in a directory of its own or in the job's; the job did not ask for the URL.
    """
    path = Path(request.local_path)
    if path.name != _TEST_FILE:
        return False
    wanted = context.job_attribute("TransferInput")
    return path.parent.name.startswith(_TEST_FOLDER) or request.url not in (wanted if isinstance(wanted, str) else "")


def for_test_url(settings: Settings) -> Settings:
    """Return settings for one attempt at a test URL: a server that is silent for seconds counts as broken."""
    short = {"connect_timeout_s": _TEST_S, "stall_window_s": _TEST_S, "response_timeout_s": _TEST_S}
    lower = {name: min(limit, getattr(settings, name)) for name, limit in short.items()}
    return replace(settings, **lower, retry_budget_s=0.0, reconnect_budget_s=0.0)


def in_data_slot() -> bool:
    """Tell whether the sandbox manager runs this plugin. Then no job waits, and the manager schedules retries."""
    return bool(os.environ.get("STAGEOUT_MOVER"))


def value_of(data: Mapping[str, Any], name: str) -> Any | None:
    """Return a value of PluginData. ClassAd names are case-insensitive."""
    return next((value for key, value in data.items() if key.lower() == name.lower()), None)


def read_settings(context: Context, data: Mapping[str, Any]) -> Settings:
    """Read the knobs for one file. Log an invalid number, and use its default.

    :param data: PluginData of the file; its ``checksum_policy`` takes precedence over the knob.
    :raises TransferFailure: BAD_REQUEST for an unknown checksum policy, because a guess could skip the verification.
    """
    numbers = {}
    for name in ("connect_timeout_s", "stall_window_s", "stall_bytes_per_s", "response_timeout_s", "retry_budget_s"):
        default: float = getattr(Settings, name)
        numbers[name] = _number(context, name.upper(), default)
    both = context.setting("RETRY_BUDGET_S", "")  # one knob is enough for an administrator
    counted_s = (
        math.inf if most_retries(context) else Settings.reconnect_budget_s
    )  # then only the number of attempts is limited
    reconnect_s = numbers["retry_budget_s"] if both else counted_s
    numbers["reconnect_budget_s"] = _number(context, "RECONNECT_BUDGET_S", reconnect_s)
    split_bytes = max(1, int(_number(context, "SPLIT_BYTES", Settings.split_bytes)))
    given = value_of(data, "checksum_policy")
    word = context.setting("CHECKSUM_POLICY", ChecksumPolicy.IF_AVAILABLE.value) if given is None else given
    reserve = context.setting("RESERVE_SPACE", "false").strip().lower() in ("true", "yes", "1")
    return Settings(**numbers, split_bytes=split_bytes, reserve_space=reserve, checksum_policy=_policy(word))


def _number(context: Context, name: str, default: float) -> float:
    text = context.setting(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value >= 0:
        return value
    context.log(f"STAGEOUT_{name} is not a number of seconds or bytes; its default holds", given=text, default=default)
    return default


def _policy(word: object) -> ChecksumPolicy:
    try:
        return ChecksumPolicy(str(word).strip().lower().replace("_", "-"))
    except ValueError:
        text = f"checksum policy {word!r} does not exist: write off, if-available or required"
        raise TransferFailure(ErrorClass.BAD_REQUEST, text) from None


def most_retries(context: Context) -> int | None:
    """Return the number of retries from HTCondor's own variables, the administrator's first; None if unset."""
    return positive_number(context, "CONDOR_CURL_MAX_RETRY_ATTEMPTS", "CURL_MAX_RETRY_ATTEMPTS")


def positive_number(context: Context, *names: str) -> int | None:
    """Return the number in the first of these variables that is set, as HTCondor's own plugin reads it.

    HTCondor passes ``CURL_...`` of a job only to its own plugin, by the plugin's name. This plugin reads them from the
    job's ad. As there, they take precedence over the starter's variables.

    :returns: None if none is set, or the value is no number above 0.
    """
    text = next((text for name in names if (text := _variable(context, name)) is not None), "")
    found = re.match(r"\s*\+?(\d{1,9})", text)
    return int(found[1]) or None if found else None


def _variable(context: Context, name: str) -> str | None:
    environment = context.job_attribute("Environment") if name.startswith("CURL_") else None
    found = re.search(rf"(?:^|[\s'])'?{name}='?([^\s']*)", environment) if isinstance(environment, str) else None
    return found[1] if found else os.environ.get(name)
