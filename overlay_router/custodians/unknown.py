"""Data in a custodian's spool that its records do not know, and that may be the only copies of accepted files.

A router that died while it took a pack leaves one, and nobody was promised anything. A database that is older than its
spool (it came out of a backup) leaves some too, and those were accepted. The two look the same, so each is set aside in
``unknown/`` and kept as long as an operation may live. When the newest database is put back its data go back to their
place.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from stageout.core import durable, log
from stageout.movers import trees
from stageout.overlay.wire.messages import MAX_CLOCK_SKEW_S
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S

_KEPT_S = MOST_EXPIRES_AFTER_S + MAX_CLOCK_SKEW_S
_ADVICE = (
    "the database of the spool has no record of it. If an old database was put back, stop the router and put the newest"
    f" one in its place; else leave it: it is deleted after {_KEPT_S // 86400} days"
)


class Unknown:
    """List the data that were set aside. :param spool: the directory of the spool."""

    def __init__(self, spool: Path) -> None:
        self._place = spool / "unknown"

    def numbers(self) -> list[int]:
        """Transfers whose data were set aside."""
        return [int(name) for name in self._names() if name.isdecimal()]

    def set_aside(self, strays: Collection[Path]) -> None:
        """Move data that the records do not know. :raises OSError: some could not be moved."""
        if not strays:
            return
        with suppress(FileExistsError):
            durable.disk.mkdir(self._place, 0o700)
        here = set(self._names())
        targets = {path: self._place / _free_name(path.name, here) for path in strays}
        _move("router-aside", targets)
        durable.sync("router-aside", self._place.parent)
        names = sorted(path.name for path in targets.values())
        log.error("unknown-custody-found", files=len(names), first=names[0], directory=self._place, advice=_ADVICE)

    def take_back(self, wanted: Iterable[Path]) -> None:
        """Move data that the records know back to their place, if nothing is there. :raises OSError: it failed."""
        here = set(self._names())
        back = [path for path in wanted if path.name in here and not os.path.lexists(path)]
        if back:
            _move("router-take-back", {self._place / path.name: path for path in back})
            log.event("unknown-custody-recovered", files=len(back), first=back[0].name)

    def expire(self, now: float) -> None:
        """Remove what was set aside so long ago that its operation has expired."""
        try:
            old = [name for name in self._names() if durable.disk.lstat(self._place / name).st_ctime < now - _KEPT_S]
            for name in old:
                trees.remove(self._place, name)
        except OSError as problem:
            log.error("custody-release-failed", path=self._place, problem=problem, advice="check the disk of the spool")
            return
        if old:
            log.event("unknown-custody-deleted", files=len(old), first=old[0])

    def _names(self) -> list[str]:
        try:
            return sorted(durable.disk.listdir(self._place))
        except FileNotFoundError:
            return []


def _free_name(name: str, taken: Collection[str]) -> str:
    """The name, with a number behind it where it is taken: a pack may have come twice."""
    others = (f"{name}.{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], others) if one not in taken)


def _move(label: str, targets: dict[Path, Path]) -> None:
    """Rename all; their directories are on the disk on return, the new ones first."""
    with durable.step(label):
        for source, target in targets.items():
            durable.disk.rename(source, target)
    for place in {**{path.parent: None for path in targets.values()}, **{path.parent: None for path in targets}}:
        durable.sync(label, place)
