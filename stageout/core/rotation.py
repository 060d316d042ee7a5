"""Log files of the daemons, with the settings that HTCondor's own daemons have for theirs.

``MAX_<SUBSYS>_LOG``, ``MAX_DEFAULT_LOG``, ``MAX_NUM_<SUBSYS>_LOG``, ``<SUBSYS>_DEBUG``, ``DEFAULT_DEBUG`` and
``ALL_DEBUG`` mean what HTCondor's manual says (*Configuration Macros*, "Daemon Logging Configuration File Entries");
``dprintf_config.cpp`` is the source of the details.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from logging import Handler
from logging.handlers import RotatingFileHandler, TimedRotatingFileHandler
from pathlib import Path

from stageout.core.config import ConfigError, Settings

_DEFAULT_SIZE = "10 Mb"
_BYTES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: Categories of HTCondor whose second level asks for all messages.
_EVERYTHING = frozenset({"D_ALWAYS", "D_ALL", "D_ANY"})


class _BySize(RotatingFileHandler):
    """A file that cannot be put aside grows on: its lines matter more than its size."""

    def doRollover(self) -> None:
        try:
            super().doRollover()
        except OSError:
            self.stream = self._open()


class _ByAge(TimedRotatingFileHandler):
    """The same by age, in fixed periods: opening the file again begins no new period."""

    def computeRollover(self, currentTime: int) -> int:
        return (int(currentTime) // self.interval + 1) * self.interval

    def doRollover(self) -> None:
        try:
            super().doRollover()
        except OSError:
            self.stream = self._open()


@dataclass(frozen=True)
class LogSettings:
    """Settings of one daemon's log.

    :param size_bytes: a file of this size is put aside; 0: never. :param age_s: a file of this age is put aside; 0:
        never.
    :param old_files: files that were put aside and are kept. :param is_debug: more messages are wanted.
    :param is_json: each event is a JSON object.
    """

    size_bytes: int
    age_s: int
    old_files: int
    is_debug: bool
    is_json: bool = False

    def handler(self, path: Path) -> Handler:
        """Open the file. :raises OSError: it cannot be written."""
        if self.age_s:
            return _ByAge(path, "S", self.age_s, self.old_files)
        handler = _BySize(path, maxBytes=self.size_bytes, backupCount=self.old_files)
        if self.old_files == 1:
            handler.namer = lambda _: f"{path}.old"  # as HTCondor's daemons name theirs
        return handler


def log_settings(settings: Settings, subsystem: str) -> LogSettings:
    """Read the settings of a daemon's log. :raises ConfigError: one cannot be used."""
    name = f"MAX_{subsystem}_LOG"
    text = settings.condor(name)
    if not text:
        name, text = "MAX_DEFAULT_LOG", settings.condor("MAX_DEFAULT_LOG") or _DEFAULT_SIZE
    size_bytes, age_s = _limit(name, text)
    is_json = settings.text("STAGEOUT_LOG_FORMAT").lower() == "json"
    return LogSettings(
        size_bytes=size_bytes,
        age_s=age_s,
        old_files=_old_files(settings, subsystem),
        is_debug=_is_debug(settings, subsystem),
        is_json=is_json,
    )


def _limit(name: str, text: str) -> tuple[int, int]:
    """Return size in bytes and age in seconds; one is 0. A lone M means MB, a lone m minutes."""
    found = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    unit = found[2].lower() if found else ""
    is_minutes = found is not None and (found[2] == "m" or (unit.startswith("mi") and unit[2:3] != "b"))
    if found and (is_minutes or unit[:1] in ["s", "h", "d", "w"]):
        return 0, int(found[1]) * _SECONDS[unit[0]]
    if found and unit[:1] in _BYTES:
        return int(found[1]) * _BYTES[unit[:1]], 0
    raise ConfigError(f"{name} = {text}: write a number with a unit: B, Kb, Mb, Gb, or Sec, Min, Hr, Day, Week")


def _old_files(settings: Settings, subsystem: str) -> int:
    name = f"MAX_NUM_{subsystem}_LOG"
    text = settings.condor(name).strip() or "1"
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text}: write the number of old log files to keep")
    return max(1, int(text))  # HTCondor keeps one for 0, too


def _is_debug(settings: Settings, subsystem: str) -> bool:
    own = settings.condor(f"{subsystem}_DEBUG") or settings.condor("DEFAULT_DEBUG")
    wanted = False
    for word in re.split(r"[|,\s]+", f"{settings.condor('ALL_DEBUG')} {own}".upper()):
        name, _, digit = word.lstrip("+-").partition(":")
        level = int(digit) if digit.isdecimal() else int(not word.startswith("-"))
        if name == "D_FULLDEBUG":
            wanted = level > 0
        elif name in _EVERYTHING:
            wanted = level > 1
    return wanted
