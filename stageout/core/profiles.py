"""Measurements of servers, one file for each: written by ``stageout profile``, read by estimator and manager.

A profile is a hint: who cannot read one goes on without it. Its form is described in ``docs/user/estimate.md``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stageout.core import durable

SCHEMA = 1
_FRESH_S = 30 * 86400.0


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    :param direction: "upload" or "download". :param file_bytes: size of each file. :param block_bytes: 0: the
        plugin's own choice. :param streams: of each file. :param concurrency: files at once.
    :param rate_bytes_per_s: of all files together. :param client_cpu_s: user and system time of the plugin.
    :param server_cpu_s: the same of a server on this machine, None elsewhere. :param client_rss_bytes: most memory.
    :param reserved: the file's space was reserved before it was written; None where that was not looked at.
    """

    direction: str
    file_bytes: int
    streams: int
    concurrency: int
    block_bytes: int
    moved_bytes: int
    seconds: float
    rate_bytes_per_s: float
    client_cpu_s: float
    client_rss_bytes: int
    server_cpu_s: float | None = None
    server_rss_bytes: int | None = None
    reserved: bool | None = None

    @property
    def all_at_once(self) -> bool:
        """No file waited for another's end: it tells of files at once, not of many small files."""
        return self.moved_bytes <= self.file_bytes * self.concurrency


@dataclass(frozen=True)
class Best:
    """The fewest streams and files at once that come near the best rate seen."""

    streams: int
    concurrency: int
    rate_bytes_per_s: float


@dataclass(frozen=True)
class Profile:
    """All about one server.

    :param server: host and port as in its URLs, lower case. :param at: wall clock of the measurement.
    :param best: by direction.
    """

    server: str
    scheme: str
    at: int
    best: Mapping[str, Best] = field(default_factory=dict)
    runs: Sequence[Measurement] = ()

    def fresh(self, now_s: float | None = None) -> bool:
        """Tell whether the profile is at most 30 days old."""
        return 0 <= (time.time() if now_s is None else now_s) - self.at <= _FRESH_S

    def as_json(self) -> dict[str, Any]:
        """Convert the profile to the stored form."""
        return {"schema": SCHEMA, **asdict(self)}


def file_of(folder: Path, server: str) -> Path:
    """Return the path of a server's profile."""
    return folder / f"{quote(server.lower() or 'local', safe='.-')}.json"


def save(folder: Path, profile: Profile) -> Path:
    """Keep a profile; on return it is on the disk and readable by all.

    :raises OSError: the directory cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, profile.server)
    durable.write_file("profile-store", path, (json.dumps(profile.as_json(), indent=1) + "\n").encode(), 0o644)
    return path


def load(folder: Path, server: str) -> Profile | None:
    """Load the profile of a server. Return None when there is none that can be read."""
    try:
        content = json.loads(file_of(folder, server).read_text())
        if content.pop("schema") != SCHEMA:
            return None
        content["best"] = {name: Best(**best) for name, best in content["best"].items()}
        content["runs"] = tuple(Measurement(**run) for run in content["runs"])
        return Profile(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def good_for_uploads(folder: Path, server: str) -> Best | None:
    """Return the best parameters for uploads to a server; None when unknown or outdated."""
    profile = load(folder, server)
    return profile.best.get("upload") if profile is not None and profile.fresh() else None
