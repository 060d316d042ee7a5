"""The knobs of this plugin, from the HTCondor configuration: a job can change neither them nor where tokens go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.config import ConfigError, Settings, tool_settings
from stageout.core.errors import ErrorClass, TransferFailure

PREFIX = "STAGEOUT_GLOBUS_"
#: Queries about a running task for each lease, and the bounds of the seconds between two of them.
_POLLS, _LEAST_POLL_S, _MOST_POLL_S = 180, 0.1, 15.0
#: Factor by which the plugin waits longer for a collection that its administrator has paused than for a slow one.
_PAUSES = 4
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True)
class LocalCollection:
    """The collection that contains this node's files.

    :param paths: directories of this node, and their paths in the collection.
    """

    collection: str
    paths: tuple[tuple[Path, Path], ...]

    def there(self, path: Path) -> str | None:
        """Return the collection's path of a file of this node; None when the collection does not contain it."""
        fits = [(here, there) for here, there in self.paths if here == path or here in path.parents]
        if not fits:
            return None
        here, there = max(fits, key=lambda pair: len(pair[0].parts))
        return str(there / path.relative_to(here))


@dataclass(frozen=True)
class GlobusSettings:
    """The knobs; names as in :data:`stageout.core.config.KNOBS` without the prefix, times in seconds."""

    transfer_url: str
    credential: str
    sync: str
    local: LocalCollection | None = None
    personal: str = ""
    collections: Mapping[str, str] = field(default_factory=dict)
    lease_s: float = 2700.0
    tasks: int = 2
    task_files: int = 10000
    fault_patience_s: float = 60.0
    stall_s: float = 900.0

    @property
    def poll_s(self) -> float:
        """Seconds between two queries about a running task: many in a lease, so that it is renewed in time."""
        return max(_LEAST_POLL_S, min(_MOST_POLL_S, self.lease_s / _POLLS))

    @property
    def pause_s(self) -> float:
        """Seconds to wait for a task that Globus has paused."""
        return _PAUSES * self.stall_s


def read_settings(source: Settings | None = None) -> GlobusSettings:
    """Read all knobs.

    :param source: their values; None: the HTCondor configuration.
    :raises TransferFailure: PLUGIN_BROKEN for an invalid value; the text names the knob.
    """
    found = source or tool_settings(PREFIX)
    try:
        return GlobusSettings(
            transfer_url=found.text(f"{PREFIX}TRANSFER_URL"),
            credential=found.text(f"{PREFIX}CREDENTIAL"),
            sync=found.text(f"{PREFIX}SYNC").lower(),
            local=local_collection(found.text(f"{PREFIX}LOCAL")),
            personal=found.text(f"{PREFIX}PERSONAL"),
            collections=named_collections(found.text(f"{PREFIX}COLLECTIONS")),
            lease_s=found.number(f"{PREFIX}LEASE"),
            tasks=found.count(f"{PREFIX}TASKS"),
            task_files=found.count(f"{PREFIX}TASK_FILES"),
            fault_patience_s=found.number(f"{PREFIX}FAULT_PATIENCE"),
            stall_s=found.number(f"{PREFIX}STALL"),
        )
    except ConfigError as problem:
        raise TransferFailure(ErrorClass.PLUGIN_BROKEN, f"the node's configuration: {problem}") from None


def local_collection(text: str) -> LocalCollection | None:
    """Parse ``UUID /here=/there, ...``; None for an empty text. Without paths all paths are the same in the collection.

    :raises ConfigError: the text is invalid.
    """
    if not text.strip():
        return None
    uuid, _, rest = text.strip().partition(" ")
    paths = []
    for pair in filter(None, (part.strip() for part in rest.split(","))) if rest.strip() else ("/=/",):
        here, mark, there = (word.strip() for word in pair.partition("="))
        if not mark or not here.startswith("/") or not there.startswith("/"):
            raise ConfigError(f"{PREFIX}LOCAL = {text}: write UUID /directory/here=/directory/there, ...")
        paths.append((Path(here), Path(there)))
    if not UUID.fullmatch(uuid.lower()):
        raise ConfigError(f"{PREFIX}LOCAL = {text}: it must begin with the UUID of a collection")
    return LocalCollection(uuid.lower(), tuple(paths))


def named_collections(text: str) -> dict[str, str]:
    """Parse ``NAME=UUID, ...``, with names in lower case.

    :raises ConfigError: the text is invalid.
    """
    names = {}
    for pair in filter(None, (part.strip() for part in re.split(r"[,\s]+", text))):
        name, mark, uuid = pair.partition("=")
        if not mark or not name or not UUID.fullmatch(uuid.lower()):
            raise ConfigError(f"{PREFIX}COLLECTIONS: cannot read {pair!r}; write NAME=UUID, NAME=UUID, ...")
        names[name.lower()] = uuid.lower()
    return names
